"""Backbone of the speech decoder: Gemma 3 text blocks on embeddings (no token table, inputs not scaled).

All activations are float32, N rows (1, N, H) of a batch and its positions: N = B * T, the batch first. The batch is 2 under
guidance: row 0 conditional, row 1 unconditional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.product import Activation, product, product_of_sum
from vcpipe.actors.tts import attention, kernels
from vcpipe.actors.tts.cache import CacheLayout, write
from vcpipe.actors.tts.config import PROMPT_POSITIONS, TtsConfig
from vcpipe.actors.tts.heads import HeadShape, RotaryAngles
from vcpipe.actors.tts.layers import GemmaNorm, StackedMlp, matrix_of, settle

#: Rows of a step: conditional, unconditional.
BATCH = 2

#: Cosines and sines of the positions at hand: see :class:`RotaryAngles`.
Angles = tuple[mx.array, mx.array]


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys, rotary positions over the whole head.

    ``prepare`` makes one matrix of the three ``projections``, padded to the width of ``shape``; shared keys and values are
    repeated for the queries of their group. What the heads found is for ``output`` to project.
    """

    def __init__(self, config: TtsConfig, shape: HeadShape) -> None:
        super().__init__()
        dims, head_dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.shape = config.num_attention_heads, config.num_key_value_heads, shape
        self.scale = config.query_pre_attn_scalar**-0.5
        self.eps = config.rms_norm_eps
        self.q_proj = nn.Linear(dims, self.heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dims, self.kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dims, self.kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * head_dim, dims, bias=False)
        self.q_norm = GemmaNorm(head_dim, config.rms_norm_eps)
        self.k_norm = GemmaNorm(head_dim, config.rms_norm_eps)

    def prepare(self) -> None:
        """Derive what a step multiplies with; the projections as they were loaded are let go."""
        shape = self.shape
        self.projections = matrix_of(self.q_proj, self.k_proj, self.v_proj, in_parts=True, rows=self._head_rows)
        self.output = matrix_of(self.o_proj, columns=None if shape.counted else self._head_columns)
        self._norm_scales = self.q_norm.scale, self.k_norm.scale
        # A norm over the padded width divides by more dimensions: that is made up for here and in its epsilon.
        share = shape.dims / shape.width
        self._norm_eps = self.eps * share
        gains = [shape.pad(norm.scale * share**0.5) for norm in (self.q_norm, self.k_norm)]
        self._gains = _for_batch(shape.in_halves(mx.stack([*gains, mx.zeros_like(gains[0])]))[:, None, None])
        # The halves turn into each other: (x1 cos - x2 sin, x2 cos + x1 sin).
        self._swapped_gains = self._gains[..., ::-1, :] * mx.array([[-1.0], [1.0]])
        self._is_value = _for_batch(mx.array([False, False, True]).reshape(3, 1, 1, 1, 1))
        self._mark = _for_batch(shape.query_mark())
        settle(self, "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")

    def prefill(self, projected: mx.array, angles: Angles, window: int | None) -> tuple[mx.array, mx.array]:
        """Projections of first positions -> what the heads found (1, 2T, heads * width), keys and values.

        Those are (4, heads, T, width).
        """
        heads = self._heads_at(projected, angles).flatten(3).swapaxes(1, 2)  # (6, heads, T, width)
        queries, keys, values = mx.split(heads, 3)
        length = queries.shape[2]
        mask = "causal" if window is None or length <= window else _window_mask(length, window)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return self._merged(out.swapaxes(1, 2)), heads[BATCH:]

    def step(self, projected: mx.array, buffer: mx.array, slot: mx.array, angles: Angles) -> tuple[mx.array, mx.array]:
        """Projections of one position -> what the heads found (1, 2, heads * width), the buffer with it in ``slot``."""
        heads = self._heads_at(projected, angles).reshape(3 * BATCH, self.heads, 1, -1)
        buffer = write(buffer, heads[BATCH:], slot)
        out = mx.fast.scaled_dot_product_attention(heads[:BATCH], buffer[:BATCH], buffer[BATCH:], scale=self.scale)
        return self._merged(out), buffer

    def counted_step(
        self,
        projected: mx.array,
        buffer: mx.array,
        layer: mx.array,
        slot: mx.array,
        position: mx.array,
        frequencies: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """The same from a buffer of many layers -> what the heads found, the entry to write: see :mod:`attention`."""
        return attention.attend(
            projected, self._norm_scales, frequencies, position, buffer, layer, slot, scale=self.scale, eps=self.eps
        )

    def _heads_at(self, projected: mx.array, angles: Angles) -> mx.array:
        """Projections of 2T rows -> two rows each of queries, keys and values at their positions, (6, T, heads, 2, width / 2).

        ``projected``: (3, 2T, heads * width), or (1, 2T, 3 * heads * width).
        """
        cosines, sines = angles
        width = self.shape.width
        if projected.shape[0] == 1:
            projected = projected.reshape(-1, 3, self.heads * width).swapaxes(0, 1)
        flat = projected.reshape(3 * BATCH, -1, self.heads, width)
        raw, normed = self.shape.in_halves(flat), self.shape.in_halves(mx.fast.rms_norm(flat, None, self._norm_eps))
        turned = normed * self._gains * cosines + normed[..., ::-1, :] * self._swapped_gains * sines
        return mx.where(self._is_value, raw, turned) + self._mark

    def _merged(self, out: mx.array) -> mx.array:
        """What the heads found, batch and positions first -> (1, 2T, heads * width)."""
        return out.reshape(1, -1, self.heads * self.shape.width)

    def _head_rows(self, weight: mx.array) -> mx.array:
        """Rows of a projection's weight (heads * dims, ...) -> (heads * width, ...): heads padded, shared ones repeated."""
        dims = weight.shape[-1]
        per_head = weight.reshape(-1, self.shape.dims, dims)
        padded = self.shape.pad(per_head.swapaxes(1, 2)).swapaxes(1, 2)
        return mx.repeat(padded, self.heads // padded.shape[0], axis=0).reshape(-1, dims)

    def _head_columns(self, weight: mx.array) -> mx.array:
        """Weight (H, heads * dims) -> (H, heads * width)."""
        return self.shape.pad(weight.reshape(-1, self.heads, self.shape.dims)).reshape(len(weight), -1)


def _for_batch(x: mx.array) -> mx.array:
    """(3, ...) for queries, keys and values -> (6, ...), one for each of their rows."""
    return mx.repeat(x, BATCH, axis=0)


def _window_mask(length: int, window: int) -> mx.array:
    """(T, T) bool: position i sees the last ``window`` positions up to i."""
    ahead = mx.arange(length)[:, None] - mx.arange(length)[None]
    return (ahead >= 0) & (ahead < window)


class Block(nn.Module):
    """Attention and gated MLP, each between two norms."""

    def __init__(self, config: TtsConfig, shape: HeadShape) -> None:
        super().__init__()
        dims, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, shape)
        self.mlp = StackedMlp(dims, config.intermediate_size)
        self.input_layernorm = GemmaNorm(dims, eps)
        self.post_attention_layernorm = GemmaNorm(dims, eps)
        self.pre_feedforward_layernorm = GemmaNorm(dims, eps)
        self.post_feedforward_layernorm = GemmaNorm(dims, eps)


class Backbone(nn.Module):
    """All blocks and the final norm. The caches are passed in and returned: see :class:`CacheLayout`.

    ``history``: positions that any layer may see at most; None leaves the model its own windows.
    """

    def __init__(self, config: TtsConfig, history: int | None = None, head_width: int | None = None) -> None:
        super().__init__()
        shape = HeadShape(config.head_dim, head_width)
        self.layers = [Block(config, shape) for _ in range(config.num_hidden_layers)]
        self.norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.layout = CacheLayout(config.windows(history), PROMPT_POSITIONS, shape.empty_slot(), shape.counted)
        angles = {
            True: RotaryAngles(shape, config.rope_global_base_freq),
            False: RotaryAngles(shape, config.rope_local_base_freq),
        }
        self._angles = tuple(angles.values())
        self._is_global = tuple(config.is_global(i) for i in range(config.num_hidden_layers))

    def prefill(self, x: mx.array) -> tuple[mx.array, list[mx.array]]:
        """The prompt x (1, 2T, H), positions 0 .. T - 1 -> hidden (1, 2T, H), what each layer's slots shall hold."""
        angles = self._angles_at(mx.arange(x.shape[1] // 2, dtype=mx.int32))
        entries = []

        def attend(layer: int, projected: mx.array) -> mx.array:
            found, held = self.layers[layer].self_attn.prefill(projected, angles[layer], self.layout.windows[layer])
            entries.append(held)
            return found

        return self._through(x, attend), entries

    def step(
        self, x: mx.array, position: mx.array, slots: Sequence[mx.array], caches: Sequence[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        """One position x (1, 2, H), its number (1,) and slots (see :class:`CacheLayout`) -> hidden (1, 2, H), caches."""
        if self.layout.shared:
            return self._counted_step(x, position, slots, caches)
        angles, written = self._angles_at(position), []

        def attend(layer: int, projected: mx.array) -> mx.array:
            slot = slots[self.layout.kind_of[layer]]
            found, buffer = self.layers[layer].self_attn.step(projected, caches[layer], slot, angles[layer])
            written.append(buffer)
            return found

        return self._through(x, attend), written

    def _counted_step(
        self, x: mx.array, position: mx.array, slots: Sequence[mx.array], caches: Sequence[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        """The same with buffers that layers share, which are written before they are read: in place, therefore."""
        layout = self.layout
        buffers, entries = layout.settled(caches, slots), {}

        def attend(layer: int, projected: mx.array) -> mx.array:
            kind, angles = layout.kind_of[layer], self._angles[not self._is_global[layer]]
            found, entries[layer] = self.layers[layer].self_attn.counted_step(
                projected,
                buffers[kind],
                mx.array([layout.groups[kind].index(layer)], mx.int32),
                slots[kind],
                position,
                angles.frequencies,
            )
            return found

        hidden = self._through(x, attend)
        late = attention.stack([entries[layer] for group in layout.groups for layer in group])
        ends = list(accumulate(buffer.shape[0] for buffer in buffers))
        return hidden, [*buffers, *mx.split(late, ends[:-1])]

    def _through(self, x: mx.array, attend: Callable[[int, mx.array], mx.array]) -> mx.array:
        """Rows x (1, N, H) through all blocks -> hidden (1, N, H).

        ``attend``: from the number of a layer and its projections to what its heads find.
        """
        input_norms = [layer.input_layernorm.rms for layer in self.layers]
        projected = product(x, self.layers[0].self_attn.projections, norm=input_norms[0])
        for index, layer in enumerate(self.layers):
            mixed = product(attend(index, projected), layer.self_attn.output)
            post, norm = layer.post_attention_layernorm.rms, layer.pre_feedforward_layernorm.rms
            gated, x = product_of_sum(x, mixed, post, norm, layer.mlp.gate_up, Activation.GATED_GELU)
            mixed, post = product(gated, layer.mlp.down), layer.post_feedforward_layernorm.rms
            if layer is not self.layers[-1]:
                projections = self.layers[index + 1].self_attn.projections
                projected, x = product_of_sum(x, mixed, post, input_norms[index + 1], projections)
        return kernels.norm_of_sum(x, mixed, post, self.norm.rms)

    def _angles_at(self, positions: mx.array) -> list[Angles]:
        """The angles of every layer."""
        everywhere, local = (angles(positions) for angles in self._angles)
        return [everywhere if is_global else local for is_global in self._is_global]
