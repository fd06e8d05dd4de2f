"""State that one block carries from position to position.

Caches are values: a step takes one and returns the next, nothing is changed in place. Drop the old one before evaluating
the new one, and MLX writes into the old buffers instead of copying them.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

#: Rows by which a key/value buffer grows.
KV_STEP = 256


class MambaCache(NamedTuple):
    """State of one Mamba-2 block: ``conv`` (1, kernel-1, C), the last raw inputs of the convolution, in the dtype of
    the activations; ``ssm`` (1, H, P, N) float32. Both are None before the first position.
    """

    conv: mx.array | None = None
    ssm: mx.array | None = None


class KVCache(NamedTuple):
    """State of one attention block: ``keys`` and ``values`` (1, kv_heads, rows, head_dim), of which ``length`` are filled.

    The buffers take the dtype of the first keys. Rows of a wider dtype are rounded into them until the next growth, whose
    new rows have the dtype of the keys at hand: joining old and new rows then widens the whole buffer. So the keys of a
    bfloat16 prompt stay in bfloat16 buffers, with the float32 keys that follow, up to the next multiple of 256 rows.
    """

    keys: mx.array | None = None
    values: mx.array | None = None
    length: int = 0

    def extend(self, keys: mx.array, values: mx.array) -> KVCache:
        """Add the keys and values of one position, each (1, kv_heads, 1, head_dim)."""
        start = mx.array([self.length])
        return KVCache(
            mx.slice_update(self._with_room(self.keys, keys), keys, start, axes=(2,)),
            mx.slice_update(self._with_room(self.values, values), values, start, axes=(2,)),
            self.length + 1,
        )

    def filled(self) -> tuple[mx.array, mx.array]:
        """Keys and values of all positions so far, each (1, kv_heads, length, head_dim)."""
        assert self.keys is not None and self.values is not None
        return self.keys[..., : self.length, :], self.values[..., : self.length, :]

    def _with_room(self, buffer: mx.array | None, row: mx.array) -> mx.array:
        if buffer is not None and self.length < buffer.shape[2]:
            return buffer
        _, heads, _, size = row.shape
        room = mx.zeros((1, heads, KV_STEP, size), row.dtype)
        return room if buffer is None else mx.concatenate([buffer, room], axis=2)


BlockCache = MambaCache | KVCache | None
