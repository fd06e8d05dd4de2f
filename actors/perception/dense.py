"""Linear layers as they run: float32 matrices laid out for products with a single row."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map


class PointwiseConv(nn.Module):
    """Parameters of a convolution of kernel size 1 over ``axes`` axes; it runs as the matrix product it is, :class:`Dense`."""

    def __init__(self, inputs: int, outputs: int, *, axes: int, bias: bool) -> None:
        super().__init__()
        self.weight = mx.zeros((outputs, *[1] * axes, inputs))
        if bias:
            self.bias = mx.zeros((outputs,))


class Dense(nn.Module):
    """x @ matrix + bias: (..., inputs) -> (..., outputs).

    The matrix is held as it is multiplied, (inputs, outputs), so that no step transposes it. On the CPU it is stored that
    way too, because BLAS multiplies a single row by such a matrix 3 times faster; GPU kernels want the transposed storage.
    """

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        """``weight``: (outputs, inputs)."""
        super().__init__()
        transposed = weight.astype(mx.float32).T
        self.matrix = mx.contiguous(transposed) if mx.default_device().type == mx.cpu else transposed
        if bias is not None:
            self.bias = bias.astype(mx.float32)
        mx.eval(self.parameters())

    def __call__(self, x: mx.array) -> mx.array:
        y = x @ self.matrix
        return y + self.bias if "bias" in self else y

    @classmethod
    def of(cls, *layers: nn.Module) -> Dense:
        """One layer for several of the same inputs, linear (packed or not) or pointwise: their outputs side by side."""
        weights = [_rows(layer) for layer in layers]
        biases = [layer.bias.astype(mx.float32) for layer in layers if "bias" in layer]
        assert len(biases) in (0, len(layers))
        return cls(mx.concatenate(weights), mx.concatenate(biases) if biases else None)


def make_dense(module: nn.Module) -> None:
    """Replace every linear and pointwise layer inside ``module``."""

    def replaced(layer: nn.Module) -> nn.Module:
        return Dense.of(layer) if isinstance(layer, (nn.Linear, nn.QuantizedLinear, PointwiseConv)) else layer

    module.update_modules(tree_map(replaced, module.leaf_modules(), is_leaf=nn.Module.is_module))


def _rows(layer: nn.Module) -> mx.array:
    """(outputs, inputs) float32; packed weights come out as exactly as they are multiplied."""
    if isinstance(layer, nn.QuantizedLinear):
        scales, biases = (part.astype(mx.float32) for part in (layer.scales, layer.biases))
        return mx.dequantize(layer.weight, scales, biases, group_size=layer.group_size, bits=layer.bits)
    return layer.weight.reshape(len(layer.weight), -1).astype(mx.float32)
