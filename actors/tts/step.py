"""The state that the guided step takes from step to step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import mlx.core as mx

from vcpipe.actors.tts.cache import CacheLayout


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state to begin sessions from, with no slot to spare. It is never written to.

    ``code_sum``: (1, 1, Z) of the previous codes. ``position``: of the next step. ``key``: of its first draw. ``entries``: what
    the slots of each layer hold.
    """

    code_sum: mx.array
    position: int
    key: mx.array
    entries: list[mx.array]


@dataclass(slots=True)
class DecoderState:
    """Everything that changes from step to step, as in :class:`Snapshot`; buffers in ``caches`` are written in place."""

    code_sum: mx.array
    position: int
    key: mx.array
    caches: list[mx.array]

    @classmethod
    def open(cls, snapshot: Snapshot, layout: CacheLayout, key: mx.array | None = None) -> DecoderState:
        """A state of its own from ``snapshot``, with another key where one is given."""
        caches = layout.open(snapshot.entries, snapshot.position)
        mx.eval(caches)
        return cls(snapshot.code_sum, snapshot.position, snapshot.key if key is None else key, caches)

    def snapshot(self, layout: CacheLayout) -> Snapshot:
        """A copy to begin from."""
        entries = layout.held(self.caches, self.position)
        mx.eval(entries)
        return Snapshot(self.code_sum, self.position, self.key, entries)


class SnapshotStore:
    """The ``capacity`` snapshots used last."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[Hashable, Snapshot] = OrderedDict()

    def get(self, name: Hashable) -> Snapshot | None:
        """The snapshot kept under ``name``, if it still is."""
        if name in self._held:
            self._held.move_to_end(name)
        return self._held.get(name)

    def put(self, name: Hashable, snapshot: Snapshot) -> None:
        """Keep ``snapshot``; the one unused for longest goes where there are too many."""
        self._held[name] = snapshot
        self._held.move_to_end(name)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()
