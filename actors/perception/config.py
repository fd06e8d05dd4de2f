"""Sizes of the perception networks, read from a checkpoint's runtime config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vcpipe.schemas.errors import ConfigError

#: Mel frames of one encoder frame: three convolutions of stride 2.
SUBSAMPLING = 8

#: The one shape of FastConformer that can be run frame by frame: keys of ``audio_config.encoder`` -> accepted value.
_STREAMABLE_ENCODER = {
    "subsampling_factor": SUBSAMPLING,
    "causal_downsampling": True,
    "conv_context_size": "causal",
    "conv_norm_type": "layer_norm",
    "self_attention_model": "rel_pos",
    "att_context_style": "chunked_limited",
    "xscaling": False,
}


@dataclass(frozen=True, slots=True)
class MelConfig:
    """The log-mel frontend. ``window_size`` and ``window_stride`` in seconds, ``sample_rate`` in Hz."""

    sample_rate: int = 16000
    features: int = 128
    n_fft: int = 512
    window_size: float = 0.025
    window_stride: float = 0.01
    window: str = "hann"
    normalize: str = "NA"
    preemph: float = 0.97
    log_zero_guard_value: float = 2.0**-24
    pad_to: int = 0

    def __post_init__(self) -> None:
        if self.window != "hann":
            raise ConfigError(f"audio_config.preprocessor: window {self.window!r} is unknown; accepted: hann")
        # Both of these need the whole waveform before the first frame.
        if self.normalize in ("per_feature", "all_features"):
            raise ConfigError(f"audio_config.preprocessor: normalize {self.normalize!r} cannot stream; accepted: NA")
        if self.pad_to > 0:
            raise ConfigError(f"audio_config.preprocessor: pad_to {self.pad_to} cannot stream; accepted: 0")
        if not 0 < self.hop_samples <= self.window_samples <= self.n_fft:
            raise ConfigError(
                f"audio_config.preprocessor: a hop of {self.hop_samples} samples, a window of {self.window_samples} and "
                f"n_fft {self.n_fft} must be positive and rise in this order"
            )

    @property
    def window_samples(self) -> int:
        """Samples under the window (400)."""
        return int(self.window_size * self.sample_rate)

    @property
    def hop_samples(self) -> int:
        """Samples between the centres of two mel frames (160)."""
        return int(self.window_stride * self.sample_rate)

    @property
    def half_samples(self) -> int:
        """Samples a mel frame reaches to either side of its centre (256)."""
        return self.n_fft // 2

    @property
    def min_samples(self) -> int:
        """Shortest waveform whose reflections at both ends still fill one mel frame (172)."""
        return -(-(self.n_fft + 2) // 3)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The FastConformer encoder. ``left_context``: encoder frames before its own that a frame attends to."""

    feat_in: int = 128
    n_layers: int = 24
    d_model: int = 1024
    n_heads: int = 8
    ff_expansion_factor: int = 4
    subsampling_conv_channels: int = 256
    conv_kernel_size: int = 9
    use_bias: bool = False
    left_context: int = 70

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads or self.d_model % 2:
            raise ConfigError(
                f"audio_config.encoder: d_model {self.d_model} must be even and a multiple of n_heads {self.n_heads}"
            )
        if self.left_context < 0 or self.conv_kernel_size < 1:
            raise ConfigError(
                f"audio_config.encoder: left context {self.left_context} must not be negative and conv_kernel_size "
                f"{self.conv_kernel_size} must be at least 1"
            )

    @property
    def head_dim(self) -> int:
        """Width of an attention head (128)."""
        return self.d_model // self.n_heads


@dataclass(frozen=True, slots=True)
class RnntConfig:
    """The RNN-T decoder. ``pieces``: what its ids spell, empty where the checkpoint brings none; ``blank_id`` is none of them.

    ``embeddings`` counts rows of the prediction network's table, ``classes`` the joint network's outputs.
    """

    encoder_hidden: int = 1024
    pred_hidden: int = 640
    pred_rnn_layers: int = 2
    joint_hidden: int = 640
    embeddings: int = 1025
    classes: int = 1025
    blank_id: int = 1024
    max_symbols: int = 10
    pieces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.blank_id < self.classes:
            raise ConfigError(
                f"rnnt_blank_id {self.blank_id} must be one of the joint network's {self.classes} classes"
            )
        if self.max_symbols < 1:
            raise ConfigError(f"audio_config.max_symbols must be at least 1, not {self.max_symbols}")


@dataclass(frozen=True, slots=True)
class PerceptionConfig:
    """Everything the stage is built from. ``output_dim``: width of a projected frame (4480)."""

    mel: MelConfig = field(default_factory=MelConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    rnnt: RnntConfig = field(default_factory=RnntConfig)
    output_dim: int = 4480

    @property
    def frame_samples(self) -> int:
        """Samples of one encoder frame (1280)."""
        return SUBSAMPLING * self.mel.hop_samples

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> PerceptionConfig:
        """From a runtime config with all defaults filled in. ConfigError for networks of another kind."""
        audio = config["audio_config"]
        encoder, decoder, joint = audio["encoder"], audio["decoder"], audio["joint"]
        for key, accepted in _STREAMABLE_ENCODER.items():
            if encoder[key] != accepted:
                raise ConfigError(
                    f"audio_config.encoder: {key} {encoder[key]!r} is not supported; accepted: {accepted!r}"
                )
        if joint["activation"].lower() != "relu":
            raise ConfigError(
                f"audio_config.joint: activation {joint['activation']!r} is not supported; accepted: relu"
            )
        left_context = encoder["att_context_size"][0][0]
        return cls(
            mel=MelConfig(**_known(MelConfig, audio["preprocessor"])),
            encoder=EncoderConfig(**_known(EncoderConfig, encoder), left_context=left_context),
            rnnt=RnntConfig(
                **_known(RnntConfig, {**decoder, **joint, "max_symbols": audio["max_symbols"]}),
                embeddings=decoder["vocab_size"] + bool(decoder["blank_as_pad"]),
                classes=joint["num_classes"] + 1,
                blank_id=config["rnnt_blank_id"],
                pieces=tuple(config["rnnt_vocabulary"]),
            ),
            output_dim=audio["output_dim"],
        )


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in fields(kind) if f.name in values}
