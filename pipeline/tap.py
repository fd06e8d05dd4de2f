"""The tap: a PUB socket with copies of everything, and its reader. It may drop (``seq`` shows it); no frame waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import zmq

from vcpipe.actors.wire import bind, new_context
from vcpipe.pipeline.tracks import Delivery, FrameTiming
from vcpipe.schemas.envelope import NO_FRAME, Header, Message, pack
from vcpipe.schemas.errors import ConfigError, VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.tap import TAP, TapEvent, TapSession, TapTiming

#: Messages kept for a slow subscriber before the newest are dropped for it.
_HIGH_WATER_MARK = 4096


class TapPublisher:
    """Binds the user's endpoint. Used by the coordinator's thread alone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.PUB)
        self._socket.sndhwm = _HIGH_WATER_MARK
        self._seq = 0
        bind(self._socket, endpoint, "the tap")

    def publish(self, session: str, delivery: Delivery) -> None:
        """Send a copy to whoever listens; never waits."""
        topic, frame_index, message = _as_message(delivery)
        if message is None:
            return
        header = Header(session, 0, frame_index, self._seq, time.monotonic_ns())
        self._seq += 1
        self._socket.send_multipart([topic.encode(), *pack(header, message)], zmq.NOBLOCK)


def _as_message(delivery: Delivery) -> tuple[str, int, Message | None]:
    if isinstance(delivery, Event):
        event = TapEvent(
            delivery.kind,
            delivery.token_id,
            delivery.delta,
            delivery.text,
            delivery.sample_rate,
            delivery.samples,
            delivery.audio_codes,
        )
        return f"event.{delivery.kind}", delivery.frame_index, event
    if isinstance(delivery, FrameTiming):
        stages = [[t.stage, t.sent_ns, t.started_ns, t.finished_ns, t.spans] for t in delivery.stages.values()]
        timing = TapTiming(delivery.due_ns, delivery.sent_ns, delivery.released_ns, stages)
        return "timing", delivery.frame_index, timing
    if isinstance(delivery, VcpipeError):
        return "session", NO_FRAME, TapSession("failed", str(delivery))
    if isinstance(delivery, str):
        return "session", NO_FRAME, TapSession(delivery)
    return "", NO_FRAME, None


class TapSubscriber:
    """Reads a running pipeline's tap. A late subscriber misses what was published before; ``seq`` tells it how much."""

    def __init__(self, endpoint: str, topics: tuple[str, ...] = ("",)) -> None:
        self._context = new_context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.rcvhwm = _HIGH_WATER_MARK
        for topic in topics:
            self._socket.subscribe(topic)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"{endpoint!r} is not an endpoint: {error.strerror}; accepted: tcp://HOST:PORT, ipc://PATH"
            ) from None

    def messages(self, timeout_s: float) -> Iterator[tuple[str, Header, Any]]:
        """Topic, header and message as they come; ends when nothing came for ``timeout_s``."""
        while self._socket.poll(int(timeout_s * 1e3)):
            topic, *parts = self._socket.recv_multipart()
            yield (topic.decode(), *TAP.unpack(parts))

    def close(self) -> None:
        """Leave."""
        self._context.destroy(linger=0)

    def __enter__(self) -> TapSubscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
