"""uvicorn's HTTP, but for what becomes of long answers when the server is stopped."""

from __future__ import annotations

from uvicorn.protocols.http.h11_impl import H11Protocol


class StoppingProtocol(H11Protocol):
    """Ends an answer on its way when the server is stopped, as WebSockets are ended.

    uvicorn would let it run until its time limit and then cancel it: a minute of speech is not over in two seconds.
    """

    def shutdown(self) -> None:
        """The server is being stopped. What was written is still sent; the application is told that the client is gone."""
        super().shutdown()
        if not self.transport.is_closing():
            self.transport.close()
