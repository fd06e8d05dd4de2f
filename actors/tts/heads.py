"""How the backbone keeps attention heads in memory, and the rotary angles that fit it.

MLX's own attention has a head of D dimensions kept in a wider row, each rotary half followed by padding that stays zero:

    first half | spare, zeros | second half | zeros

The width is one that MLX's fused attention kernels know. The spare dimension does away with masks: queries are 1 in it, the
keys of filled slots 0, and the keys of slots that hold nothing yet so low that the softmax gives them exactly zero. The
attention of this package (``attention.py``) counts slots and needs neither: there the row is the head.
"""

from __future__ import annotations

import math

import mlx.core as mx

from vcpipe.actors.tts import attention

#: Widths that MLX's fused attention kernels take on a GPU. They have none for the model's 72.
_FUSED_WIDTHS = (64, 96, 128)

#: Spare dimension of a key in an empty slot. Scaled and in the exponent it must vanish beside any real score.
_NEVER = -1e9


class HeadShape:
    """Heads of ``dims`` dimensions in rows of ``width``; ``width`` is for tests, by default the device decides.

    ``counted``: rows are the heads, for attention that counts slots.
    """

    def __init__(self, dims: int, width: int | None = None) -> None:
        self.counted = width is None and attention.usable(dims)
        least = dims + 2  # an even number of halves' padding, with room for the spare dimension
        if width is None:
            on_gpu = mx.default_device().type == mx.gpu
            width = dims if self.counted else next((w for w in _FUSED_WIDTHS if on_gpu and w >= least), least)
        self.dims, self.width = dims, width
        self.spare = -1 if self.counted else dims // 2

    def pad(self, x: mx.array) -> mx.array:
        """(..., dims) -> (..., width)."""
        if self.width == self.dims:
            return x
        halves = x.reshape(*x.shape[:-1], 2, self.dims // 2)
        room = [(0, 0)] * (halves.ndim - 1) + [(0, (self.width - self.dims) // 2)]
        return mx.pad(halves, room).reshape(*x.shape[:-1], self.width)

    def in_halves(self, x: mx.array) -> mx.array:
        """(..., width) -> (..., 2, width / 2)."""
        return x.reshape(*x.shape[:-1], 2, self.width // 2)

    def spare_row(self, value: float) -> mx.array:
        """(width,) float32: zeros but for the spare dimension, if there is one."""
        return mx.where(mx.arange(self.width) == self.spare, mx.array(value, mx.float32), 0.0)

    def query_mark(self) -> mx.array:
        """(3, 1, 1, 2, width / 2): what is added to queries, keys and values."""
        marks = mx.stack([self.spare_row(1.0), self.spare_row(0.0), self.spare_row(0.0)])
        return self.in_halves(marks)[:, None, None]

    def empty_slot(self) -> mx.array:
        """(2, 1, 1, 1, width): key and value of a slot that holds nothing."""
        return mx.stack([self.spare_row(_NEVER), self.spare_row(0.0)])[:, None, None, None]


class RotaryAngles:
    """Cosines and sines of rotary positions (RoFormer; half split, not interleaved).

    ``frequencies``: (D / 2,) float32.
    """

    def __init__(self, shape: HeadShape, base: float) -> None:
        half = shape.dims // 2
        self.frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(base) / half))
        self._frequencies = shape.in_halves(shape.pad(mx.concatenate([self.frequencies, self.frequencies])))
        mx.eval(self.frequencies, self._frequencies)

    def __call__(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """(T,) int32 -> cosines and sines, (T, 1, 2, width / 2) each."""
        angles = positions.astype(mx.float32).reshape(-1, 1, 1, 1) * self._frequencies
        return mx.cos(angles), mx.sin(angles)
