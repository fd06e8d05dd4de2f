"""Linear layers as they run: matrices laid out for products with a single row."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from vcpipe.actors.product import DenseRows, laid_out, on_cuda


class PointwiseConv(nn.Module):
    """Parameters of a convolution of kernel size 1 over ``axes`` axes; it runs as the matrix product it is, :class:`Dense`."""

    def __init__(self, inputs: int, outputs: int, *, axes: int, bias: bool) -> None:
        super().__init__()
        self.weight = mx.zeros((outputs, *[1] * axes, inputs))
        if bias:
            self.bias = mx.zeros((outputs,))


class Dense(nn.Module):
    """x @ matrix + bias: (..., inputs) -> (..., outputs). What :mod:`vcpipe.actors.product` calls a matrix.

    The matrix is held as it is multiplied. For CUDA kernels those are its rows in the dtype in which they are stored, out of
    ``set_dtype``'s reach. Elsewhere it is (inputs, outputs) float32, so that no step transposes or widens it. On the CPU it is
    stored that way too, because BLAS multiplies a single row by such a matrix 3 times faster; Metal wants the transposed
    storage.
    """

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        """``weight``: (outputs, inputs)."""
        super().__init__()
        self._rows = mx.contiguous(weight) if on_cuda() else None
        if self._rows is None:
            transposed = weight.astype(mx.float32).T
            self.matrix = laid_out(transposed)
        if bias is not None:
            self.bias = bias.astype(mx.float32)
        mx.eval(self.parameters(), self._rows)

    @property
    def rows(self) -> mx.array:
        """(outputs, inputs)."""
        return self.matrix.T if self._rows is None else self._rows

    @property
    def cuda(self) -> DenseRows | None:
        """For the kernels, where there is CUDA."""
        return None if self._rows is None else DenseRows(self._rows, self.get("bias"))

    def __call__(self, x: mx.array) -> mx.array:
        y = x @ (self.matrix if self._rows is None else self._rows.astype(mx.float32).T)
        return y + self.bias if "bias" in self else y

    @classmethod
    def of(cls, *layers: nn.Module) -> Dense:
        """One layer for several of the same inputs, linear (packed or not) or pointwise: their outputs side by side."""
        weights = [_rows_of(layer) for layer in layers]
        biases = [layer.bias.astype(mx.float32) for layer in layers if "bias" in layer]
        assert len(biases) in (0, len(layers))
        return cls(mx.concatenate(weights), mx.concatenate(biases) if biases else None)


def make_dense(module: nn.Module) -> None:
    """Replace every linear and pointwise layer inside ``module``."""

    def replaced(layer: nn.Module) -> nn.Module:
        return Dense.of(layer) if isinstance(layer, (nn.Linear, nn.QuantizedLinear, PointwiseConv)) else layer

    module.update_modules(tree_map(replaced, module.leaf_modules(), is_leaf=nn.Module.is_module))


def _rows_of(layer: nn.Module) -> mx.array:
    """(outputs, inputs) as stored; packed weights come out as exactly as they are multiplied, in float32."""
    if isinstance(layer, nn.QuantizedLinear):
        scales, biases = (part.astype(mx.float32) for part in (layer.scales, layer.biases))
        return mx.dequantize(layer.weight, scales, biases, group_size=layer.group_size, bits=layer.bits)
    return layer.weight.reshape(len(layer.weight), -1)
