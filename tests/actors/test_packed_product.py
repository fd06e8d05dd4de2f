"""Products with matrices of 4 and 8 bits: the kernel's, and MLX's own where there is none for them."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from vcpipe.actors.language.matrices import Projection
from vcpipe.actors.product import Activation, PackedTiles, RmsNorm, product


def example(rows: int, columns: int, group: int, bits: int, dtype: mx.Dtype) -> tuple[Projection, np.ndarray]:
    """A packed layer with scales of ``dtype``, and its matrix (rows, columns) in float64."""
    rng = np.random.default_rng(bits)
    layer = nn.Linear(columns, rows, bias=False)
    layer.weight = mx.array(rng.standard_normal((rows, columns)), dtype)
    packed = nn.QuantizedLinear.from_linear(layer, group, bits)
    wide = (packed.scales.astype(mx.float32), packed.biases.astype(mx.float32))
    return Projection.merge([packed]), np.array(mx.dequantize(packed.weight, *wide, group, bits), np.float64)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("rows", "columns", "group", "bits", "dtype"),
    [
        (32, 64, 64, 4, mx.float32),
        (96, 1088, 64, 4, mx.bfloat16),
        (32, 15680, 64, 4, mx.float32),  # the longest row of the public model
        (64, 224, 32, 8, mx.float32),
        (32, 256, 128, 8, mx.float16),
    ],
)
def test_a_packed_product_equals_the_one_with_the_unpacked_matrix(
    rows: int, columns: int, group: int, bits: int, dtype: mx.Dtype
) -> None:
    matrix, unpacked = example(rows, columns, group, bits, dtype)
    assert matrix.cuda is not None
    x = mx.array(np.random.default_rng(1).standard_normal((1, 1, columns)), mx.float32)
    y = product(x, matrix)
    assert y.shape == (1, 1, rows) and y.dtype == mx.float32
    wanted = unpacked @ np.array(x, np.float64).ravel()
    np.testing.assert_allclose(np.array(y).ravel(), wanted, atol=2e-5 * columns**0.5)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 1e-3), (mx.bfloat16, 0.5)])  # steps of 0.25 above 32
def test_a_packed_product_with_all_that_surrounds_it(dtype: mx.Dtype, tolerance: float) -> None:
    matrix, unpacked = example(64, 256, 64, 4, mx.bfloat16)
    rng = np.random.default_rng(1)
    x, residual = (mx.array(rng.standard_normal((1, 1, size)), dtype) for size in (256, 64))
    norm = RmsNorm(mx.array(rng.standard_normal(256) / 3, dtype), 1e-5, 4)
    y = product(x, matrix, norm=norm, activation=Activation.SQUARED_RELU, residual=residual)
    assert y.dtype == dtype
    normed, added = (np.array(a.astype(mx.float32), np.float64).ravel() for a in (norm(x), residual))
    wanted = added + np.maximum(unpacked @ normed, 0) ** 2
    np.testing.assert_allclose(np.array(y.astype(mx.float32)).ravel(), wanted, atol=tolerance, rtol=tolerance / 40)


@pytest.mark.parametrize(("rows", "group", "bits"), [(64, 32, 4), (64, 64, 6), (70, 64, 4)])
def test_other_matrices_have_mlx_own_products(rows: int, group: int, bits: int, cuda: bool) -> None:
    matrix, unpacked = example(rows, 128, group, bits, mx.bfloat16)
    assert matrix.cuda is None
    x = mx.array(np.random.default_rng(1).standard_normal((1, 1, 128)), mx.float32)
    wanted = unpacked @ np.array(x, np.float64).ravel()
    np.testing.assert_allclose(np.array(product(x, matrix)).ravel(), wanted, atol=5e-2 if cuda else 1e-3)


@pytest.mark.usefixtures("cuda")
def test_many_rows_have_mlx_own_product_too() -> None:
    matrix, unpacked = example(96, 128, 64, 4, mx.bfloat16)
    assert matrix.cuda is not None
    x = mx.array(np.random.default_rng(1).standard_normal((1, 9, 128)), mx.float32)
    np.testing.assert_allclose(np.array(product(x, matrix))[0], np.array(x, np.float64)[0] @ unpacked.T, atol=5e-2)


@pytest.mark.parametrize(("rows", "columns", "group", "bits"), [(96, 128, 64, 4), (32, 96, 32, 8)])
def test_the_order_that_a_kernel_reads_is_another_order_only(rows: int, columns: int, group: int, bits: int) -> None:
    stored = mx.quantize(mx.random.normal((rows, columns), key=mx.random.key(3)), group, bits)
    tiles = PackedTiles.of(*stored, group, bits, None)
    assert tiles is not None and tiles.shape == (rows, columns)
    for array, wanted in zip(tiles.unpacked(), stored, strict=True):
        assert np.array_equal(np.array(array), np.array(wanted))
