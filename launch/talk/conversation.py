"""Both directions of a session at once: what a source gives goes to the server, what the server says to the listeners."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np

from vcpipe.launch.talk.connection import Connection, Message, describe_error
from vcpipe.schemas.errors import RemoteError


class Source(Protocol):
    """Where the audio for the server comes from."""

    def frames(self) -> AsyncIterator[np.ndarray]:
        """Pieces of (n,) float32 at the session's input rate, a frame at most, at the pace at which they should be sent."""

    def stop(self) -> None:
        """No more: ``frames`` gives what it has in hand, and ends."""


class Listener(Protocol):
    """Who wants to know what the server says."""

    def take(self, message: Message) -> None:
        """Called with every message, in order. Must not wait."""


class Interrupts:
    """Ctrl-C inside the block: the first one calls ``stop`` once that is set, any other cancels the running task."""

    def __init__(self) -> None:
        self.stop: Callable[[], None] | None = None
        self.stopped = False

    def __enter__(self) -> Interrupts:
        self._task = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._pressed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _pressed(self) -> None:
        if self.stop is not None and not self.stopped:
            self.stopped = True
            self.stop()
        elif self._task is not None:
            self._task.cancel()


async def converse(connection: Connection, source: Source, listeners: Sequence[Listener]) -> None:
    """Send and listen until the server has said its last word. Returns after ``response.done``.

    An error of the server closes the input, so that what it has worked on still arrives, and is raised at the end as
    RemoteError; so is an end of any other kind. An error of the source ends it at once.
    """
    sender = asyncio.create_task(_send(connection, source, trouble := _Trouble()))
    receiver = asyncio.create_task(_receive(connection, source, listeners, trouble))
    try:
        await asyncio.wait({sender, receiver}, return_when=asyncio.FIRST_COMPLETED)
        if not receiver.done():
            sender.result()
        await receiver
    finally:
        for task in (sender, receiver):
            task.cancel()
        await asyncio.gather(sender, receiver, return_exceptions=True)
    if trouble.errors:
        raise RemoteError(trouble.errors[0])


class _Trouble:
    """What the two directions tell each other: errors so far, and whether the input is closed."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.committed = False


async def _send(connection: Connection, source: Source, trouble: _Trouble) -> None:
    # A connection that ended is the receiver's to report: it has read what the server said before.
    with contextlib.suppress(RemoteError):
        async for samples in source.frames():
            if trouble.errors:
                break
            await connection.append(samples)
        trouble.committed = True
        await connection.commit(pad_partial=not trouble.errors)


async def _receive(connection: Connection, source: Source, listeners: Sequence[Listener], trouble: _Trouble) -> None:
    try:
        async for message in connection.messages():
            for listener in listeners:
                listener.take(message)
            if message["type"] == "response.cancelled":
                raise RemoteError("the server cancelled the session; start another one")
            if message["type"] == "error":
                trouble.errors.append(describe_error(message))
                if trouble.committed:
                    # Nobody can tell whether more follows.
                    return
                source.stop()
    except RemoteError as ended:
        # The error that came first is why it ended.
        raise RemoteError(trouble.errors[0] if trouble.errors else str(ended)) from None
