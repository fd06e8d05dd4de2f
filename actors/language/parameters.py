"""The names and shapes under which a checkpoint stores the language stage, and nothing that computes.

Attribute names are those of the checkpoint, so loading needs no map. After loading, :func:`merge` puts matrices that meet
the same input side by side and lets go of the single ones, so that no weight is held twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.language.config import ATTENTION, MAMBA, MLP, LanguageConfig
from vcpipe.actors.language.matrices import Projection


class GroupNormParameters(nn.Module):
    """One weight a channel."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = mx.ones((size,))


class MambaParameters(nn.Module):
    """A Mamba-2 mixer: projections, a depthwise convolution, and per head the step bias, the decay and the skip weight."""

    merged = {"in_proj": ("in_proj",), "out_proj": ("out_proj",)}

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        inner, channels, heads = config.inner_size, config.conv_size, config.mamba_num_heads
        self.in_proj = nn.Linear(config.hidden_size, inner + channels + heads, bias=config.mamba_proj_bias)
        self.conv1d = nn.Conv1d(channels, channels, config.conv_kernel, groups=channels, bias=config.use_conv_bias)
        self.dt_bias = mx.ones((heads,))
        self.A_log = mx.zeros((heads,))
        self.D = mx.ones((heads,))
        self.norm = GroupNormParameters(inner)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.mamba_proj_bias)


class AttentionParameters(nn.Module):
    """Four projections."""

    merged = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)}

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        query_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, query_size, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.o_proj = nn.Linear(query_size, hidden, bias=bias)


class MlpParameters(nn.Module):
    """Two projections."""

    merged = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)


_MIXERS: dict[str, Callable[[LanguageConfig], nn.Module]] = {
    MAMBA: MambaParameters,
    ATTENTION: AttentionParameters,
    MLP: MlpParameters,
}


class BlockParameters(nn.Module):
    """A norm and a mixer."""

    def __init__(self, config: LanguageConfig, letter: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size)
        self.mixer = _MIXERS[letter](config)


class BackboneParameters(nn.Module):
    """The blocks and the final norm."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.layers = [BlockParameters(config, letter) for letter in config.hybrid_override_pattern]
        self.norm_f = nn.RMSNorm(config.hidden_size)


class LanguageParameters(nn.Module):
    """Everything of the language stage that has weights."""

    merged = {"heads": ("lm_head", "function_head")}

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.llm = BackboneParameters(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.function_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def merge(parameters: LanguageParameters) -> None:
    """Replace linear layers by projections, in place: ``merged`` of each class says which make up which.

    One projection at a time is evaluated, so that what is held beyond the weights is at most one pair of copies.
    """
    for module in (parameters, *(layer.mixer for layer in parameters.llm.layers)):
        for name, parts in module.merged.items():
            linears: list[Any] = [module.pop(part) for part in parts]
            projection = Projection.merge(linears)
            linears.clear()
            projection.evaluate()
            setattr(module, name, projection)
