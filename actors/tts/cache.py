"""Key/value buffers of the backbone.

Every layer owns one preallocated buffer (2 * B, heads, capacity, width), keys before values, that is written by position and
doubled when full. A layer with a window never needs more than the window: once full, its buffer is a ring. Rotary positions
are absolute, so the order inside the ring does not matter to attention. Slots not written yet hold the empty slot, which
attention does not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

#: Slots a buffer has at first.
_FIRST_CAPACITY = 256

#: Positions for which sizes are foreseen: see :meth:`CacheLayout.later_sizes`.
_FORESEEN = 8192

#: The axis of the slots.
_SLOTS = 2


class CacheLayout:
    """Places positions in the buffers of layers with the given windows (None: no window).

    ``prefill``: positions written at once at the start; of more than a window only the last ones are kept. ``empty_slot``:
    (2, 1, 1, 1, width), its key and its value.
    """

    def __init__(self, windows: Sequence[int | None], prefill: int, empty_slot: mx.array) -> None:
        self.windows = tuple(windows)
        self.prefill = prefill
        #: The different windows, and which of them each layer has.
        self.kinds = tuple(dict.fromkeys(self.windows))
        self.kind_of = tuple(self.kinds.index(window) for window in self.windows)
        self._empty_slot = empty_slot

    def open(self, entries: Sequence[mx.array]) -> list[mx.array]:
        """What the slots hold, from slot 0 on, a layer each -> buffers with room; ``entries`` are not written to."""
        buffers = []
        for window, held in zip(self.windows, entries, strict=True):
            if window is not None and held.shape[_SLOTS] > window:
                held = held[:, :, -window:]
            capacity = _FIRST_CAPACITY
            while capacity < held.shape[_SLOTS]:
                capacity *= 2
            buffers.append(self._padded(held, capacity if window is None else min(capacity, window)))
        return buffers

    def held(self, buffers: Sequence[mx.array], position: int) -> list[mx.array]:
        """The written slots of buffers that have all positions before ``position``, as new arrays: see :meth:`open`."""
        return [mx.contiguous(buffer[:, :, : min(position, buffer.shape[_SLOTS])]) for buffer in buffers]

    def later_sizes(self, buffers: list[mx.array]) -> Iterator[list[mx.array]]:
        """``buffers`` grown once, twice and so on, as a session will meet them in its first ten minutes; not evaluated."""
        position = _FIRST_CAPACITY
        while position < _FORESEEN:
            buffers = self.make_room(buffers, position)
            yield buffers
            position *= 2

    def make_room(self, buffers: list[mx.array], position: int) -> list[mx.array]:
        """Double the buffers in which ``position`` has no slot yet; most of the time the buffers as they are."""
        capacities = [buffers[self.kind_of.index(kind)].shape[_SLOTS] for kind in range(len(self.kinds))]
        full = [self._slot(window, position) >= size for window, size in zip(self.kinds, capacities, strict=True)]
        if not any(full):
            return buffers
        return [
            self._grown(buffer, self.kinds[kind]) if full[kind] else buffer
            for kind, buffer in zip(self.kind_of, buffers, strict=True)
        ]

    def slots(self, position: int) -> list[mx.array]:
        """The slot of ``position`` for each kind of window, (1, 1, 1, 1) uint32."""
        return [mx.array([[[[self._slot(window, position)]]]], mx.uint32) for window in self.kinds]

    def _slot(self, window: int | None, position: int) -> int:
        if window is None:
            return position
        # A prefill longer than the window leaves its last positions in slots 0, 1, ...: the ring starts after them.
        return (position - max(0, self.prefill - window)) % window

    def _grown(self, buffer: mx.array, window: int | None) -> mx.array:
        capacity = 2 * buffer.shape[_SLOTS]
        return self._padded(buffer, capacity if window is None else min(capacity, window))

    def _padded(self, held: mx.array, capacity: int) -> mx.array:
        rows, heads, length, width = held.shape
        room = mx.broadcast_to(self._empty_slot, (2, rows // 2, heads, capacity - length, width))
        return mx.concatenate([held, room.reshape(rows, heads, -1, width)], axis=_SLOTS)


def write(buffer: mx.array, entry: mx.array, slot: mx.array) -> mx.array:
    """``buffer`` with ``entry`` (2 * B, heads, 1, width) in its slot; in place when nothing else holds the buffer."""
    return mx.put_along_axis(buffer, slot, entry, axis=_SLOTS)
