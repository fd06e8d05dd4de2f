"""Products with dense matrices: the kernel's, with all that surrounds them, beside sums in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from vcpipe.actors import product_kernels
from vcpipe.actors.product import (
    Activation,
    DenseRows,
    LayerNorm,
    Norm,
    RmsNorm,
    product,
    product_of_normed,
    product_of_sum,
)

COLUMNS = 320  # no multiple of what the lanes of a warp take at once

pytestmark = pytest.mark.usefixtures("cuda")


class Dense:
    """A matrix that is never multiplied by MLX's operations."""

    def __init__(self, outputs: int, dtype: mx.Dtype, *, biased: bool = False, rows: int = 1, columns: int = COLUMNS):
        bias = normal(outputs, seed=2) if biased else None
        self.cuda = DenseRows(normal(outputs, columns, seed=1).astype(dtype), bias, rows)

    def __call__(self, x: mx.array) -> mx.array:
        raise AssertionError("the kernel takes this product")

    def wanted(self, x: np.ndarray) -> np.ndarray:
        """(N, I) -> (N, O) float64."""
        y = x @ wide(self.cuda.weight).T
        return y if self.cuda.bias is None else y + wide(self.cuda.bias)


def normal(*shape: int, seed: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape), mx.float32)


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def normed(norm: Norm, x: np.ndarray) -> np.ndarray:
    if isinstance(norm, LayerNorm):
        centered = x - x.mean(-1, keepdims=True)
        return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + norm.eps) * wide(norm.scale) + wide(
            norm.offset
        )
    grouped = x.reshape(len(x), norm.groups, -1)
    grouped = grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + norm.eps)
    return grouped.reshape(x.shape) * wide(norm.scale)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gated(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda y: function(*np.split(y, 2, axis=-1))


ACTIVATIONS: dict[Activation, Callable[[np.ndarray], np.ndarray]] = {
    Activation.NONE: lambda y: y,
    Activation.SQUARED_RELU: lambda y: np.maximum(y, 0) ** 2,
    Activation.SILU: lambda y: y * sigmoid(y),
    Activation.GATED_GELU: gated(lambda a, b: gelu(a) * b),
    Activation.GATED_SIGMOID: gated(lambda a, b: a * sigmoid(b)),
}

RMS = RmsNorm(normal(COLUMNS, seed=3), 1e-2)
GROUPED = RmsNorm(normal(COLUMNS, seed=3), 1e-2, 8)
LAYER = LayerNorm(normal(COLUMNS, seed=3), normal(COLUMNS, seed=4), 1e-2)


def near(seen: mx.array, wanted: np.ndarray) -> None:
    assert seen.size == wanted.size
    np.testing.assert_allclose(wide(seen).reshape(wanted.shape), wanted, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize(("rows", "dtype"), [(1, mx.float32), (1, mx.float16), (2, mx.bfloat16)])
@pytest.mark.parametrize("outputs", [1, 38, 300])
def test_rows_times_a_matrix(rows: int, outputs: int, dtype: mx.Dtype) -> None:
    matrix, x = Dense(outputs, dtype, rows=rows), normal(1, rows, COLUMNS, seed=0)
    y = product(x, matrix)
    assert y.shape == (1, rows, outputs) and y.dtype == mx.float32
    near(y, matrix.wanted(wide(x)[0]))


@pytest.mark.parametrize("blocks", [1, 3])
def test_fewer_blocks_do_more(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_kernels, "_MOST_BLOCKS", blocks)
    for outputs in (3, 101):
        matrix, x = Dense(outputs, mx.bfloat16, rows=2, columns=1152), normal(1, 2, 1152, seed=0)
        near(product(x, matrix), matrix.wanted(wide(x)[0]))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("norm", [RMS, LAYER], ids=["rms", "layer"])
def test_a_norm_and_an_activation(norm: Norm, activation: Activation) -> None:
    matrix, x = Dense(34, mx.bfloat16, rows=2), normal(1, 2, COLUMNS, seed=0)
    near(
        product(x, matrix, norm=norm, activation=activation),
        ACTIVATIONS[activation](matrix.wanted(normed(norm, wide(x)[0]))),
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("norm", [None, GROUPED], ids=["plain", "grouped"])
def test_a_bias_and_a_residual(norm: RmsNorm | None, factor: float, biased: bool) -> None:
    matrix, x, residual = Dense(33, mx.float32, biased=biased), normal(1, COLUMNS, seed=0), normal(1, 33, seed=5)
    y = product(x, matrix, norm=norm, residual=residual, factor=factor)
    assert y.shape == (1, 33)
    near(y, wide(residual) + factor * matrix.wanted(wide(x) if norm is None else normed(norm, wide(x))))


def test_one_row_for_a_kernel_of_two() -> None:
    matrix, x, residual = (
        Dense(33, mx.bfloat16, biased=True, rows=2),
        normal(1, 1, COLUMNS, seed=0),
        normal(1, 1, 33, seed=5),
    )
    near(product(x, matrix), matrix.wanted(wide(x)[0]))
    near(product(x, matrix, norm=RMS, residual=residual), wide(residual)[0] + matrix.wanted(normed(RMS, wide(x)[0])))


@pytest.mark.parametrize("activation", [Activation.NONE, Activation.GATED_GELU])
def test_the_sum_before_a_norm_comes_out_too(activation: Activation) -> None:
    matrix, x, y = Dense(66, mx.bfloat16, rows=2), normal(1, 2, COLUMNS, seed=0), normal(1, 2, COLUMNS, seed=6)
    post = RmsNorm(normal(COLUMNS, seed=7), 1e-3)
    seen, carried = product_of_sum(x, y, post, RMS, matrix, activation)
    wanted = wide(x)[0] + normed(post, wide(y)[0])
    near(carried, wanted)
    near(seen, ACTIVATIONS[activation](matrix.wanted(normed(RMS, wanted))))


def test_the_norm_before_a_norm_comes_out_too() -> None:
    matrix, x = Dense(66, mx.bfloat16, biased=True), normal(1, COLUMNS, seed=0)
    before = LayerNorm(normal(COLUMNS, seed=7), normal(COLUMNS, seed=8), 1e-3)
    seen, carried = product_of_normed(x, before, LAYER, matrix, Activation.SILU)
    wanted = normed(before, wide(x))
    near(carried, wanted)
    near(seen, ACTIVATIONS[Activation.SILU](matrix.wanted(normed(LAYER, wanted))))


def test_bfloat16_rows() -> None:
    matrix, x = Dense(33, mx.bfloat16), normal(1, 1, COLUMNS, seed=0).astype(mx.bfloat16)
    y = product(x, matrix)
    assert y.dtype == mx.bfloat16
    np.testing.assert_allclose(wide(y)[0], matrix.wanted(wide(x)[0]), rtol=1 / 128)
