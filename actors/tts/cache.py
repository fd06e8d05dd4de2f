"""Key/value buffers of the backbone.

Every layer owns two preallocated buffers (B, kv_heads, capacity, D) that are written by position and doubled when full.
A layer with a window never needs more than the window: once full, its buffer is a ring. Rotary positions are absolute, so
the order inside the ring does not matter to attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

#: Keys and values of one layer.
Buffers = tuple[mx.array, mx.array]

#: Positions a buffer has room for at first.
_FIRST_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Where one position goes. ``position``: absolute, from 0. ``slot``: (1,) int32, its entry in the buffers.
    ``visible``: how many leading entries hold positions it may see, its own among them."""

    position: int
    slot: mx.array
    visible: int


class CacheLayout:
    """Places positions in the buffers of layers with the given windows (None: no window).

    ``prefill``: positions written at once at the start; of more than a window only the last ones are kept.
    """

    def __init__(self, windows: Iterable[int | None], prefill: int) -> None:
        self.windows = tuple(windows)
        self.prefill = prefill

    def store(self, caches: list[Buffers]) -> list[Buffers]:
        """Keys and values of the prefill positions, all of them -> buffers with room to grow."""
        stored: list[Buffers] = []
        for window, (keys, values) in zip(self.windows, caches, strict=True):
            capacity = max(_FIRST_CAPACITY, self.prefill)
            if window is not None:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
                capacity = min(capacity, window)
            stored.append((_padded(keys, capacity), _padded(values, capacity)))
        return stored

    def make_room(self, caches: list[Buffers], position: int) -> list[Buffers]:
        """Double the buffers in which ``position`` has no slot yet; most of the time the caches as they are."""
        roomy: list[Buffers] = []
        for window, (keys, values) in zip(self.windows, caches, strict=True):
            capacity = keys.shape[2]
            if self._slot(window, position) >= capacity:
                capacity = 2 * capacity if window is None else min(2 * capacity, window)
                keys, values = _padded(keys, capacity), _padded(values, capacity)
            roomy.append((keys, values))
        return roomy

    def places(self, position: int) -> list[Place]:
        """The place of ``position`` in every layer."""
        by_window = {window: self._place(window, position) for window in set(self.windows)}
        return [by_window[window] for window in self.windows]

    def _place(self, window: int | None, position: int) -> Place:
        visible = position + 1 if window is None else min(position + 1, window)
        return Place(position, mx.array([self._slot(window, position)], mx.int32), visible)

    def _slot(self, window: int | None, position: int) -> int:
        if window is None:
            return position
        # A prefill longer than the window leaves its last positions in entries 0, 1, ...: the ring starts after them.
        return (position - max(0, self.prefill - window)) % window


def write(buffer: mx.array, entry: mx.array, place: Place) -> mx.array:
    """``buffer`` with ``entry`` (B, kv_heads, 1, D) in its slot; in place when nothing else holds the buffer."""
    return mx.slice_update(buffer, entry, place.slot, axes=(2,))


def _padded(buffer: mx.array, capacity: int) -> mx.array:
    batch, heads, length, dims = buffer.shape
    room = mx.zeros((batch, heads, capacity - length, dims), buffer.dtype)
    return mx.concatenate([buffer, room], axis=2)
