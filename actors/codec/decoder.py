"""Latents to spectrogram: the encoder's mirror image, causal and therefore usable frame by frame."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.codec.cache import StreamCache
from vcpipe.actors.codec.config import CodecConfig
from vcpipe.actors.codec.convnext import CausalConvNeXtBlock
from vcpipe.actors.codec.frames import FrameLinear, Upsample


class AudioDecoder(nn.Module):
    """``layers``: for each stage an upsampling and its blocks; last a frame-wise projection to log-magnitudes and phases."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        widths = (config.latent_dim, *reversed(config.channels))
        self.layers: list[nn.Module] = []
        for stage, rate in enumerate(reversed(config.downsample_rates)):
            self.layers.append(Upsample(widths[stage], widths[stage + 1], rate))
            for block in range(config.blocks_per_stage):
                key = f"block_{stage * config.blocks_per_stage + block}"
                self.layers.append(CausalConvNeXtBlock(widths[stage + 1], config.block_kernel_size, key))
        self.layers.append(FrameLinear(widths[-1], 2 * config.bins, bias=False))

    def __call__(self, latents: mx.array, cache: StreamCache, *, flush: bool = False) -> mx.array:
        """(B, T, latent_dim) -> (B, 441 T, 2 * bins): log-magnitudes, then phases."""
        x = latents
        for layer in self.layers:
            x = layer(x, cache, flush=flush) if isinstance(layer, CausalConvNeXtBlock) else layer(x)
        return x
