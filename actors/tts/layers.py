"""Small layers shared by the backbone, the character encoder and the MoG head.

What a layer derives from its weights alone is made once by ``prepare``, which runs after loading. Derived arrays have names
with a leading underscore: MLX does not count them as parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.product import DenseRows, RmsNorm, gelu_tanh, laid_out, on_cuda

#: Rearranges the rows or the columns of a matrix (O, I).
Arrange = Callable[[mx.array], mx.array]


class GemmaNorm(nn.Module):
    """RMS norm scaled by 1 + weight; the sum is rounded to the stored dtype, as in Gemma 3. (..., D) float32 -> same."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.zeros((dims,))
        self._scale = self.weight
        self.eps = eps

    @property
    def scale(self) -> mx.array:
        """(D,) float32."""
        return (1.0 + self.weight).astype(mx.float32)

    @property
    def rms(self) -> RmsNorm:
        """This norm, as products take it."""
        return RmsNorm(self._scale, self.eps)

    def prepare(self) -> None:
        """Make the scale."""
        self._scale = self.scale
        settle(self)

    def __call__(self, x: mx.array) -> mx.array:
        return self.rms(x)


class OffsetNorm(nn.Module):
    """RMS norm scaled by 1 + weight, all in float32 and cast back. (..., D) of any dtype -> same."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.zeros((dims,))
        self._scale = self.weight
        self.eps = eps

    @property
    def rms(self) -> RmsNorm:
        """This norm of float32, as products take it."""
        return RmsNorm(self._scale, self.eps)

    def prepare(self) -> None:
        """Make the scale."""
        self._scale = 1.0 + self.weight.astype(mx.float32)
        settle(self)

    def __call__(self, x: mx.array) -> mx.array:
        return self.rms(x.astype(mx.float32)).astype(x.dtype)


class GatedMlp(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x)), without biases."""

    def __init__(self, dims: int, hidden_dims: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims, hidden_dims, bias=False)
        self.up_proj = nn.Linear(dims, hidden_dims, bias=False)
        self.down_proj = nn.Linear(hidden_dims, dims, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(gelu_tanh(self.gate_proj(x)) * self.up_proj(x))


class StackedMlp(GatedMlp):
    """``prepare`` makes the matrices of a step of it: gate and up projection in one, and the way down."""

    def prepare(self) -> None:
        """Derive what a step multiplies with; the projections as they were loaded are let go."""
        self.gate_up = matrix_of(self.gate_proj, self.up_proj)
        self.down = matrix_of(self.down_proj)
        settle(self, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Matrix:
    """What float32 rows (1, N, I) are multiplied with: see :mod:`vcpipe.actors.product`.

    ``factor``: (parts, I, O / parts) float32 for MLX's products, which are (parts, N, O / parts). On CUDA there is none but
    the matrix as it is stored, if not packed; products are (1, N, O) then. ``bias``: (O,) float32.
    """

    factor: mx.array | None
    bias: mx.array | None
    cuda: DenseRows | None

    def __call__(self, x: mx.array) -> mx.array:
        factor = self.factor
        if factor is None:
            assert self.cuda is not None, "a matrix has one or the other"
            factor = self.cuda.weight.astype(mx.float32).T[None]
        y = x @ factor
        return y if self.bias is None else y + self.bias


def matrix_of(
    *linears: nn.Linear, in_parts: bool = False, rows: Arrange | None = None, columns: Arrange | None = None
) -> Matrix:
    """The weights of ``linears``, rows and columns of each rearranged, one below the other or ``in_parts``.

    A single layer's bias comes along.
    """
    bias = linears[0].bias.astype(mx.float32) if "bias" in linears[0] else None
    assert bias is None or len(linears) == 1, "biases are not joined"
    rows, columns = rows or _unchanged, columns or _unchanged
    if on_cuda():
        stored = (dense_weight(one) if isinstance(one, nn.QuantizedLinear) else one.weight for one in linears)
        weight = mx.contiguous(mx.concatenate([rows(columns(one)) for one in stored]))
        mx.eval([weight] if bias is None else [weight, bias])
        # Under guidance there is a row with the text and one without.
        return Matrix(None, bias, DenseRows(weight, bias, rows=2))
    dense = [rows(columns(dense_weight(linear))) for linear in linears]
    factor = laid_out(mx.stack(dense).swapaxes(1, 2) if in_parts else mx.concatenate(dense).T[None])
    mx.eval([factor] if bias is None else [factor, bias])
    return Matrix(factor, bias, None)


def _unchanged(weight: mx.array) -> mx.array:
    return weight


def split_heads(x: mx.array, heads: int) -> mx.array:
    """(B, T, heads * D) -> (B, heads, T, D)."""
    batch, length, _ = x.shape
    return x.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x: mx.array) -> mx.array:
    """(B, heads, T, D) -> (B, T, heads * D)."""
    batch, _, length, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, -1)


def prepare_layers(module: nn.Module) -> None:
    """Call ``prepare`` of every layer below ``module`` that has one."""
    for layer in module.modules():
        if layer is not module and hasattr(layer, "prepare"):
            layer.prepare()


def dense_weight(linear: nn.Linear) -> mx.array:
    """Weight (O, I) of a linear layer in float32, unpacked where it is quantised."""
    if isinstance(linear, nn.QuantizedLinear):
        scales, biases = linear.scales.astype(mx.float32), linear.biases.astype(mx.float32)
        return mx.dequantize(linear.weight, scales, biases, group_size=linear.group_size, bits=linear.bits)
    return linear.weight.astype(mx.float32)


def settle(module: nn.Module, *names: str) -> None:
    """Evaluate what ``module`` has derived and let the named children go, so that no weight is held twice."""
    mx.eval([value for name, value in module.items() if name.startswith("_")])
    for name in names:
        del module[name]
