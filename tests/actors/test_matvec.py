"""The product of a quantised matrix with one vector, on whatever device there is."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vcpipe.actors.matvec import quantized_matvec


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(70, 128), (8200, 192)])
def test_it_equals_the_product_with_the_unpacked_matrix(bits: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(bits)
    packed = mx.quantize(mx.array(rng.standard_normal(shape).astype(np.float32)), 64, bits)
    x = mx.array(rng.standard_normal((1, 1, shape[1])).astype(np.float32))
    expected = np.array(x, np.float64) @ np.array(mx.dequantize(*packed, 64, bits), np.float64).T
    np.testing.assert_allclose(np.array(quantized_matvec(x, *packed, 64, bits)), expected, atol=1e-3)
