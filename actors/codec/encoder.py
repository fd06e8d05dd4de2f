"""Waveform to latents: spectrogram, causal ConvNeXt stages, strided convolutions. Runs once, on silence."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.codec.cache import StreamCache
from vcpipe.actors.codec.config import CodecConfig
from vcpipe.actors.codec.convnext import CausalConvNeXtBlock
from vcpipe.actors.codec.frames import FrameLinear
from vcpipe.actors.codec.stft import spectral_features


class AudioEncoder(nn.Module):
    """``layers``: a frame-wise projection, then for each stage its blocks and a convolution that strides over its rate."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self._config = config
        widths = (*config.channels, config.latent_dim)
        self.layers: list[nn.Module] = [FrameLinear(2 * config.bins, widths[0], bias=False)]
        for stage, rate in enumerate(config.downsample_rates):
            for block in range(config.blocks_per_stage):
                key = f"block_{stage * config.blocks_per_stage + block}"
                self.layers.append(CausalConvNeXtBlock(widths[stage], config.block_kernel_size, key))
            self.layers.append(nn.Conv1d(widths[stage], widths[stage + 1], rate, stride=rate, bias=False))

    def __call__(self, waveform: mx.array) -> mx.array:
        """(B, samples) or (B, 1, samples) float32 -> (B, samples // frame_samples, latent_dim)."""
        if waveform.ndim == 3:
            if waveform.shape[1] != 1:
                raise ValueError(f"the codec encodes one channel, not {waveform.shape[1]}")
            waveform = waveform[:, 0]
        x = spectral_features(waveform, self._config.n_fft, self._config.hop_length)  # (B, F, 18)
        cache = StreamCache()
        for layer in self.layers:
            x = layer(x, cache) if isinstance(layer, CausalConvNeXtBlock) else layer(x)
        return x
