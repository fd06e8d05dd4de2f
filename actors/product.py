"""Rows times a matrix with what surrounds the product: a norm before it, an activation and a residual sum after it.

A frame is one position, so every product of a step reads its whole matrix for one or two rows, and the time should be that of
reading the matrix. On a CUDA GPU all of :func:`product` is one launch (``product_kernels``), which widens weights as it reads
them: between launches a GPU idles, and MLX's own products of packed matrices are bound by arithmetic. On any other device the
parts run one by one, as MLX has them, to the same values up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from vcpipe.actors.norms import LayerNorm, Norm, RmsNorm
from vcpipe.actors.product_kernels import (
    Activation,
    CudaMatrix,
    DenseRows,
    Input,
    PackedTiles,
    included,
    launch,
    on_cuda,
)

__all__ = [
    "Activation",
    "CudaMatrix",
    "DenseRows",
    "LayerNorm",
    "Matrix",
    "Norm",
    "PackedTiles",
    "RmsNorm",
    "included",
    "laid_out",
    "on_cuda",
    "product",
    "product_of_normed",
    "product_of_sum",
]


class Matrix(Protocol):
    """What :func:`product` multiplies with."""

    @property
    def cuda(self) -> CudaMatrix | None:
        """What the kernel reads; None where products are MLX's own."""
        ...

    def __call__(self, x: mx.array) -> mx.array:
        """(..., I) -> (..., O), bias added, by MLX's operations."""
        ...


def laid_out(matrix: mx.array) -> mx.array:
    """A transposed view as products want it: on a CPU a copy in order, as OpenBLAS would pack a view anew for every product."""
    return mx.contiguous(matrix) if mx.default_device().type == mx.cpu else matrix


def gelu_tanh(x: mx.array) -> mx.array:
    """Gaussian error linear unit in its tanh form. Plain operations, as they are part of a compiled step."""
    return 0.5 * x * (1 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def _gated(function: Callable[[mx.array, mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    return lambda y: function(*mx.split(y, 2, axis=-1))


_PLAIN: dict[Activation, Callable[[mx.array], mx.array]] = {
    Activation.NONE: lambda y: y,
    Activation.SQUARED_RELU: lambda y: mx.square(mx.maximum(y, 0)),
    Activation.SILU: lambda y: y * mx.sigmoid(y),
    Activation.GATED_GELU: _gated(lambda a, b: gelu_tanh(a) * b),
    Activation.GATED_SIGMOID: _gated(lambda a, b: a * mx.sigmoid(b)),
}


def product(
    x: mx.array,
    matrix: Matrix,
    *,
    norm: Norm | None = None,
    activation: Activation = Activation.NONE,
    residual: mx.array | None = None,
    factor: float = 1.0,
) -> mx.array:
    """residual + factor * activation(norm(x) W^T + bias): (1, N, I) or (N, I) -> the same with O (gated: O / 2) outputs.

    ``x`` of a kernel is float32, bfloat16 or float16, and so is what comes out; sums are float32. Without ``residual`` there is
    no factor.
    """
    made = Input(x, norm)
    if matrix.cuda is not None and (results := launch(made, matrix.cuda, activation, residual, factor)) is not None:
        return results[0]
    y = _PLAIN[activation](matrix(x if norm is None else norm(x)))
    if residual is None:
        return y
    return residual + y if factor == 1.0 else residual + factor * y


def product_of_sum(
    x: mx.array, y: mx.array, post: RmsNorm, norm: Norm, matrix: Matrix, activation: Activation = Activation.NONE
) -> tuple[mx.array, mx.array]:
    """h = x + post(y): -> activation(norm(h) W^T + bias) and h."""
    return _carrying(Input(x, norm, y, post), matrix, activation)


def product_of_normed(
    x: mx.array, before: LayerNorm, norm: LayerNorm, matrix: Matrix, activation: Activation = Activation.NONE
) -> tuple[mx.array, mx.array]:
    """h = before(x): -> activation(norm(h) W^T + bias) and h."""
    return _carrying(Input(x, norm, None, before), matrix, activation)


def _carrying(made: Input, matrix: Matrix, activation: Activation) -> tuple[mx.array, mx.array]:
    if matrix.cuda is not None and (results := launch(made, matrix.cuda, activation)) is not None:
        return results[0], results[1]
    assert made.carry is not None and made.norm is not None
    h = made.carry(made.x) if made.y is None else made.x + made.carry(made.y)
    return _PLAIN[activation](matrix(made.norm(h))), h
