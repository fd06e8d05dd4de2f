"""The session slots: taken in one step, given back on every way out."""

from __future__ import annotations

import asyncio
import contextlib

#: Most connections that wait for a slot at a time; more are refused at once.
_MAX_WAITING = 64


class Slot:
    """One of the slots while it is held."""

    def __init__(self, reservations: Reservations) -> None:
        self._reservations: Reservations | None = reservations
        self._leaving = False

    def leave(self) -> None:
        """Its session has ended and is being freed: whoever comes now may wait a little longer."""
        if self._reservations is not None and not self._leaving:
            self._leaving = True
            self._reservations.changed(taken=0, leaving=1)

    def release(self) -> None:
        """Give it back. Idempotent."""
        if self._reservations is not None:
            self._reservations.changed(taken=-1, leaving=-1 if self._leaving else 0)
            self._reservations = None


class Reservations:
    """``slots`` of them. For one event loop.

    A newcomer waits ``grace_s`` for a slot, so that a client that left without a word may come back at once; up to
    ``leaving_s`` where a slot's session is already being freed.
    """

    def __init__(self, slots: int, grace_s: float = 0.25, leaving_s: float = 12.0) -> None:
        self._slots = slots
        self._grace_s = grace_s
        self._leaving_s = leaving_s
        self._leaving = 0
        self._waiting = 0
        self._change = asyncio.Event()
        #: Slots that are held.
        self.taken = 0

    def try_reserve(self) -> Slot | None:
        """A slot, or None where all are held. Nothing can come between the look and the taking."""
        if self.taken >= self._slots:
            return None
        self.taken += 1
        return Slot(self)

    async def reserve(self) -> Slot | None:
        """A slot, waited for as said above; None: all are held."""
        slot = self.try_reserve()
        if slot is not None or self._waiting >= _MAX_WAITING:
            return slot
        started = asyncio.get_running_loop().time()
        self._waiting += 1
        try:
            while slot is None:
                patience_s = self._leaving_s if self._leaving else self._grace_s
                left_s = started + patience_s - asyncio.get_running_loop().time()
                if left_s <= 0:
                    return None
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._change.wait(), left_s)
                slot = self.try_reserve()
            return slot
        finally:
            self._waiting -= 1

    def changed(self, *, taken: int, leaving: int) -> None:
        """Count a slot's change and wake those who wait. For :class:`Slot`."""
        self.taken += taken
        self._leaving += leaving
        self._change.set()
        self._change = asyncio.Event()
