"""Nemotron-H (NVIDIA, 2025): Mamba-2, attention and MLP blocks in a fixed pattern, with a text and a function head.

There is no position signal and no batch. Every mixer has two ways through it: ``__call__`` takes all positions at once from
an empty state, ``step`` takes one position and the block's cache and returns the next cache. Attribute names are those of
the checkpoint, so the module tree needs no map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.language import ssm
from vcpipe.actors.language.cache import BlockCache, KVCache, MambaCache
from vcpipe.actors.language.config import ATTENTION, MAMBA, MLP, LanguageConfig


class GatedGroupNorm(nn.Module):
    """silu(gate) * x, then RMS norm within each of the groups, then one weight a channel. The gate comes before the norm."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((size,))
        self.groups = groups
        self.eps = eps

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        """x, gate: (1, T, size) -> (1, T, size)."""
        grouped = (nn.silu(gate) * x).reshape(1, x.shape[1], self.groups, -1)
        return self.weight * mx.fast.rms_norm(grouped, None, self.eps).flatten(-2)


class MambaMixer(nn.Module):
    """Mamba-2: one projection gives gate, x, B, C and dt; x, B, C pass a causal depthwise convolution and a state space."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.inner, self.channels = config.inner_size, config.conv_size
        self.heads, self.head_dim = config.mamba_num_heads, config.mamba_head_dim
        self.groups, self.state_size = config.n_groups, config.ssm_state_size
        self.past = config.conv_kernel - 1
        self.time_step_limit = config.time_step_limit
        self.in_proj = nn.Linear(
            config.hidden_size, self.inner + self.channels + self.heads, bias=config.mamba_proj_bias
        )
        self.conv1d = nn.Conv1d(
            self.channels, self.channels, config.conv_kernel, groups=self.channels, bias=config.use_conv_bias
        )
        self.dt_bias = mx.ones((self.heads,))
        self.A_log = mx.zeros((self.heads,))
        self.D = mx.ones((self.heads,))
        self.norm = GatedGroupNorm(self.inner, self.groups, config.layer_norm_epsilon)
        self.out_proj = nn.Linear(self.inner, config.hidden_size, bias=config.mamba_proj_bias)

    def __call__(self, h: mx.array) -> mx.array:
        """All positions: (1, T, hidden) -> (1, T, hidden)."""
        gate, raw, dt = self._project(h)
        window = mx.pad(raw, [(0, 0), (self.past, 0), (0, 0)])  # (1, T+past, C)
        x, b, c = self._convolve(window)
        y = ssm.scan(x, self._step_size(dt), ssm.decay_rate(self.A_log), b, c, self.D.astype(x.dtype))
        return self.out_proj(self.norm(y.flatten(2), gate))

    def step(self, h: mx.array, cache: MambaCache) -> tuple[mx.array, MambaCache]:
        """One position: (1, 1, hidden) -> (1, 1, hidden)."""
        gate, raw, dt = self._project(h)
        conv, state = cache
        if conv is None:
            conv = mx.zeros((1, self.past, self.channels), raw.dtype)
        if state is None:
            state = mx.zeros((1, self.heads, self.head_dim, self.state_size), mx.float32)
        window = mx.concatenate([conv, raw], axis=1)  # (1, past+1, C)
        x, b, c = self._convolve(window)
        y, state = ssm.step(x, self._step_size(dt), ssm.decay_rate(self.A_log), b, c, self.D.astype(x.dtype), state)
        return self.out_proj(self.norm(y.flatten(2), gate)), MambaCache(window[:, 1:], state)

    def _project(self, h: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Gate (1, T, inner), raw convolution input (1, T, C) and dt (1, T, H)."""
        gate, raw, dt = mx.split(self.in_proj(h), [self.inner, self.inner + self.channels], axis=-1)
        return gate, raw, dt

    def _convolve(self, window: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """(1, T+past, C) -> x (1, T, H, P), B and C (1, T, G, N)."""
        mixed = nn.silu(self.conv1d(window))
        columns = self.groups * self.state_size
        x, b, c = mx.split(mixed, [self.inner, self.inner + columns], axis=-1)
        positions = x.shape[1]
        b, c = (part.reshape(1, positions, self.groups, self.state_size) for part in (b, c))
        return x.reshape(1, positions, self.heads, self.head_dim), b, c

    def _step_size(self, dt: mx.array) -> mx.array:
        return ssm.step_size(dt, self.dt_bias, self.time_step_limit)


class AttentionMixer(nn.Module):
    """Grouped-query attention without position signal."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=bias)

    def __call__(self, h: mx.array) -> mx.array:
        """All positions: (1, T, hidden) -> (1, T, hidden)."""
        queries, keys, values = self._project(h)
        return self._attend(queries, keys, values, "causal" if h.shape[1] > 1 else None)

    def step(self, h: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """One position: (1, 1, hidden) -> (1, 1, hidden)."""
        queries, keys, values = self._project(h)
        cache = cache.extend(keys, values)
        return self._attend(queries, *cache.filled(), None), cache

    def _project(self, h: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """(1, T, hidden) -> queries (1, heads, T, head_dim), keys and values (1, kv_heads, T, head_dim)."""
        return self._split(self.q_proj(h)), self._split(self.k_proj(h)), self._split(self.v_proj(h))

    def _split(self, x: mx.array) -> mx.array:
        return x.reshape(1, x.shape[1], -1, self.head_dim).swapaxes(1, 2)

    def _attend(self, queries: mx.array, keys: mx.array, values: mx.array, mask: str | None) -> mx.array:
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.head_dim**-0.5, mask=mask)
        return self.o_proj(attended.swapaxes(1, 2).flatten(2))  # (1, T, hidden)


class MlpMixer(nn.Module):
    """Two linear layers around a squared ReLU, without a gate."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def __call__(self, h: mx.array) -> mx.array:
        """(1, T, hidden) -> (1, T, hidden)."""
        return self.down_proj(nn.relu2(self.up_proj(h)))

    def step(self, h: mx.array, cache: None) -> tuple[mx.array, None]:
        """One position; there is nothing to remember."""
        return self(h), None


_MIXERS: dict[str, Callable[[LanguageConfig], Any]] = {MAMBA: MambaMixer, ATTENTION: AttentionMixer, MLP: MlpMixer}


class Block(nn.Module):
    """x + mixer(norm(x))."""

    def __init__(self, config: LanguageConfig, letter: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mixer = _MIXERS[letter](config)

    def __call__(self, x: mx.array) -> mx.array:
        """(1, T, hidden) -> (1, T, hidden)."""
        return x + self.mixer(self.norm(x))

    def step(self, x: mx.array, cache: BlockCache) -> tuple[mx.array, BlockCache]:
        """(1, 1, hidden) -> (1, 1, hidden)."""
        mixed, cache = self.mixer.step(self.norm(x), cache)
        return x + mixed, cache


class Backbone(nn.Module):
    """The blocks and the final norm. Input and output are (1, T, hidden)."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.layers = [Block(config, letter) for letter in config.hybrid_override_pattern]
        self.norm_f = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.pattern = config.hybrid_override_pattern

    def __call__(self, x: mx.array) -> mx.array:
        """All positions from an empty state."""
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x)

    def step(self, x: mx.array, caches: list[BlockCache]) -> tuple[mx.array, list[BlockCache]]:
        """One position and the caches of all blocks before it -> hidden and the caches after it."""
        after = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer.step(x, cache)
            after.append(cache)
        return self.norm_f(x), after

    def empty_caches(self) -> list[BlockCache]:
        """Caches before the first position, one a block."""
        empty: dict[str, BlockCache] = {MAMBA: MambaCache(), ATTENTION: KVCache()}
        return [empty.get(letter) for letter in self.pattern]


class LanguageModel(nn.Module):
    """Everything of the language stage that has weights."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.llm = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.function_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.hidden_size = config.hidden_size
        self.function_channel_weight = config.function_channel_weight

    def fuse(self, rows: mx.array, text_id: int, function_id: int) -> mx.array:
        """Sum the three input channels of positions that share their previous ids.

        rows: (1, T, hidden), projected audio or prompt embeddings. The result has the wider dtype of rows and embeddings.
        The order of the sums and the product in the embeddings' dtype are part of the model's numbers.
        """
        text = self.embed_tokens(mx.array([[text_id]]))
        function = self.embed_tokens(mx.array([[function_id]]))
        return text + rows + self.function_channel_weight * function

    def next_ids(self, hidden: mx.array) -> mx.array:
        """hidden (1, 1, hidden) -> (2,): the most likely text id and function id, the lowest of equals."""
        return mx.concatenate([mx.argmax(head(hidden)[:, -1], axis=-1) for head in (self.lm_head, self.function_head)])
