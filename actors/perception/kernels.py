"""What a block of the encoder does with one frame between its products: attention and depthwise convolution over rings.

A ring holds what past frames left, and the present frame takes the place of the oldest: nothing is moved. On a CUDA GPU each
part is one launch (``attention.cuh``, ``convolution.cuh``), which writes the ring that comes after, too. On any other device it
is MLX's operations.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vcpipe.actors.product import LayerNorm, included, on_cuda

_PACKAGE = "vcpipe.actors.perception"

#: Threads of a block, as in ``kernels.cuh``.
_THREADS = 512

#: Positions and taps of one block, see :class:`Tables`.
BlockTable = tuple[mx.array, mx.array]


class Position(NamedTuple):
    """All that depends on where in its stream a frame is."""

    newest: mx.array  # (window, 1) bool: the slot of the attention's ring that the frame takes
    distances: mx.array  # (window,) int32: frames since each slot was taken
    mask: mx.array  # (window,) float32: very negative for slots not taken yet
    newest_tap: mx.array  # (kernel, 1) bool and
    tap_distances: mx.array  # (kernel,) int32: the same for the convolution's ring


class Tables:
    """What :func:`attend` and :func:`convolve` know of distances, for every block."""

    def __init__(self, positions: mx.array, taps: mx.array) -> None:
        """By distance, 0 first: projected positions (layers, heads, window, head_dim), kernels (layers, kernel, d_model)."""
        self._positions, self._taps = positions, taps
        self._by_distance: list[BlockTable] = []
        if on_cuda():
            self._by_distance = [(mx.contiguous(a), mx.contiguous(b)) for a, b in _each_layer(positions, taps)]
        mx.eval(positions, taps, self._by_distance)

    def of(self, at: Position) -> list[BlockTable]:
        """For every block, by slot: positions (1, heads, head_dim, window) and taps (1, kernel, d_model).

        For CUDA they stay as they are, (1, heads, window, head_dim) by distance: a kernel finds the rows itself.
        """
        if self._by_distance:
            return self._by_distance
        positions = mx.take(self._positions, at.distances, axis=2).swapaxes(2, 3)
        taps = mx.take(self._taps, at.tap_distances, axis=1)
        return _each_layer(positions, taps)


def _each_layer(positions: mx.array, taps: mx.array) -> list[BlockTable]:
    count = len(taps)
    return list(zip(mx.split(positions, count), mx.split(taps, count), strict=True))


def attend(
    projected: mx.array, biases: mx.array, window: mx.array, positions: mx.array, at: Position
) -> tuple[mx.array, mx.array]:
    """Relative attention of one frame.

    projected: (1, 3 * d_model), its query, key and value; biases: (2, heads, 1, head_dim), of the query for content and for
    position; window: the ring of keys and values, (1, 2 * heads, slots, head_dim); positions: of :meth:`Tables.of`.
    Returns the mixed values, (1, d_model), and the ring with the frame in it.
    """
    _, rows, slots, width = window.shape
    heads = rows // 2
    if on_cuda():
        mixed, window = _kernel(_ATTEND)(
            inputs=[projected, window, positions, biases, at.distances, at.mask],
            template=[("HEADS", heads), ("SLOTS", slots), ("DIM", width)],
            grid=(heads * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(1, heads * width), window.shape],
            output_dtypes=[mx.float32, mx.float32],
        )
        return mixed, window
    # No fused attention: where that takes a mask, it is made of the same parts.
    projected = projected.reshape(1, 3 * heads, 1, -1)
    window = mx.where(at.newest, projected[:, heads:], window)
    queries = projected[:, :heads] + biases
    by_content = queries[:1] @ window[:, :heads].swapaxes(2, 3)  # (1, heads, 1, slots)
    scores = width**-0.5 * by_content + queries[1:] @ positions + at.mask
    mixed = mx.softmax(scores, axis=-1) @ window[:, heads:]
    return mixed.reshape(1, -1), window


def convolve(
    gated: mx.array, past: mx.array, taps: mx.array, at: Position, bias: mx.array | None, norm: LayerNorm
) -> tuple[mx.array, mx.array]:
    """silu(norm(causal depthwise convolution + bias)) of one frame.

    gated: (1, d_model); past: the ring of as many frames as the kernel has taps, (1, kernel, d_model); taps: of
    :meth:`Tables.of`. Returns (1, d_model) and the ring with the frame in it.
    """
    if on_cuda():
        _, count, width = past.shape
        mixed, past = _kernel(_CONVOLVE)(
            inputs=[gated, past, taps, at.tap_distances, gated if bias is None else bias, norm.scale, norm.offset],
            template=[
                ("WIDTH", width),
                ("TAPS", count),
                ("BIASED", bias is not None),
                ("EPS", int(np.float32(norm.eps).view(np.int32))),  # templates take integers
            ],
            grid=(_THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[gated.shape, past.shape],
            output_dtypes=[mx.float32, mx.float32],
        )
        return mixed, past
    past = mx.where(at.newest_tap, gated, past)
    mixed = mx.sum(past * taps, axis=1)
    if bias is not None:
        mixed = mixed + bias
    return nn.silu(norm(mixed)), past


class _Kernel(NamedTuple):
    """A function in a file of its own, beside ``kernels.cuh``."""

    file: str
    name: str
    template: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


_ATTEND = _Kernel(
    "attention.cuh",
    "attend",
    ("HEADS", "SLOTS", "DIM"),
    ("projected", "window", "positions", "biases", "distances", "mask"),
    ("mixed", "after"),
)
_CONVOLVE = _Kernel(
    "convolution.cuh",
    "convolve",
    ("WIDTH", "TAPS", "BIASED", "EPS"),
    ("gated", "past", "taps", "distances", "bias", "scale", "offset"),
    ("mixed", "after"),
)


@cache
def _kernel(kernel: _Kernel) -> Any:
    arguments = ", ".join((*kernel.inputs, *kernel.outputs))
    return mx.fast.cuda_kernel(
        name=f"vcpipe_perception_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=f"{kernel.name}<{', '.join(kernel.template)}>({arguments});",
        header=included("vcpipe.actors", "warp.cuh")
        + included(_PACKAGE, "kernels.cuh")
        + included(_PACKAGE, kernel.file),
    )
