"""What the language stage takes from a checkpoint's runtime config. No MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vcpipe.schemas.errors import ConfigError

#: Letters of a block pattern.
MAMBA, ATTENTION, MLP = "M", "*", "-"


@dataclass(frozen=True, slots=True)
class LanguageConfig:
    """Sizes of Nemotron-H, the ids that have a meaning, and the weight of the function channel on the input.

    Fields bear the names of the config's keys. ``hybrid_override_pattern``: one letter a block. ``time_step_limit``: bounds
    of the state-space step size after softplus. Raises ConfigError for sizes and ids that cannot be.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    hybrid_override_pattern: str
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int
    conv_kernel: int
    layer_norm_epsilon: float
    attention_bias: bool
    mlp_bias: bool
    mamba_proj_bias: bool
    use_conv_bias: bool
    time_step_limit: tuple[float, float]
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    silence_token_id: int
    function_channel_weight: float
    default_system_prompt: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and not field.name.endswith("_id") and value < 1:
                raise ConfigError(f"config: text_config.{field.name} must be at least 1, not {value}")
        for whole, part in (("num_attention_heads", "num_key_value_heads"), ("mamba_num_heads", "n_groups")):
            dividend, divisor = getattr(self, whole), getattr(self, part)
            if dividend % divisor:
                raise ConfigError(
                    f"config: text_config.{whole} is {dividend}, which is no multiple of {part} ({divisor})"
                )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "silence_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ConfigError(f"config: {name} is {getattr(self, name)}; the vocabulary has {self.vocab_size} ids")

    @classmethod
    def from_runtime(cls, config: Mapping[str, Any]) -> LanguageConfig:
        """From a config as ``read_config`` returns it: checked and complete.

        The ids come from the top level: text_config may repeat those of the base model, which mean something else.
        """
        text = config["text_config"]
        values = {f.name: config[f.name] if f.name in _TOP_LEVEL else text[f.name] for f in fields(cls)}
        return cls(**values | {"time_step_limit": tuple(text["time_step_limit"])})

    @property
    def inner_size(self) -> int:
        """Channels of the state-space branch: heads times head size."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_size(self) -> int:
        """Channels under the causal convolution: x, B and C."""
        return self.inner_size + 2 * self.n_groups * self.ssm_state_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that never reach decoded text."""
        return frozenset((self.bos_token_id, self.eos_token_id, self.pad_token_id, self.silence_token_id))


_TOP_LEVEL = frozenset(
    (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "silence_token_id",
        "function_channel_weight",
        "default_system_prompt",
    )
)
