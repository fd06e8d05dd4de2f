"""Backbone of the speech decoder: Gemma 3 text blocks on embeddings (no token table, inputs not scaled).

All activations are float32. Batch is 2 under guidance: row 0 conditional, row 1 unconditional.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.tts.cache import Buffers, CacheLayout, Place, write
from vcpipe.actors.tts.config import PROMPT_POSITIONS, TtsConfig
from vcpipe.actors.tts.layers import GatedMlp, GemmaNorm, merge_heads, split_heads


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys, rotary positions over the whole head."""

    def __init__(self, config: TtsConfig, window: int | None) -> None:
        super().__init__()
        dims, head_dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = config.query_pre_attn_scalar**-0.5
        self.window = window
        base = config.rope_global_base_freq if window is None else config.rope_local_base_freq
        self.q_proj = nn.Linear(dims, self.heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dims, self.kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dims, self.kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * head_dim, dims, bias=False)
        self.q_norm = GemmaNorm(head_dim, config.rms_norm_eps)
        self.k_norm = GemmaNorm(head_dim, config.rms_norm_eps)
        self.rope = nn.RoPE(head_dim, traditional=False, base=base)

    def prefill(self, x: mx.array) -> tuple[mx.array, Buffers]:
        """First positions x (B, T, H) -> (B, T, H), keys and values (B, kv_heads, T, D)."""
        queries, keys, values = self._heads_at(x, 0)
        length = x.shape[1]
        mask = "causal" if self.window is None or length <= self.window else _window_mask(length, self.window)
        return self._attend(queries, keys, values, mask), (keys, values)

    def step(self, x: mx.array, buffers: Buffers, place: Place) -> tuple[mx.array, Buffers]:
        """One position x (B, 1, H) at ``place`` -> (B, 1, H), buffers."""
        queries, key, value = self._heads_at(x, place.position)
        keys, values = write(buffers[0], key, place), write(buffers[1], value, place)
        seen = place.visible
        return self._attend(queries, keys[:, :, :seen], values[:, :, :seen], None), (keys, values)

    def _heads_at(self, x: mx.array, position: int) -> tuple[mx.array, mx.array, mx.array]:
        queries = self.q_norm(split_heads(self.q_proj(x), self.heads))
        keys = self.k_norm(split_heads(self.k_proj(x), self.kv_heads))
        values = split_heads(self.v_proj(x), self.kv_heads)
        return self.rope(queries, offset=position), self.rope(keys, offset=position), values

    def _attend(self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> mx.array:
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return self.o_proj(merge_heads(out))


def _window_mask(length: int, window: int) -> mx.array:
    """(T, T) bool: position i sees the last ``window`` positions up to i."""
    ahead = mx.arange(length)[:, None] - mx.arange(length)[None]
    return (ahead >= 0) & (ahead < window)


class Block(nn.Module):
    """Attention and gated MLP, each between two norms."""

    def __init__(self, config: TtsConfig, window: int | None) -> None:
        super().__init__()
        dims, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, window)
        self.mlp = GatedMlp(dims, config.intermediate_size)
        self.input_layernorm = GemmaNorm(dims, eps)
        self.post_attention_layernorm = GemmaNorm(dims, eps)
        self.pre_feedforward_layernorm = GemmaNorm(dims, eps)
        self.post_feedforward_layernorm = GemmaNorm(dims, eps)

    def prefill(self, x: mx.array) -> tuple[mx.array, Buffers]:
        """See :meth:`Attention.prefill`."""
        attended, buffers = self.self_attn.prefill(self.input_layernorm(x))
        return self._add(x, attended), buffers

    def step(self, x: mx.array, buffers: Buffers, place: Place) -> tuple[mx.array, Buffers]:
        """See :meth:`Attention.step`."""
        attended, buffers = self.self_attn.step(self.input_layernorm(x), buffers, place)
        return self._add(x, attended), buffers

    def _add(self, x: mx.array, attended: mx.array) -> mx.array:
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Backbone(nn.Module):
    """All blocks and the final norm. The caches are passed in and returned, one pair of buffers a layer."""

    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        windows = [config.window_of(i) for i in range(config.num_hidden_layers)]
        self.layers = [Block(config, window) for window in windows]
        self.norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.layout = CacheLayout(windows, PROMPT_POSITIONS)

    def prefill(self, x: mx.array) -> tuple[mx.array, list[Buffers]]:
        """The prompt x (B, 37, H) -> hidden (B, 37, H) and fresh caches."""
        caches = []
        for layer in self.layers:
            x, buffers = layer.prefill(x)
            caches.append(buffers)
        return self.norm(x), self.layout.store(caches)

    def step(self, x: mx.array, caches: list[Buffers], places: list[Place]) -> tuple[mx.array, list[Buffers]]:
        """One position x (B, 1, H) -> hidden (B, 1, H) and caches; they must have room for it."""
        written = []
        for layer, buffers, place in zip(self.layers, caches, places, strict=True):
            x, buffers = layer.step(x, buffers, place)
            written.append(buffers)
        return self.norm(x), written
