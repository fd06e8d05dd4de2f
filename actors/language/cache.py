"""State that a session's blocks carry from position to position, in arrays of fixed shape.

Arrays are values: a step takes those of all blocks and returns the next, nothing is changed in place. With the old ones
dropped before the new ones are evaluated, MLX writes into the old buffers instead of copying them.
"""

from __future__ import annotations

import mlx.core as mx

from vcpipe.actors.language.config import ATTENTION, MAMBA, LanguageConfig

#: Rows of a new key/value buffer, and the multiple of positions at which a buffer may change its dtype.
KV_ROWS = 256

#: A Mamba-2 block: the last kernel-1 raw inputs of its convolution, (1, 1, C) each and oldest first, and the state
#: (1, G, R, P, N) float32. An attention block: keys and values in one buffer, (1, 2 * kv_heads, rows, head_dim), keys
#: first. An MLP block: nothing.
BlockState = tuple[mx.array, ...]


class Caches:
    """``blocks``: the state of every block; ``length``: how many positions it has seen; ``rows``: of a key/value buffer."""

    def __init__(self, pattern: str, blocks: list[BlockState], length: int, rows: int) -> None:
        self._pattern = pattern
        self.blocks = blocks
        self.length = length
        self.rows = rows

    @classmethod
    def empty(cls, config: LanguageConfig, dtype: mx.Dtype) -> Caches:
        """Before the first position, whose activations will be of ``dtype``."""
        groups = config.n_groups
        state = (1, groups, config.mamba_num_heads // groups, config.mamba_head_dim, config.ssm_state_size)
        buffer = (1, 2 * config.num_key_value_heads, KV_ROWS, config.head_dim)
        blocks: list[BlockState] = []
        for letter in config.hybrid_override_pattern:
            if letter == MAMBA:
                raw = [mx.zeros((1, 1, config.conv_size), dtype) for _ in range(config.conv_kernel - 1)]
                blocks.append((*raw, mx.zeros(state, mx.float32)))
            else:
                blocks.append((mx.zeros(buffer, dtype),) if letter == ATTENTION else ())
        return cls(config.hybrid_override_pattern, blocks, 0, KV_ROWS)

    def copy(self) -> Caches:
        """Goes its own way from here; until one of the two has stepped, both share their arrays."""
        return Caches(self._pattern, list(self.blocks), self.length, self.rows)

    def make_ready(self, dtype: mx.Dtype) -> None:
        """Take in the next position, whose activations are of ``dtype``: room for it, and dtypes that it may meet.

        Key/value buffers have the dtype of their first rows, and wider rows are rounded into them, up to the next multiple
        of 256 positions, where the buffer is widened. So the keys of a bfloat16 prompt and the float32 ones behind it stay
        in bfloat16 up to there, as in the implementation whose numbers are reproduced. Convolution inputs are never
        rounded.
        """
        grow = self.length == self.rows
        if grow:
            self.rows *= 2
        turn = self.length % KV_ROWS == 0
        for i, letter in enumerate(self._pattern):
            block = self.blocks[i]
            if letter == MAMBA and any(raw.dtype != mx.result_type(raw, dtype) for raw in block[:-1]):
                self.blocks[i] = (*(raw.astype(mx.result_type(raw, dtype)) for raw in block[:-1]), block[-1])
            elif letter == ATTENTION and turn:
                self.blocks[i] = (_turned(block[0], dtype, self.rows),)


def _turned(buffer: mx.array, dtype: mx.Dtype, rows: int) -> mx.array:
    """The buffer in the wider of its own dtype and ``dtype``, with room for ``rows``."""
    wide = buffer.astype(mx.result_type(buffer, dtype))
    if wide.shape[2] == rows:
        return wide
    _, heads, held, size = wide.shape
    return mx.concatenate([wide, mx.zeros((1, heads, rows - held, size), wide.dtype)], axis=2)
