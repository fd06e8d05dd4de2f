"""Nemotron-H (NVIDIA, 2025): Mamba-2, attention and MLP blocks in a fixed pattern, with a text and a function head.

There is no position signal and no batch. Every mixer has two ways through it: ``__call__`` takes all positions at once from
an empty state, ``step`` takes one position and the block's state (see ``cache``) and returns the next state. ``step`` is
written for few operations, since on small inputs their number is the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vcpipe.actors.language import ssm, ssm_kernel
from vcpipe.actors.language.cache import BlockState
from vcpipe.actors.language.config import ATTENTION, MAMBA, MLP, LanguageConfig
from vcpipe.actors.language.matrices import Convert, Embedding, Projection
from vcpipe.actors.language.parameters import (
    AttentionParameters,
    BackboneParameters,
    LanguageParameters,
    MambaParameters,
    MlpParameters,
)


class Precision:
    """Makes weights ready for activations of ``dtype``; with ``widen_matrices`` dense matrices too."""

    def __init__(self, dtype: mx.Dtype, widen_matrices: bool) -> None:
        self.dtype = dtype
        self.widen_matrices = widen_matrices

    def vector(self, stored: mx.array) -> mx.array:
        """``stored`` in the dtype that it would be promoted to."""
        return _constant(stored.astype(mx.result_type(stored, self.dtype)))

    def projection(self, stored: Projection) -> Projection:
        keep: Convert = lambda matrix: matrix  # noqa: E731
        return stored.converted(self.vector, self.vector if self.widen_matrices else keep)


class MambaMixer:
    """Mamba-2: one projection gives gate, x, B, C and dt; x, B, C pass a causal depthwise convolution and a state space."""

    def __init__(self, config: LanguageConfig, stored: MambaParameters, precision: Precision) -> None:
        self._config = config
        self._eps = config.layer_norm_epsilon
        self._in_proj = precision.projection(stored.in_proj)
        self._out_proj = precision.projection(stored.out_proj)
        per_head = (config.n_groups, config.mamba_num_heads // config.n_groups, 1)
        self._kernel = stored.conv1d.weight  # (C, k, 1)
        # Products of the convolution are summed in float32 whatever the dtype of its input.
        taps = self._kernel[:, :, 0].astype(mx.float32)
        self._taps = [_constant(mx.contiguous(taps[:, j])) for j in range(config.conv_kernel)]
        self._conv_bias = precision.vector(stored.conv1d.bias) if "bias" in stored.conv1d else None
        self._dt_bias = _constant(stored.dt_bias.astype(mx.float32))
        self._decay = _constant(ssm.decay_rate(stored.A_log).reshape(per_head))
        self._skip = _constant(stored.D.astype(precision.dtype).reshape(per_head))
        self._fused = self._make_fused() if precision.dtype == mx.float32 and ssm_kernel.available() else None
        self._norm_weight = _constant(precision.vector(stored.norm.weight).reshape(1, config.n_groups, -1))

    def __call__(self, h: mx.array) -> mx.array:
        """All positions: (1, T, hidden) -> (1, T, hidden)."""
        config, positions = self._config, h.shape[1]
        gate, raw, dt = self._parts(self._in_proj(h))
        window = mx.pad(raw, [(0, 0), (config.conv_kernel - 1, 0), (0, 0)])  # (1, T+k-1, C)
        mixed = self._activate(mx.conv1d(window, self._kernel, groups=config.conv_size))
        x, b, c = self._split(mixed)
        x = x.reshape(1, positions, config.mamba_num_heads, config.mamba_head_dim)
        b, c = (part.reshape(1, positions, config.n_groups, config.ssm_state_size) for part in (b, c))
        dt = ssm.step_size(dt, self._dt_bias, config.time_step_limit)
        y = ssm.scan(x, dt, self._decay.flatten(), b, c, self._skip.flatten())
        gated = (_silu(gate) * y.flatten(2)).reshape(1, positions, config.n_groups, -1)
        return self._out_proj((self._norm_weight * mx.fast.rms_norm(gated, None, self._eps)).flatten(2))

    def step(self, h: mx.array, block: BlockState, seen: mx.array, at: mx.array) -> tuple[mx.array, BlockState]:
        """One position: (1, 1, hidden) -> (1, 1, hidden)."""
        *past, state = block
        projected = self._in_proj(h)
        gate, raw, dt = self._parts(projected)
        window = [*past, raw]
        if self._fused is not None:
            gated, state = self._fused(projected, past, state)
        else:
            gated, state = self._gated(gate, window, dt, state)
        normed = self._norm_weight * mx.fast.rms_norm(gated, None, self._eps)  # (1, G, R * P): within each group
        return self._out_proj(normed.reshape(1, 1, -1)), (*window[1:], state)

    def _gated(
        self, gate: mx.array, window: list[mx.array], dt: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Of one position: gated y before the norm, (1, G, R * P), and the next state."""
        config = self._config
        mixed = window[0].astype(mx.float32) * self._taps[0]
        for row, tap in zip(window[1:], self._taps[1:], strict=True):
            mixed = mixed + row.astype(mx.float32) * tap
        x, b, c = self._split(self._activate(mixed.astype(gate.dtype)))
        heads, grouped = state.shape[:3], state.shape[:4]  # (1, G, R) and (1, G, R, P)
        dt = ssm.step_size(dt, self._dt_bias, config.time_step_limit).reshape(*heads, 1)
        y, state = ssm.step(x.reshape(grouped), dt, self._decay, b, c, self._skip, state)
        return (_silu(gate).reshape(grouped) * y).reshape(1, config.n_groups, -1), state

    def _make_fused(self) -> ssm_kernel.StateSpaceKernel:
        bias = mx.zeros((self._config.conv_size,)) if self._conv_bias is None else self._conv_bias
        return ssm_kernel.StateSpaceKernel(
            self._config,
            taps=_constant(mx.stack(self._taps)),
            conv_bias=_constant(bias),
            dt_bias=self._dt_bias,
            decay=self._decay,
            skip=self._skip,
        )

    def _parts(self, projected: mx.array) -> list[mx.array]:
        """Gate (1, T, inner), raw convolution input (1, T, C) and dt (1, T, H)."""
        inner = self._config.inner_size
        return list(mx.split(projected, [inner, inner + self._config.conv_size], axis=-1))

    def _activate(self, mixed: mx.array) -> mx.array:
        return _silu(mixed if self._conv_bias is None else mixed + self._conv_bias)

    def _split(self, mixed: mx.array) -> list[mx.array]:
        """(1, T, C) -> x (1, T, inner), B and C (1, T, G * N)."""
        inner, columns = self._config.inner_size, self._config.n_groups * self._config.ssm_state_size
        return list(mx.split(mixed, [inner, inner + columns], axis=-1))


class AttentionMixer:
    """Grouped-query attention without position signal."""

    def __init__(self, config: LanguageConfig, stored: AttentionParameters, precision: Precision) -> None:
        self._heads, self._kv_heads, self._head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self._scale = config.head_dim**-0.5
        self._qkv_proj = precision.projection(stored.qkv_proj)
        self._o_proj = precision.projection(stored.o_proj)

    def __call__(self, h: mx.array) -> mx.array:
        """All positions: (1, T, hidden) -> (1, T, hidden)."""
        rows = self._qkv_proj(h).reshape(1, h.shape[1], -1, self._head_dim).swapaxes(1, 2)
        queries, keys, values = mx.split(rows, [self._heads, self._heads + self._kv_heads], axis=1)
        mask = "causal" if h.shape[1] > 1 else None
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._scale, mask=mask)
        return self._o_proj(attended.swapaxes(1, 2).flatten(2))

    def step(self, h: mx.array, block: BlockState, seen: mx.array, at: mx.array) -> tuple[mx.array, BlockState]:
        """One position: (1, 1, hidden) -> (1, 1, hidden). ``seen`` (rows,): which rows of the buffer are filled.

        The query heads of one key/value head make up the rows of one product with all its keys.
        """
        (buffer,) = block
        queries, added = mx.split(self._qkv_proj(h), [self._heads * self._head_dim], axis=-1)
        buffer = mx.slice_update(buffer, added.reshape(1, 2 * self._kv_heads, 1, self._head_dim), at, axes=(2,))
        keys, values = mx.split(buffer, 2, axis=1)  # (1, kv_heads, rows, head_dim)
        queries = (queries * self._scale).reshape(1, self._kv_heads, -1, self._head_dim)
        scores = queries @ keys.swapaxes(2, 3)  # (1, kv_heads, heads / kv_heads, rows)
        weights = mx.softmax(mx.where(seen, scores, mx.finfo(scores.dtype).min), axis=-1, precise=True)
        return self._o_proj((weights @ values).reshape(1, 1, -1)), (buffer,)


class MlpMixer:
    """Two linear layers around a squared ReLU, without a gate."""

    def __init__(self, config: LanguageConfig, stored: MlpParameters, precision: Precision) -> None:
        self._up_proj = precision.projection(stored.up_proj)
        self._down_proj = precision.projection(stored.down_proj)

    def __call__(self, h: mx.array) -> mx.array:
        """(1, T, hidden) -> (1, T, hidden)."""
        return self._down_proj(mx.square(mx.maximum(self._up_proj(h), 0)))

    def step(self, h: mx.array, block: BlockState, seen: mx.array, at: mx.array) -> tuple[mx.array, BlockState]:
        """One position; there is nothing to remember."""
        return self(h), block


_MIXERS: dict[str, Callable[[LanguageConfig, Any, Precision], Any]] = {
    MAMBA: MambaMixer,
    ATTENTION: AttentionMixer,
    MLP: MlpMixer,
}


class Backbone:
    """The blocks, x + mixer(norm(x)) each, and the final norm, for activations of one dtype."""

    def __init__(self, config: LanguageConfig, stored: BackboneParameters, precision: Precision) -> None:
        self._eps = config.layer_norm_epsilon
        self._norms = [precision.vector(layer.norm.weight) for layer in stored.layers]
        letters = zip(config.hybrid_override_pattern, stored.layers, strict=True)
        self._mixers = [_MIXERS[letter](config, layer.mixer, precision) for letter, layer in letters]
        self._final_norm = precision.vector(stored.norm_f.weight)
        self._first_attention = config.hybrid_override_pattern.find(ATTENTION)

    def __call__(self, x: mx.array) -> mx.array:
        """All positions from an empty state: (1, T, hidden) -> (1, T, hidden)."""
        for norm, mixer in zip(self._norms, self._mixers, strict=True):
            x = x + mixer(mx.fast.rms_norm(x, norm, self._eps))
        return mx.fast.rms_norm(x, self._final_norm, self._eps)

    def step(self, x: mx.array, position: mx.array, blocks: list[BlockState]) -> tuple[mx.array, list[BlockState]]:
        """One position (1, 1, hidden), which is number ``position`` (1,), and the states of all blocks before it."""
        rows = blocks[self._first_attention][0].shape[2] if self._first_attention >= 0 else 0
        seen = mx.arange(rows) <= position  # one mask for all
        after = []
        for norm, mixer, block in zip(self._norms, self._mixers, blocks, strict=True):
            mixed, block = mixer.step(mx.fast.rms_norm(x, norm, self._eps), block, seen, position)
            x = x + mixed
            after.append(block)
        return mx.fast.rms_norm(x, self._final_norm, self._eps), after


class Network:
    """Backbone, embedding and heads for activations of one dtype."""

    def __init__(
        self, config: LanguageConfig, stored: LanguageParameters, embedding: Embedding, precision: Precision
    ) -> None:
        self._embedding = embedding
        self.backbone = Backbone(config, stored.llm, precision)
        self._heads = precision.projection(stored.heads)
        self._function_weight = config.function_channel_weight

    def fuse(self, rows: mx.array, ids: mx.array) -> mx.array:
        """Sum the three input channels of positions that share their previous ids.

        rows: (1, T, hidden), projected audio or prompt embeddings; ids (2,): text and function. The result has the wider
        dtype of rows and embeddings. The order of the sums and the product in the embeddings' dtype are part of the
        model's numbers.
        """
        text, function = mx.split(self._embedding(ids), 2)  # (1, hidden) each
        return text + rows + self._function_weight * function

    def next_ids(self, hidden: mx.array) -> mx.array:
        """hidden (1, 1, hidden) -> (2,): the most likely text id and function id, the lowest of equals."""
        return mx.argmax(self._heads(hidden).reshape(2, -1), axis=-1)

    def step(
        self, row: mx.array, ids: mx.array, position: mx.array, blocks: list[BlockState]
    ) -> tuple[mx.array, mx.array, list[BlockState]]:
        """One position of the timeline: row (1, 1, hidden), previous ids (2,) -> ids (2,), hidden (1, 1, hidden), states."""
        hidden, blocks = self.backbone.step(self.fuse(row, ids), position, blocks)
        return self.next_ids(hidden), hidden, blocks


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _constant(array: mx.array) -> mx.array:
    """Evaluated, or it would be computed anew in every step."""
    mx.eval(array)
    return array
