"""Sizes and sampling constants of the speech decoder, read from ``tts_config`` of a checkpoint. No MLX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from vcpipe.schemas.errors import ConfigError

#: Positions of the voice prompt (the Aria latents) that every session starts with.
PROMPT_POSITIONS = 37

#: Rows of the two flag tables less their padding row: the language model's ids, whatever text_config says.
FLAGGED_IDS = 131072

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class CharEncoderConfig:
    """T5-Gemma-type encoder over the characters of one token. ``char_vocab_size`` counts the padding character."""

    hidden_size: int = 1152
    intermediate_size: int = 4608
    num_hidden_layers: int = 1
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 72
    rms_norm_eps: float = 1e-6
    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float = 50.0
    rope_theta: float = 10_000.0
    char_vocab_size: int = 257

    def __post_init__(self) -> None:
        _check_heads("tts_config.character_encoder", self)


@dataclass(frozen=True, slots=True)
class MogConfig:
    """Mixture-of-Gaussians head: ``num_predictions`` components with means of rank ``low_rank``."""

    intermediate_size: int = 4608
    low_rank: int = 64
    min_log_std: float = -4.0
    num_layers: int = 3
    num_predictions: int = 1024
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class TtsConfig:
    """The whole speech decoder; defaults are those of the 11B checkpoint."""

    hidden_size: int = 1152
    intermediate_size: int = 4608
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 72
    sliding_window: int = 7500
    sliding_window_pattern: int = 6
    rms_norm_eps: float = 1e-6
    query_pre_attn_scalar: float = 256.0
    rope_global_base_freq: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    latent_size: int = 512
    num_quantizers: int = 31
    codebook_size: int = 1024
    num_iterations: int = 8
    exponent: float = 3.0
    guidance_scale: float = 0.2
    top_p: float = 0.95
    noise_scale: float = 0.001
    character_encoder: CharEncoderConfig = field(default_factory=CharEncoderConfig)
    mog_head: MogConfig = field(default_factory=MogConfig)

    def __post_init__(self) -> None:
        _check_heads("tts_config", self)
        for name in ("sliding_window", "sliding_window_pattern", "num_quantizers", "codebook_size", "num_iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"tts_config.{name} must be at least 1, not {getattr(self, name)}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"tts_config.top_p must be above 0 and at most 1, not {self.top_p}")
        for name in ("guidance_scale", "exponent"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"tts_config.{name} must be above 0, not {getattr(self, name)}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TtsConfig:
        """From ``tts_config``: unknown keys are ignored, missing ones take the defaults."""
        nested = {
            "character_encoder": _known(CharEncoderConfig, values.get("character_encoder") or {}),
            "mog_head": _known(MogConfig, values.get("mog_head") or {}),
        }
        return _known(cls, {**values, **nested})

    def is_global(self, layer: int) -> bool:
        """Whether ``layer`` sees all positions and turns them by the global frequencies."""
        return (layer + 1) % self.sliding_window_pattern == 0

    def windows(self, history: int | None = None) -> list[int | None]:
        """Positions that each layer sees, None for all; ``history`` bounds them further, whatever the model says."""
        own = [None if self.is_global(i) else self.sliding_window for i in range(self.num_hidden_layers)]
        if history is None:
            return own
        return [history if window is None else min(window, history) for window in own]

    def codebooks_per_pass(self) -> tuple[int, ...]:
        """Codebooks that each refinement pass fixes, passes without any left out.

        The masking schedule of MaskGIT: before pass i of n, (1 - (i/n)^e)^(1/e) of the codebooks are still open.
        """
        shares = [(1.0 - (i / self.num_iterations) ** self.exponent) for i in range(self.num_iterations)]
        still_open = [math.ceil(share ** (1.0 / self.exponent) * self.num_quantizers) for share in shares]
        fixed = [now - after for now, after in zip(still_open, [*still_open[1:], 0], strict=True)]
        return tuple(count for count in fixed if count)


def _known(kind: type[C], values: Mapping[str, Any]) -> C:
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in values.items() if key in names})


def _check_heads(where: str, config: TtsConfig | CharEncoderConfig) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    if config.head_dim % 2:
        raise ConfigError(f"{where}.head_dim must be even for rotary positions, not {config.head_dim}")
