"""Key/value buffers of the backbone.

A buffer (layers * 2 * B, heads, capacity, width) holds one layer, keys before values, or all layers of one window, layer after
layer. It is preallocated, written by position and doubled when full. A layer with a window never needs more than the window:
once full, its buffer is a ring. Rotary positions are absolute, so the order inside the ring does not matter to attention. Slots
not written yet hold the empty slot, which attention does not see.

Where layers share buffers they are written a step late, all of a buffer at once: behind the buffers the caches then have the
entries (layers * 2 * B, heads, 1, width) of the last position, one for each buffer, which the next step writes first of all.
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
    (2, 1, 1, 1, width), its key and its value. ``shared``: layers of the same window share a buffer.
    """

    def __init__(self, windows: Sequence[int | None], prefill: int, empty_slot: mx.array, shared: bool = False) -> None:
        self.windows = tuple(windows)
        self.prefill = prefill
        self.shared = shared
        #: The different windows, and which of them each layer has.
        self.kinds = tuple(dict.fromkeys(self.windows))
        self.kind_of = tuple(self.kinds.index(window) for window in self.windows)
        layers = range(len(self.windows))
        #: The layers of each buffer.
        self.groups = tuple(
            [tuple(i for i in layers if self.kind_of[i] == kind) for kind in range(len(self.kinds))]
            if shared
            else [(i,) for i in layers]
        )
        self._empty_slot = empty_slot

    def open(self, entries: Sequence[mx.array], position: int) -> list[mx.array]:
        """What the slots of each layer hold before ``position``, from slot 0 on -> caches; ``entries`` are not written to."""
        buffers, late = [], []
        for group in self.groups:
            window = self.windows[group[0]]
            held = mx.concatenate([entries[layer] for layer in group])
            if window is not None and held.shape[_SLOTS] > window:
                held = held[:, :, -window:]
            capacity = _FIRST_CAPACITY
            while capacity < held.shape[_SLOTS]:
                capacity *= 2
            buffers.append(self._padded(held, capacity if window is None else min(capacity, window), len(group)))
            last = self._slot(window, position - 1)
            late.append(mx.contiguous(held[:, :, last : last + 1]))  # to be written where it is already
        return buffers + late if self.shared else buffers

    def held(self, caches: Sequence[mx.array], position: int) -> list[mx.array]:
        """What the slots of each layer hold, with all positions before ``position``, as new arrays: see :meth:`open`."""
        by_layer: dict[int, mx.array] = {}
        for group, buffer in zip(self.groups, self.settled(caches, self.slots(position)), strict=True):
            written = buffer[:, :, : min(position, buffer.shape[_SLOTS])]
            by_layer |= zip(group, mx.split(written, len(group)), strict=True)
        return [mx.contiguous(by_layer[layer]) for layer in range(len(self.windows))]

    def settled(self, caches: Sequence[mx.array], slots: Sequence[mx.array]) -> list[mx.array]:
        """The buffers of ``caches``, with the last position's entries written where that is late. ``slots`` of this one."""
        buffers, late = caches[: len(self.groups)], caches[len(self.groups) :]
        if not self.shared:
            return list(buffers)
        kinds = [self.kind_of[group[0]] for group in self.groups]
        return [write(buffer, entry, slots[kind]) for buffer, entry, kind in zip(buffers, late, kinds, strict=True)]

    def later_sizes(self, caches: list[mx.array]) -> Iterator[list[mx.array]]:
        """``caches`` grown once, twice and so on, as a session will meet them in its first ten minutes; not evaluated."""
        position = _FIRST_CAPACITY
        while position < _FORESEEN:
            caches = self.make_room(caches, position)
            yield caches
            position *= 2

    def make_room(self, caches: list[mx.array], position: int) -> list[mx.array]:
        """Double the buffers in which ``position`` has no slot yet; most of the time the caches as they are."""
        windows = [self.windows[group[0]] for group in self.groups]
        buffers = caches[: len(windows)]
        full = [
            self._slot(window, position) >= buffer.shape[_SLOTS]
            for window, buffer in zip(windows, buffers, strict=True)
        ]
        if not any(full):
            return caches
        return [
            self._grown(buffer, window, len(group)) if is_full else buffer
            for buffer, window, group, is_full in zip(buffers, windows, self.groups, full, strict=True)
        ] + caches[len(windows) :]

    def slots(self, position: int) -> list[mx.array]:
        """The slot that a step at ``position`` writes, for each kind of window, (1, 1, 1, 1) uint32."""
        written = position - 1 if self.shared else position
        return [mx.array([[[[self._slot(window, written)]]]], mx.uint32) for window in self.kinds]

    def _slot(self, window: int | None, position: int) -> int:
        if window is None:
            return position
        # A prefill longer than the window leaves its last positions in slots 0, 1, ...: the ring starts after them.
        return (position - max(0, self.prefill - window)) % window

    def _grown(self, buffer: mx.array, window: int | None, layers: int) -> mx.array:
        capacity = 2 * buffer.shape[_SLOTS]
        return self._padded(buffer, capacity if window is None else min(capacity, window), layers)

    def _padded(self, held: mx.array, capacity: int, layers: int) -> mx.array:
        rows, heads, length, width = held.shape
        empty = (layers, 2, rows // layers // 2, heads, capacity - length, width)
        room = mx.broadcast_to(self._empty_slot, empty)
        return mx.concatenate([held, room.reshape(rows, heads, -1, width)], axis=_SLOTS)


def write(buffer: mx.array, entry: mx.array, slot: mx.array) -> mx.array:
    """``buffer`` with ``entry`` (rows, heads, 1, width) in its slot; in place when nothing else holds the buffer."""
    return mx.put_along_axis(buffer, slot, entry, axis=_SLOTS)
