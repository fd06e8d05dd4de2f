"""How far ahead of its client's acknowledgements a voice may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class AckWindow:
    """Numbers messages from 0 on; at most ``size`` of them may be unacknowledged. For one event loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        #: Numbers given so far.
        self.sent = 0
        self._acknowledged = 0
        self._acknowledged_at = 0.0
        self._moved = asyncio.Event()

    @property
    def unacknowledged(self) -> int:
        """Messages on their way."""
        return self.sent - self._acknowledged

    def number(self) -> int:
        """The next message's."""
        self.sent += 1
        return self.sent - 1

    def acknowledge(self, sequence: int) -> None:
        """All up to this number have arrived. An older number means nothing."""
        if sequence >= self._acknowledged:
            self._acknowledged = sequence + 1
            self._acknowledged_at = asyncio.get_running_loop().time()
            self.wake()

    def forget(self) -> None:
        """What is on its way was dropped."""
        self._acknowledged = self.sent
        self.wake()

    def wake(self) -> None:
        """Let those who wait look again."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def room(self, over: Callable[[], bool], stall_s: float) -> bool:
        """Wait for room for one more; False where it is ``over`` first.

        asyncio.TimeoutError where nothing was acknowledged for ``stall_s``.
        """
        loop = asyncio.get_running_loop()
        full_since = loop.time()
        while not over():
            if self.unacknowledged < self.size:
                return True
            by = max(full_since, self._acknowledged_at) + stall_s
            await asyncio.wait_for(self._moved.wait(), by - loop.time())
        return False
