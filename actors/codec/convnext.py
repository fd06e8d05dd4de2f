"""Causal ConvNeXt block, the building stone of encoder and decoder.

ConvNeXt: Liu et al. 2022. With a spectrogram as output, for audio: Vocos, Siuzdak 2023.
"""

from __future__ import annotations

from functools import reduce

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.codec.cache import StreamCache
from vcpipe.actors.codec.frames import FrameLinear, Tabulated, on_gpu

_gelu = Tabulated(nn.gelu)


class ChannelLayerNorm(nn.Module):
    """Layer norm over the channels of (B, T, C).

    In the activations' dtype throughout. mx.fast.layer_norm rounds bfloat16 only once, at its end: samples then differ from
    the published model's by up to 0.06.
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


class DepthwiseConv(nn.Module):
    """Convolution over time of every channel by itself: (B, kernel - 1 + T, C) -> (B, T, C). To be prepared."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self._taps: list[mx.array] | None = None
        self.weight = mx.zeros((channels, kernel_size, 1))
        self.bias = mx.zeros((channels,))

    def prepare(self) -> None:
        """On a GPU a compiled sum of shifted inputs is one small kernel; the library's convolution costs many."""
        if on_gpu():
            self._taps = [
                mx.contiguous(self.weight[:, tap, 0].astype(mx.float32)) for tap in range(self.weight.shape[1])
            ]
            mx.eval(self._taps)

    def __call__(self, x: mx.array) -> mx.array:
        if self._taps is None:
            return mx.conv1d(x, self.weight, groups=x.shape[2]) + self.bias
        frames = x.shape[1] - len(self._taps) + 1
        shifted = [x[:, shift : shift + frames].astype(mx.float32) * tap for shift, tap in enumerate(self._taps)]
        return reduce(mx.add, shifted).astype(x.dtype) + self.bias


class CausalConvNeXtBlock(nn.Module):
    """Depthwise convolution over time that sees only the past, then a two-layer network on each frame, plus the input.

    ``key`` names the block's entry in the stream's cache: its last ``kernel_size - 1`` inputs.
    """

    def __init__(self, channels: int, kernel_size: int, key: str) -> None:
        super().__init__()
        self.key = key
        self.channels = channels
        self.past_frames = kernel_size - 1
        self.dwconv = DepthwiseConv(channels, kernel_size)
        self.norm = ChannelLayerNorm(channels)
        self.pwconv1 = FrameLinear(channels, 4 * channels)
        self.pwconv2 = FrameLinear(4 * channels, channels)

    def __call__(self, x: mx.array, cache: StreamCache, *, flush: bool = False) -> mx.array:
        """(B, T, C) -> (B, T, C)."""
        y = cache.update(x, self.key, self.past_frames, flush=flush)  # (B, kernel - 1 + T, C)
        y = self.norm(self.dwconv(y))  # (B, T, C)
        y = self.pwconv2(_gelu(self.pwconv1(y)))
        return x + y
