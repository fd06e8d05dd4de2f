"""Causal ConvNeXt block, the building stone of encoder and decoder.

ConvNeXt: Liu et al. 2022. With a spectrogram as output, for audio: Vocos, Siuzdak 2023.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.codec.cache import StreamCache


class ChannelLayerNorm(nn.Module):
    """Layer norm over the channels of (B, T, C).

    In the activations' dtype throughout: mx.fast.layer_norm computes in float32 and rounds bfloat16 elsewhere.
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = mx.ones((channels,))
        self.bias = mx.zeros((channels,))

    def __call__(self, x: mx.array) -> mx.array:
        mean = mx.mean(x, axis=-1, keepdims=True)
        variance = mx.var(x, axis=-1, keepdims=True)
        return (x - mean) * mx.rsqrt(variance + self.eps) * self.weight + self.bias


class CausalConvNeXtBlock(nn.Module):
    """Depthwise convolution over time that sees only the past, then a two-layer network on each frame, plus the input.

    ``key`` names the block's entry in the stream's cache: its last ``kernel_size - 1`` inputs.
    """

    def __init__(self, channels: int, kernel_size: int, key: str) -> None:
        super().__init__()
        self.key = key
        self.past_frames = kernel_size - 1
        self.dwconv = nn.Conv1d(channels, channels, kernel_size, groups=channels)
        self.norm = ChannelLayerNorm(channels)
        self.pwconv1 = nn.Conv1d(channels, 4 * channels, 1)
        self.pwconv2 = nn.Conv1d(4 * channels, channels, 1)

    def __call__(self, x: mx.array, cache: StreamCache, *, flush: bool = False) -> mx.array:
        """(B, T, C) -> (B, T, C)."""
        y = cache.update(x, self.key, self.past_frames, flush=flush)  # (B, kernel-1+T, C)
        y = self.norm(self.dwconv(y))  # (B, T, C)
        y = self.pwconv2(nn.gelu(self.pwconv1(y)))
        return x + y
