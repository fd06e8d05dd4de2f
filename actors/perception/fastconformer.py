"""FastConformer encoder, causal: log-mel in, one frame of 80 ms out for every 8 mel frames.

Convolutional subsampling by 8, then Conformer blocks (Gulati et al. 2020, Rekesh et al. 2023) whose attention sees a
window of past frames with relative positions in the manner of Transformer-XL (Dai et al. 2019), and whose convolutions see
the past only. Nothing looks ahead, so it runs in two ways to the same numbers, both in
:mod:`vcpipe.actors.perception.cache`: ``__call__`` and ``encode`` on chunks of a whole waveform, ``step`` on one frame of a
stream, in as few operations as can be.

Attribute names are the checkpoint's until ``prepare``, which a network needs before it runs. Activations are float32.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vcpipe.actors.perception.config import EncoderConfig
from vcpipe.actors.perception.dense import Dense, PointwiseConv, make_dense
from vcpipe.actors.perception.kernels import BlockTable, Position, Tables, attend, convolve
from vcpipe.actors.product import Activation, LayerNorm, product, product_of_normed

#: Additive mask of what a query must not see.
HIDDEN = -1e30

#: Mel frames that one encoder frame depends on: its own, 8j, and those before it.
MEL_WINDOW = 15

#: State of one block: projected keys and values of the frames before, (1, 2 * heads, frames, head_dim), and the last inputs
#: of the convolution, (1, frames, d_model). In a stream each is a ring that holds the present frame, too: it takes the place
#: of the oldest, nothing is moved.
BlockCache = tuple[mx.array, mx.array]


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

    def prepare(self) -> None:
        """A depthwise bias moves into that of the pointwise layer after it; ``out`` reads channels last, as they come.

        The convolutions widen first: they have many rows, which no kernel multiplies by a narrower matrix.
        """
        for layer in self.conv:
            layer.set_dtype(mx.float32)
        make_dense(self)
        for depthwise, pointwise in ((self.conv[2], self.conv[3]), (self.conv[5], self.conv[6])):
            pointwise.bias = pointwise(depthwise.pop("bias"))
        width, channels = len(self.out.bias), len(self.conv[0].bias)
        by_channel = self.out.rows.reshape(width, channels, -1)
        self.out = Dense(by_channel.swapaxes(1, 2).reshape(width, -1), self.out.bias)

    def __call__(self, mel: mx.array, start: int = 0, stop: int | None = None) -> mx.array:
        """(B, T, features) -> frames [start, stop) of the (B, T', d_model) that it gives."""
        x = mel[..., None]  # (B, T, F, 1)
        for stage in range(3):
            x = self._convolve(stage, x, (2, 1))
        return self.out(x[:, start:stop].flatten(2))  # (B, T', F / 8, channels) before

    def step(self, window: mx.array, alive: tuple[mx.array, mx.array]) -> mx.array:
        """The 15 mel frames 8j - 14 to 8j, (15, features), zeros where there are none -> frame j, (1, d_model)."""
        x = window[None, ..., None]
        for stage in range(3):
            x = self._convolve(stage, x, (0, 0))  # 7, 3, 1 frames
            if stage < 2:
                x = x * alive[stage]
        return product(x.reshape(1, -1), self.out)

    def _convolve(self, stage: int, x: mx.array, time_padding: tuple[int, int]) -> mx.array:
        """(B, T, F, channels) -> half the frames and frequencies."""
        layer = self.conv[0 if stage == 0 else 3 * stage - 1]
        before, after = zip(time_padding, (2, 1), strict=True)
        x = mx.conv_general(x, layer.weight, stride=2, padding=(before, after), groups=layer.groups)
        return nn.relu(x + layer.bias if stage == 0 else self.conv[3 * stage](x))


def alive(frame: int, mel_frames: int | None = None) -> tuple[mx.array, mx.array]:
    """Factors (7, 1, 1) and (3, 1, 1) for what the first two convolutions give :meth:`Subsampling.step`.

    1, but 0 where a whole waveform is padded: before its start and, where ``mel_frames`` are all there are, after its end.
    """
    factors, length = [], mel_frames
    for reach, stride in ((6, 4), (2, 2)):
        index = frame * stride - np.arange(reach, -1, -1)
        length = None if length is None else length // 2 + 1
        inside = (index >= 0) & (index < (index[-1] + 1 if length is None else length))
        factors.append(mx.array(inside[:, None, None].astype(np.float32)))
    return factors[0], factors[1]


def subsampled_length(length: int) -> int:
    """Encoder frames of ``length`` >= 1 mel frames (and frequencies of as many features)."""
    for _ in range(3):
        length = length // 2 + 1
    return length


class FeedForward(nn.Module):
    """(..., d_model) -> (..., d_model)."""

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

    def prepare(self) -> None:
        """One projection ``linear_qkv`` instead of three, one array ``pos_biases``, (2, heads, 1, head_dim), instead of two."""
        self.linear_qkv = Dense.of(*(self.pop(f"linear_{name}") for name in "qkv"))
        self.pos_biases = mx.stack([self.pop("pos_bias_u"), self.pop("pos_bias_v")])[:, :, None].astype(mx.float32)
        make_dense(self)

    def project_positions(self, sinusoids: mx.array) -> mx.array:
        """(R, d_model) -> (1, heads, R, head_dim), scaled like the content scores it is added to."""
        projected = self.linear_pos(sinusoids).reshape(1, len(sinusoids), self._heads, -1)
        return projected.swapaxes(1, 2) * self._scale

    def __call__(self, x: mx.array, window: mx.array, positions: mx.array, mask: mx.array) -> tuple[mx.array, mx.array]:
        """One chunk of c frames after the window of w frames before it.

        x: (1, c, d_model); window: see :data:`BlockCache`; positions: (1, heads, w + 2c - 1, head_dim), distance w + c - 1
        first; mask: (c, w + c), additive. Returns the output (1, c, d_model) and the window of the last w frames.
        """
        heads, chunk = self._heads, x.shape[1]
        projected = self.linear_qkv(x).reshape(1, chunk, 3 * heads, -1).swapaxes(1, 2)  # (1, 3 * heads, c, head_dim)
        window = mx.concatenate([window, projected[:, heads:]], axis=2)
        queries = projected[:, :heads] + self.pos_biases  # (2, heads, c, head_dim): for content, for position
        by_position = queries[1:] @ positions.swapaxes(2, 3)
        scores = shift_to_distances(by_position, window.shape[2]) + mask
        keys, values = window[:, :heads], window[:, heads:]
        mixed = mx.fast.scaled_dot_product_attention(queries[:1], keys, values, scale=self._scale, mask=scores)
        return self.linear_out(mixed.swapaxes(1, 2).flatten(2)), window[:, :, chunk:]

    def step(
        self, x: mx.array, norm: LayerNorm, window: mx.array, positions: mx.array, at: Position
    ) -> tuple[mx.array, mx.array]:
        """x + attention(norm(x)) of one frame, (1, d_model), and the ring with it; positions: of :meth:`Tables.of`."""
        projected = product(x, self.linear_qkv, norm=norm)
        mixed, window = attend(projected, self.pos_biases, window, positions, at)
        return product(mixed, self.linear_out, residual=x), window


def shift_to_distances(scores: mx.array, keys: int) -> mx.array:
    """Scores by distance -> scores by key, for c queries at the end of K keys.

    (B, heads, c, K + c - 1) -> (B, heads, c, K): query i takes for key j the column c - 1 - i + j. Padding one column in front
    and reading the rows at an offset of c does that without a gather (Dai et al. 2019, appendix B).
    """
    *outer, chunk, columns = scores.shape
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
        """x: (1, c, d_model), past: the kernel - 1 gated frames before it. Returns the output and the past after it."""
        chunk = x.shape[1]
        gated = mx.concatenate([past, nn.glu(self.pointwise_conv1(x), axis=-1)], axis=1)  # (1, kernel - 1 + c, d_model)
        mixed = self.batch_norm(self.depthwise_conv(gated))
        return self.pointwise_conv2(nn.silu(mixed)), gated[:, chunk:]

    def step(
        self, x: mx.array, norm: LayerNorm, past: mx.array, taps: mx.array, at: Position
    ) -> tuple[mx.array, mx.array]:
        """x + convolution(norm(x)) of one frame, (1, d_model), and the ring with it; taps: of :meth:`Tables.of`."""
        gated = product(x, self.pointwise_conv1, norm=norm, activation=Activation.GATED_SIGMOID)
        bias = self.depthwise_conv.get("bias")
        mixed, past = convolve(gated, past, taps, at, bias, layer_norm(self.batch_norm))
        return product(mixed, self.pointwise_conv2, residual=x), past


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
        """(1, c, d_model) and the state before it -> (1, c, d_model) and the state after it."""
        window, past = cache
        x = x + 0.5 * self.feed_forward1(self.norm_feed_forward1(x))
        attended, window = self.self_attn(self.norm_self_att(x), window, positions, mask)
        x = x + attended
        convolved, past = self.conv(self.norm_conv(x), past)
        x = x + convolved
        x = x + 0.5 * self.feed_forward2(self.norm_feed_forward2(x))
        return self.norm_out(x), (window, past)

    def step(
        self, x: mx.array, before: LayerNorm | None, cache: BlockCache, table: BlockTable, at: Position
    ) -> tuple[mx.array, BlockCache]:
        """One frame, (1, d_model), and the state before it -> the same after it, all but for this block's last norm.

        ``before``: the last norm of the block before, which the first launch of this one does.
        """
        (window, past), (positions, taps) = cache, table
        norm = layer_norm(self.norm_feed_forward1)
        if before is None:
            inner = product(x, self.feed_forward1.linear1, norm=norm, activation=Activation.SILU)
        else:
            inner, x = product_of_normed(x, before, norm, self.feed_forward1.linear1, Activation.SILU)
        x = product(inner, self.feed_forward1.linear2, residual=x, factor=0.5)
        x, window = self.self_attn.step(x, layer_norm(self.norm_self_att), window, positions, at)
        x, past = self.conv.step(x, layer_norm(self.norm_conv), past, taps, at)
        norm = layer_norm(self.norm_feed_forward2)
        inner = product(x, self.feed_forward2.linear1, norm=norm, activation=Activation.SILU)
        return product(inner, self.feed_forward2.linear2, residual=x, factor=0.5), (window, past)


class FastConformer(nn.Module):
    """The encoder. It holds weights only; streams hold the state."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.pre_encode = Subsampling(config)
        self.layers = [ConformerBlock(config) for _ in range(config.n_layers)]

    def prepare(self) -> None:
        """Bring the loaded weights into the form they run in: fewer arrays, and what no kernel widens is float32."""
        self.pre_encode.prepare()
        for layer in self.layers:
            layer.self_attn.prepare()
        make_dense(self)
        self.set_dtype(mx.float32)
        positions = mx.concatenate(self.project_positions(1))[:, :, ::-1]
        taps = mx.stack([layer.conv.depthwise_conv.weight[:, ::-1, 0].T for layer in self.layers])
        self._tables = Tables(positions, taps)
        mx.eval(self.parameters())

    def empty_caches(self) -> list[BlockCache]:
        """State of every block before a waveform. The window is full-sized: :func:`window_mask` hides what is empty."""
        return self._caches(self.config.left_context, self.config.conv_kernel_size - 1)

    def empty_rings(self) -> list[BlockCache]:
        """State of every block before the first frame of a stream."""
        return self._caches(self.config.left_context + 1, self.config.conv_kernel_size)

    def _caches(self, window_frames: int, past_frames: int) -> list[BlockCache]:
        config = self.config
        window = mx.zeros((1, 2 * config.n_heads, window_frames, config.head_dim))
        past = mx.zeros((1, past_frames, config.d_model))
        return [(window, past) for _ in self.layers]

    def project_positions(self, chunk_frames: int) -> list[mx.array]:
        """For every block the positions of chunks of ``chunk_frames``, see :meth:`RelativeAttention.__call__`."""
        left = self.config.left_context
        table = sinusoids(left + chunk_frames - 1, 1 - chunk_frames, self.config.d_model)
        return [layer.self_attn.project_positions(table) for layer in self.layers]

    def encode(
        self, x: mx.array, caches: list[BlockCache], positions: list[mx.array], mask: mx.array
    ) -> tuple[mx.array, list[BlockCache]]:
        """A chunk of subsampled frames, (1, c, d_model) -> encoded frames (1, c, d_model) and the state after them.

        ``positions``: of :meth:`project_positions` for c frames.
        """
        after = []
        for layer, cache, layer_positions in zip(self.layers, caches, positions, strict=True):
            x, cache = layer(x, cache, layer_positions, mask)
            after.append(cache)
        return x, after

    def step(self, x: mx.array, rings: list[BlockCache], at: Position) -> tuple[mx.array, list[BlockCache]]:
        """One subsampled frame, (1, d_model) -> the encoded frame, (1, d_model), and the rings after it. Pure; one shape."""
        after, before = [], None
        for layer, ring, table in zip(self.layers, rings, self._tables.of(at), strict=True):
            x, ring = layer.step(x, before, ring, table, at)
            before = layer_norm(layer.norm_out)
            after.append(ring)
        return self.layers[-1].norm_out(x), after


def layer_norm(layer: nn.LayerNorm) -> LayerNorm:
    """As products take it."""
    return LayerNorm(layer.weight, layer.bias, layer.eps)


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
