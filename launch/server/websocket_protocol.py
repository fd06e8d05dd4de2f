"""uvicorn's WebSocket, but for how it takes leave of a client whose message is too long."""

from __future__ import annotations

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

#: Such a connection is closed when nothing more came for so many seconds, and after so many at the latest.
_QUIET_S, _LINGER_S = 0.2, 5.0


class LingeringProtocol(WebSocketsSansIOProtocol):
    """Reads on, and discards, after a message that it refuses.

    To close at once, with the rest of the message unread, would reset the connection, and the client would often see that
    instead of close code 1009 and its reason.
    """

    _refused_at: float | None = None

    def handle_parser_exception(self) -> None:
        """Say what was wrong, once; called again for all that comes after it."""
        now = self.loop.time()
        if self._refused_at is None:
            self._refused_at = now
            self._say_why()
        if self.close_timer is not None:
            self.close_timer.cancel()
        left_s = self._refused_at + _LINGER_S - now
        self.close_timer = self.loop.call_later(max(min(_QUIET_S, left_s), 0.0), self.transport.close)

    def _say_why(self) -> None:
        close = self.conn.close_sent
        assert close is not None
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
