"""Nemotron-H (NVIDIA, 2025): Mamba-2, attention and MLP blocks in a fixed pattern, with a text and a function head.

There is no position signal and no batch. A mixer is handed a block's input x and norm and gives x + mixed(norm(x)), as norm
and sum are part of its first and last product. There are two ways through it: ``__call__`` takes all positions at once from
an empty state, ``step`` takes one position and the block's state (see ``cache``) and returns the next state. ``step`` is
written for few operations, since on small inputs their number is the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vcpipe.actors.language import attention_kernel, ssm, ssm_kernel
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
from vcpipe.actors.product import Activation, RmsNorm, on_cuda, product


class Precision:
    """Makes weights ready for activations of ``dtype``; with ``widen_matrices`` dense matrices too.

    A matrix that is multiplied by a CUDA kernel stays as it is: the kernel widens what it reads.
    """

    def __init__(self, dtype: mx.Dtype, widen_matrices: bool) -> None:
        self.dtype = dtype
        self.widen_matrices = widen_matrices

    def vector(self, stored: mx.array) -> mx.array:
        """``stored`` in the dtype that it would be promoted to."""
        return _constant(stored.astype(mx.result_type(stored, self.dtype)))

    def projection(self, stored: Projection) -> Projection:
        if stored.cuda is not None:
            return stored
        keep: Convert = lambda matrix: matrix  # noqa: E731
        return stored.converted(self.vector, self.vector if self.widen_matrices else keep)


class MambaMixer:
    """Mamba-2: one projection gives gate, x, B, C and dt; x, B, C pass a causal depthwise convolution and a state space."""

    def __init__(self, config: LanguageConfig, stored: MambaParameters, precision: Precision) -> None:
        self._config = config
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
        self._fused = self._make_fused() if on_cuda() else None
        self._norm = RmsNorm(precision.vector(stored.norm.weight), config.layer_norm_epsilon, config.n_groups)

    def __call__(self, x: mx.array, norm: RmsNorm) -> mx.array:
        """All positions: (1, T, hidden) -> (1, T, hidden)."""
        config, positions = self._config, x.shape[1]
        gate, raw, dt = self._parts(product(x, self._in_proj, norm=norm))
        window = mx.pad(raw, [(0, 0), (config.conv_kernel - 1, 0), (0, 0)])  # (1, T+k-1, C)
        mixed = self._activate(mx.conv1d(window, self._kernel, groups=config.conv_size))
        values, b, c = self._split(mixed)
        values = values.reshape(1, positions, config.mamba_num_heads, config.mamba_head_dim)
        b, c = (part.reshape(1, positions, config.n_groups, config.ssm_state_size) for part in (b, c))
        dt = ssm.step_size(dt, self._dt_bias, config.time_step_limit)
        y = ssm.scan(values, dt, self._decay.flatten(), b, c, self._skip.flatten())
        return product(_silu(gate) * y.flatten(2), self._out_proj, norm=self._norm, residual=x)

    def step(
        self, x: mx.array, norm: RmsNorm, block: BlockState, seen: mx.array, at: mx.array
    ) -> tuple[mx.array, BlockState]:
        """One position: (1, 1, hidden) -> (1, 1, hidden)."""
        *past, state = block
        projected = product(x, self._in_proj, norm=norm)
        if self._fused is not None:
            gated, raw, state = self._fused(projected, past, state)
        else:
            gated, raw, state = self._gated(projected, past, state)
        return product(gated, self._out_proj, norm=self._norm, residual=x), (*[*past, raw][1:], state)

    def _gated(self, projected: mx.array, past: list[mx.array], state: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Of one position: gated y before the norm, (1, 1, inner), its raw row (1, 1, C) and the next state."""
        config = self._config
        gate, raw, dt = self._parts(projected)
        window = [*past, raw]
        mixed = window[0].astype(mx.float32) * self._taps[0]
        for row, tap in zip(window[1:], self._taps[1:], strict=True):
            mixed = mixed + row.astype(mx.float32) * tap
        x, b, c = self._split(self._activate(mixed.astype(gate.dtype)))
        heads, grouped = state.shape[:3], state.shape[:4]  # (1, G, R) and (1, G, R, P)
        dt = ssm.step_size(dt, self._dt_bias, config.time_step_limit).reshape(*heads, 1)
        y, state = ssm.step(x.reshape(grouped), dt, self._decay, b, c, self._skip, state)
        return _silu(gate) * y.reshape(1, 1, -1), raw, state

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
        self._fused = attention_kernel.usable(self._heads, self._kv_heads, self._head_dim)
        self._qkv_proj = precision.projection(stored.qkv_proj)
        self._o_proj = precision.projection(stored.o_proj)

    def __call__(self, x: mx.array, norm: RmsNorm) -> mx.array:
        """All positions: (1, T, hidden) -> (1, T, hidden)."""
        rows = product(x, self._qkv_proj, norm=norm).reshape(1, x.shape[1], -1, self._head_dim).swapaxes(1, 2)
        queries, keys, values = mx.split(rows, [self._heads, self._heads + self._kv_heads], axis=1)
        mask = "causal" if x.shape[1] > 1 else None
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._scale, mask=mask)
        return product(attended.swapaxes(1, 2).flatten(2), self._o_proj, residual=x)

    def step(
        self, x: mx.array, norm: RmsNorm, block: BlockState, seen: mx.array, at: mx.array
    ) -> tuple[mx.array, BlockState]:
        """One position: (1, 1, hidden) -> (1, 1, hidden). ``seen`` (rows,): which rows of the buffer are filled.

        Attention reads the buffer behind the update, never the one before: that would keep it from being updated in place.
        """
        (buffer,) = block
        qkv = product(x, self._qkv_proj, norm=norm)
        queries, added = mx.split(qkv, [self._heads * self._head_dim], axis=-1)
        buffer = mx.slice_update(buffer, added.reshape(1, 2 * self._kv_heads, 1, self._head_dim), at, axes=(2,))
        if self._fused:
            attended = attention_kernel.attend(qkv, buffer, at, self._heads)
        else:
            attended = self._attended(queries, buffer, seen)
        return product(attended, self._o_proj, residual=x), (buffer,)

    def _attended(self, queries: mx.array, buffer: mx.array, seen: mx.array) -> mx.array:
        """The query heads of one key/value head make up the rows of one product with all its keys."""
        keys, values = mx.split(buffer, 2, axis=1)  # (1, kv_heads, rows, head_dim)
        queries = (queries * self._scale).reshape(1, self._kv_heads, -1, self._head_dim)
        scores = queries @ keys.swapaxes(2, 3)  # (1, kv_heads, heads / kv_heads, rows)
        weights = mx.softmax(mx.where(seen, scores, mx.finfo(scores.dtype).min), axis=-1, precise=True)
        return (weights @ values).reshape(1, 1, -1)


class MlpMixer:
    """Two linear layers around a squared ReLU, without a gate."""

    def __init__(self, config: LanguageConfig, stored: MlpParameters, precision: Precision) -> None:
        self._up_proj = precision.projection(stored.up_proj)
        self._down_proj = precision.projection(stored.down_proj)

    def __call__(self, x: mx.array, norm: RmsNorm) -> mx.array:
        """(1, T, hidden) -> (1, T, hidden)."""
        up = product(x, self._up_proj, norm=norm, activation=Activation.SQUARED_RELU)
        return product(up, self._down_proj, residual=x)

    def step(
        self, x: mx.array, norm: RmsNorm, block: BlockState, seen: mx.array, at: mx.array
    ) -> tuple[mx.array, BlockState]:
        """One position; there is nothing to remember."""
        return self(x, norm), block


_MIXERS: dict[str, Callable[[LanguageConfig, Any, Precision], Any]] = {
    MAMBA: MambaMixer,
    ATTENTION: AttentionMixer,
    MLP: MlpMixer,
}


class Backbone:
    """The blocks, x + mixer(norm(x)) each, and the final norm, for activations of one dtype."""

    def __init__(self, config: LanguageConfig, stored: BackboneParameters, precision: Precision) -> None:
        eps = config.layer_norm_epsilon
        self._norms = [RmsNorm(precision.vector(layer.norm.weight), eps) for layer in stored.layers]
        letters = zip(config.hybrid_override_pattern, stored.layers, strict=True)
        self._mixers = [_MIXERS[letter](config, layer.mixer, precision) for letter, layer in letters]
        self._final_norm = RmsNorm(precision.vector(stored.norm_f.weight), eps)
        self._first_attention = config.hybrid_override_pattern.find(ATTENTION)

    def __call__(self, x: mx.array) -> mx.array:
        """All positions from an empty state: (1, T, hidden) -> (1, T, hidden)."""
        for norm, mixer in zip(self._norms, self._mixers, strict=True):
            x = mixer(x, norm)
        return self._final_norm(x)

    def step(self, x: mx.array, position: mx.array, blocks: list[BlockState]) -> tuple[mx.array, list[BlockState]]:
        """One position (1, 1, hidden), which is number ``position`` (1,), and the states of all blocks before it."""
        rows = blocks[self._first_attention][0].shape[2] if self._first_attention >= 0 else 0
        seen = mx.arange(rows) <= position  # one mask for all
        after = []
        for norm, mixer, block in zip(self._norms, self._mixers, blocks, strict=True):
            x, block = mixer.step(x, norm, block, seen, position)
            after.append(block)
        return self._final_norm(x), after


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
        return mx.argmax(product(hidden, self._heads).reshape(2, -1), axis=-1)

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
