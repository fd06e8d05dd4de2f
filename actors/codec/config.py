"""Sizes of the codec, read from a checkpoint's ``codec_config``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vcpipe.schemas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """The defaults are those of the 11B checkpoint.

    ``base_channels`` times ``channel_multipliers`` are the widths of the encoder's stages (the decoder's in reverse), each
    ``blocks_per_stage`` ConvNeXt blocks and a resampling by ``downsample_rates``. A code frame is ``num_quantizers`` indices
    into as many codebooks of ``codebook_size`` vectors of ``latent_dim``.
    """

    sample_rate: int = 22050
    base_channels: int = 384
    channel_multipliers: tuple[int, ...] = (1, 2, 4)
    downsample_rates: tuple[int, ...] = (7, 7, 9)
    blocks_per_stage: int = 3
    block_kernel_size: int = 7
    latent_dim: int = 512
    n_fft: int = 16
    hop_length: int = 4
    num_quantizers: int = 31
    codebook_size: int = 1024

    def __post_init__(self) -> None:
        if self.n_fft % self.hop_length or (self.n_fft - self.hop_length) % 2:
            raise ConfigError(
                f"codec_config: n_fft {self.n_fft} must be a multiple of hop_length {self.hop_length}, their difference even"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CodecConfig:
        """Unknown keys are ignored, missing ones take the defaults."""
        known: dict[str, Any] = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        for name in ("channel_multipliers", "downsample_rates"):
            if name in known:
                known[name] = tuple(known[name])
        return cls(**known)

    @property
    def channels(self) -> tuple[int, ...]:
        """Width of each encoder stage."""
        return tuple(self.base_channels * multiplier for multiplier in self.channel_multipliers)

    @property
    def bins(self) -> int:
        """Frequency bins of a spectrogram frame (9)."""
        return self.n_fft // 2 + 1

    @property
    def frame_samples(self) -> int:
        """Samples of one code frame (1764)."""
        return self.hop_length * math.prod(self.downsample_rates)

    @property
    def edge_samples(self) -> int:
        """What a spectrogram reaches beyond its waveform at either end (6)."""
        return (self.n_fft - self.hop_length) // 2

    @property
    def edge_frames(self) -> int:
        """``edge_samples`` in whole spectrogram frames (2)."""
        return math.ceil(self.edge_samples / self.hop_length)
