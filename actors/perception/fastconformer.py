"""FastConformer encoder, causal: log-mel in, one frame of 80 ms out for every 8 mel frames.

Convolutional subsampling by 8, then Conformer blocks (Gulati et al. 2020, Rekesh et al. 2023) whose attention sees a
window of past frames with relative positions in the manner of Transformer-XL (Dai et al. 2019), and whose convolutions see
the past only. Nothing looks ahead, so one code serves streams and whole waveforms: :mod:`vcpipe.actors.perception.cache`.

Attribute names are the checkpoint's. Activations are float32.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vcpipe.actors.perception.config import EncoderConfig

#: Additive mask of what a query must not see.
HIDDEN = -1e30

#: State of one block: projected keys and values of the window, (B, heads, left_context, head_dim) each, and the last
#: inputs of the convolution, (B, kernel - 1, d_model).
BlockCache = tuple[mx.array, mx.array, mx.array]


class PointwiseConv(nn.Module):
    """A convolution of kernel size 1 over ``axes`` axes, computed as the matrix product it is. (..., in) -> (..., out)."""

    def __init__(self, inputs: int, outputs: int, *, axes: int, bias: bool) -> None:
        super().__init__()
        self.weight = mx.zeros((outputs, *[1] * axes, inputs))
        if bias:
            self.bias = mx.zeros((outputs,))

    def __call__(self, x: mx.array) -> mx.array:
        matrix = self.weight.squeeze(tuple(range(1, self.weight.ndim - 1))).T
        return mx.addmm(self.bias, x, matrix) if "bias" in self else x @ matrix


class Subsampling(nn.Module):
    """Three stride-2 convolutions over time and frequency, each padded by 2 before and 1 after on both axes.

    Output frame j depends on mel frames 8j - 14 to 8j (on the padding after the end where a length on the way is even).
    T mel frames give :func:`subsampled_length` frames.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        channels = config.subsampling_conv_channels
        self.conv = [
            nn.Conv2d(1, channels, kernel_size=3, stride=2),
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel_size=3, stride=2, groups=channels),
            PointwiseConv(channels, channels, axes=2, bias=True),
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel_size=3, stride=2, groups=channels),
            PointwiseConv(channels, channels, axes=2, bias=True),
            nn.ReLU(),
        ]
        self.out = nn.Linear(channels * subsampled_length(config.feat_in), config.d_model)

    def __call__(self, mel: mx.array, start: int = 0, stop: int | None = None) -> mx.array:
        """(B, T, features) -> frames [start, stop) of the (B, T', d_model) that it gives."""
        x = mel[..., None]  # (B, T, F, 1)
        for layer in self.conv:
            if isinstance(layer, nn.Conv2d):
                x = mx.pad(x, [(0, 0), (2, 1), (2, 1), (0, 0)])
            x = layer(x)
        x = x[:, start:stop]  # (B, T', F / 8, channels)
        return self.out(x.swapaxes(2, 3).flatten(2))


def subsampled_length(length: int) -> int:
    """Encoder frames of ``length`` >= 1 mel frames (and frequencies of as many features)."""
    for _ in range(3):
        length = length // 2 + 1
    return length


class FeedForward(nn.Module):
    """(B, T, d_model) -> (B, T, d_model)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        inner = config.d_model * config.ff_expansion_factor
        self.linear1 = nn.Linear(config.d_model, inner, bias=config.use_bias)
        self.linear2 = nn.Linear(inner, config.d_model, bias=config.use_bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear2(nn.silu(self.linear1(x)))


class RelativeAttention(nn.Module):
    """Attention over a window of frames; distances enter through projected sinusoids and two learned biases."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, bias = config.d_model, config.use_bias
        self._heads = config.n_heads
        self._scale = config.head_dim**-0.5
        self.linear_q = nn.Linear(width, width, bias=bias)
        self.linear_k = nn.Linear(width, width, bias=bias)
        self.linear_v = nn.Linear(width, width, bias=bias)
        self.linear_out = nn.Linear(width, width, bias=bias)
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u = mx.zeros((config.n_heads, config.head_dim))
        self.pos_bias_v = mx.zeros((config.n_heads, config.head_dim))

    def project_positions(self, sinusoids: mx.array) -> mx.array:
        """(R, d_model) -> (heads, head_dim, R), scaled like the content scores it is added to."""
        projected = self.linear_pos(sinusoids).reshape(len(sinusoids), self._heads, -1)
        return projected.transpose(1, 2, 0) * self._scale

    def __call__(
        self, x: mx.array, keys: mx.array, values: mx.array, positions: mx.array, mask: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """One chunk of c frames after the window of w frames before it.

        x: (B, c, d_model); keys, values: (B, heads, w, head_dim); positions: (heads, head_dim, w + 2c - 1), distance w + c - 1
        first; mask: (c, w + c), additive. Returns the output (B, c, d_model) and the keys and values of the last w frames.
        """
        chunk = x.shape[1]
        queries = self.linear_q(x).reshape(*x.shape[:2], self._heads, -1)
        keys = mx.concatenate([keys, self._split(self.linear_k(x))], axis=2)
        values = mx.concatenate([values, self._split(self.linear_v(x))], axis=2)
        by_content = (queries + self.pos_bias_u).swapaxes(1, 2)  # (B, heads, c, head_dim)
        by_position = (queries + self.pos_bias_v).swapaxes(1, 2) @ positions
        scores = shift_to_distances(by_position, keys.shape[2]) + mask
        mixed = mx.fast.scaled_dot_product_attention(by_content, keys, values, scale=self._scale, mask=scores)
        output = self.linear_out(mixed.swapaxes(1, 2).flatten(2))
        return output, keys[:, :, chunk:], values[:, :, chunk:]

    def _split(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], self._heads, -1).swapaxes(1, 2)  # (B, heads, c, head_dim)


def shift_to_distances(scores: mx.array, keys: int) -> mx.array:
    """Scores by distance -> scores by key, for c queries at the end of K keys.

    (B, heads, c, K + c - 1) -> (B, heads, c, K): query i takes for key j the column c - 1 - i + j. Padding one column in front
    and reading the rows at an offset of c does that without a gather (Dai et al. 2019, appendix B).
    """
    *outer, chunk, columns = scores.shape
    if chunk == 1:
        return scores
    padded = mx.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(1, 0)])
    return padded.reshape(*outer, columns + 1, chunk)[..., 1:, :].reshape(scores.shape)[..., :keys]


class ConvModule(nn.Module):
    """Gated pointwise convolution, causal depthwise convolution, LayerNorm (named ``batch_norm`` in checkpoints)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, bias = config.d_model, config.use_bias
        self.pointwise_conv1 = PointwiseConv(width, 2 * width, axes=1, bias=bias)
        self.depthwise_conv = nn.Conv1d(width, width, config.conv_kernel_size, groups=width, bias=bias)
        self.batch_norm = nn.LayerNorm(width)
        self.pointwise_conv2 = PointwiseConv(width, width, axes=1, bias=bias)

    def __call__(self, x: mx.array, past: mx.array) -> tuple[mx.array, mx.array]:
        """x: (B, c, d_model), past: the kernel - 1 gated frames before it. Returns the output and the past after it."""
        chunk = x.shape[1]
        gated = mx.concatenate([past, nn.glu(self.pointwise_conv1(x), axis=-1)], axis=1)  # (B, kernel - 1 + c, d_model)
        mixed = self.batch_norm(self.depthwise_conv(gated))
        return self.pointwise_conv2(nn.silu(mixed)), gated[:, chunk:]


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, each on its normalised input; a norm last."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.norm_feed_forward1 = nn.LayerNorm(config.d_model)
        self.feed_forward1 = FeedForward(config)
        self.norm_self_att = nn.LayerNorm(config.d_model)
        self.self_attn = RelativeAttention(config)
        self.norm_conv = nn.LayerNorm(config.d_model)
        self.conv = ConvModule(config)
        self.norm_feed_forward2 = nn.LayerNorm(config.d_model)
        self.feed_forward2 = FeedForward(config)
        self.norm_out = nn.LayerNorm(config.d_model)

    def __call__(
        self, x: mx.array, cache: BlockCache, positions: mx.array, mask: mx.array
    ) -> tuple[mx.array, BlockCache]:
        """(B, c, d_model) and the state before it -> (B, c, d_model) and the state after it."""
        keys, values, past = cache
        x = x + 0.5 * self.feed_forward1(self.norm_feed_forward1(x))
        attended, keys, values = self.self_attn(self.norm_self_att(x), keys, values, positions, mask)
        x = x + attended
        convolved, past = self.conv(self.norm_conv(x), past)
        x = x + convolved
        x = x + 0.5 * self.feed_forward2(self.norm_feed_forward2(x))
        return self.norm_out(x), (keys, values, past)


class FastConformer(nn.Module):
    """The encoder. It holds weights only; streams hold the state."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.pre_encode = Subsampling(config)
        self.layers = [ConformerBlock(config) for _ in range(config.n_layers)]

    def empty_caches(self) -> list[BlockCache]:
        """State of every block before the first frame. The window is full-sized: :func:`window_mask` hides what is empty."""
        config = self.config
        window = mx.zeros((1, config.n_heads, config.left_context, config.head_dim))
        past = mx.zeros((1, config.conv_kernel_size - 1, config.d_model))
        return [(window, window, past) for _ in self.layers]

    def project_positions(self, chunk_frames: int) -> list[mx.array]:
        """For every block the positions of chunks of ``chunk_frames``, see :meth:`RelativeAttention.__call__`."""
        left = self.config.left_context
        table = sinusoids(left + chunk_frames - 1, 1 - chunk_frames, self.config.d_model)
        return [layer.self_attn.project_positions(table) for layer in self.layers]

    def encode(
        self, x: mx.array, caches: list[BlockCache], positions: list[mx.array], mask: mx.array
    ) -> tuple[mx.array, list[BlockCache]]:
        """Subsampled frames (B, c, d_model) -> encoded frames (B, c, d_model) and the state after them.

        A pure function of arrays; its shapes depend on c alone. ``positions``: of :meth:`project_positions` for c frames.
        """
        after = []
        for layer, cache, layer_positions in zip(self.layers, caches, positions, strict=True):
            x, cache = layer(x, cache, layer_positions, mask)
            after.append(cache)
        return x, after


def sinusoids(first: int, last: int, width: int) -> mx.array:
    """(first - last + 1, width) float32 for distances first, first - 1, ... last: sines and cosines in turn."""
    distances = mx.arange(first, last - 1, -1).astype(mx.float32)[:, None]
    rates = mx.exp(mx.arange(0, width, 2, dtype=mx.float32) * -(math.log(10000.0) / width))
    angles = distances * rates
    return mx.stack([mx.sin(angles), mx.cos(angles)], axis=-1).flatten(1)


def window_mask(chunk_frames: int, left_context: int, seen: int) -> mx.array:
    """(c, left + c) additive mask: a frame sees itself and ``left_context`` frames before it, if the stream had them.

    ``seen``: frames of the stream before this chunk.
    """
    query = np.arange(chunk_frames)[:, None] + left_context
    key = np.arange(left_context + chunk_frames)
    visible = (key <= query) & (key >= query - left_context) & (key >= left_context - seen)
    return mx.array(np.where(visible, np.float32(0.0), np.float32(HIDDEN)))
