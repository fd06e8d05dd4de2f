"""Messages on their way to one client: bounded, so that a client that does not read slows its own session and nothing else."""

from __future__ import annotations

import asyncio
from collections import deque


class Outbox:
    """A queue of ``limit`` messages for one reader. For one event loop.

    Who puts more waits until there is room. After :meth:`close` what was put is still read, what comes is discarded.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._messages: deque[tuple[str, bool]] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    async def put(self, message: str, *, stale_on_cancel: bool = False) -> None:
        """Queue a message; ``stale_on_cancel``: :meth:`drop_stale` may take it out again."""
        while not self.put_now(message, stale_on_cancel=stale_on_cancel) and not self._closed:
            await self._change()

    def put_now(self, message: str, *, stale_on_cancel: bool = False) -> bool:
        """Queue a message if there is room; returns whether it was."""
        if self._closed or len(self._messages) >= self._limit:
            return False
        self._messages.append((message, stale_on_cancel))
        self._wake()
        return True

    async def get(self) -> str | None:
        """The next message; None once it is closed and empty."""
        while not self._messages:
            if self._closed:
                return None
            await self._change()
        message, _ = self._messages.popleft()
        self._wake()
        return message

    def drop_stale(self) -> None:
        """Take out what a cancel has made stale."""
        self._messages = deque(item for item in self._messages if not item[1])
        self._wake()

    def close(self) -> None:
        """Nothing more is taken."""
        self._closed = True
        self._wake()

    async def _change(self) -> None:
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
