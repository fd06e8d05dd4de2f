"""From a thread to the event loop and back."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopEnded(Exception):
    """The event loop, or the work that was waited for, was ended: the thread has nobody left to work for."""


class LoopCalls:
    """Runs coroutines on the event loop that is running when this is made, for one other thread that waits for them.

    So a client that does not read holds its own thread back.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running: concurrent.futures.Future[Any] | None = None
        self._ended = False

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns or raises. LoopEnded where it, or the loop, was ended."""
        try:
            if self._ended:
                raise RuntimeError
            self._running = future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise LoopEnded from None
        if self._ended:  # between the look and the beginning: end() did not find it
            future.cancel()
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise LoopEnded from None

    def end(self) -> None:
        """End the work that is waited for, begin none any more. From the event loop."""
        self._ended = True
        if self._running is not None:
            self._running.cancel()

    def tell(self, event: asyncio.Event) -> None:
        """Set an event of the loop, if that is still there."""
        try:
            self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            return
