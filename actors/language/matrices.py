"""Matrices as the running network holds them: dense or packed, side by side where they meet the same input.

A bfloat16 checkpoint meets activations of two dtypes: bfloat16 in a streaming session's prompt, float32 in audio frames.
MLX widens the narrower operand in every product. Weights never change, so that is done once, when the network for float32
activations is made; the values, and so the products, are the same. On CUDA it is not done: there the kernels behind
:mod:`vcpipe.actors.product` widen what they read, and narrow weights are read in less time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.product import CudaMatrix, DenseRows, PackedTiles, on_cuda

#: A packed embedding table is unpacked for good while that takes at most this much: one operation a look-up, not many.
UNPACK_LIMIT_BYTES = 256 << 20

#: Makes the form of a weight that the activations at hand want.
Convert = Callable[[mx.array], mx.array]

#: Weight, scales and biases as ``mx.quantize`` gives them.
_Stored = tuple[mx.array, mx.array, mx.array]


class _Dense:
    """``rows`` (O, I): what the checkpoint stores; ``bias`` (O,)."""

    def __init__(self, rows: mx.array, bias: mx.array | None) -> None:
        self._rows = rows
        self._columns = rows.T  # a view
        self._bias = bias

    @classmethod
    def join(cls, linears: Sequence[Any]) -> _Dense:
        return cls(_stack([linear.weight for linear in linears]), _bias(linears))

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self._columns if self._bias is None else mx.addmm(self._bias, x, self._columns)

    def converted(self, convert: Convert, convert_matrix: Convert) -> _Dense:
        return _Dense(convert_matrix(self._rows), None if self._bias is None else convert(self._bias))

    def for_cuda(self) -> CudaMatrix:
        return DenseRows(self._rows, self._bias)

    def evaluate(self) -> None:
        mx.eval(self._rows, self._columns, self._bias)

    @property
    def dense_weights(self) -> int:
        return self._rows.size


class _Packed:
    """``stored``: weight (O, I * bits / 32) uint32, scales and biases (O, I / group_size); ``bias`` (O,)."""

    dense_weights = 0

    def __init__(self, stored: _Stored, bias: mx.array | None, group_size: int, bits: int) -> None:
        self._stored: _Stored | PackedTiles = stored
        self._bias = bias
        self._group_size, self._bits = group_size, bits

    @classmethod
    def join(cls, linears: Sequence[Any]) -> _Packed:
        weight, scales, biases = (
            _stack([linear[name] for linear in linears]) for name in ("weight", "scales", "biases")
        )
        return cls((weight, scales, biases), _bias(linears), linears[0].group_size, linears[0].bits)

    def __call__(self, x: mx.array) -> mx.array:
        weight, scales, biases = self._as_stored()
        product = mx.quantized_matmul(x, weight, scales, biases, group_size=self._group_size, bits=self._bits)
        return product if self._bias is None else product + self._bias

    def converted(self, convert: Convert, convert_matrix: Convert) -> _Packed:
        weight, scales, biases = self._as_stored()
        bias = None if self._bias is None else convert(self._bias)
        return _Packed((weight, convert(scales), convert(biases)), bias, self._group_size, self._bits)

    def for_cuda(self) -> CudaMatrix | None:
        """From here on the matrix is held in the kernel's order alone, if there is a kernel for it."""
        tiles = PackedTiles.of(*self._as_stored(), self._group_size, self._bits, self._bias)
        if tiles is not None:
            self._stored = tiles
        return tiles

    def evaluate(self) -> None:
        held = self._stored
        mx.eval([held.weight, held.scales] if isinstance(held, PackedTiles) else held, self._bias)

    def _as_stored(self) -> _Stored:
        return self._stored.unpacked() if isinstance(self._stored, PackedTiles) else self._stored


class Projection:
    """Linear layers with one input: (..., I) -> (..., O), their outputs one behind the other.

    ``cuda``: the one matrix that they make up, as a kernel reads it; None where there are several, or no CUDA.
    """

    def __init__(self, parts: Sequence[_Dense | _Packed]) -> None:
        self._parts = parts
        self.cuda = parts[0].for_cuda() if len(parts) == 1 and on_cuda() else None

    @classmethod
    def merge(cls, linears: Sequence[nn.Module]) -> Projection:
        """Neighbours of one kind become one matrix; a checkpoint may hold some packed, some not, or in other bits."""
        groups = [(kind, list(members)) for kind, members in groupby(linears, _kind)]
        return cls([(_Packed if kind else _Dense).join(members) for kind, members in groups])

    def __call__(self, x: mx.array) -> mx.array:
        outputs = [part(x) for part in self._parts]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=-1)

    def converted(self, convert: Convert, convert_matrix: Convert) -> Projection:
        """The same with dense matrices through ``convert_matrix``, and scales and biases through ``convert``."""
        converted = Projection([part.converted(convert, convert_matrix) for part in self._parts])
        converted.evaluate()
        return converted

    def evaluate(self) -> None:
        for part in self._parts:
            part.evaluate()

    @property
    def dense_weights(self) -> int:
        """How many numbers stand in dense matrices."""
        return sum(part.dense_weights for part in self._parts)


class Embedding:
    """Rows of the embedding table, in the dtype in which the checkpoint has them (packed: that of the scales)."""

    def __init__(self, table: Any) -> None:
        self.dtype = table.scales.dtype if "scales" in table else table.weight.dtype
        self._look_up: Callable[[mx.array], mx.array] = table
        if "scales" in table and table.num_embeddings * table.dims * self.dtype.size <= UNPACK_LIMIT_BYTES:
            unpacked = table(mx.arange(table.num_embeddings))
            mx.eval(unpacked)
            self._look_up = unpacked.__getitem__

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (n,) -> (n, hidden)."""
        return self._look_up(ids)


def _kind(linear: Any) -> tuple[int, int] | None:
    """Bits and group size; None for a dense layer."""
    return (linear.bits, linear.group_size) if "scales" in linear else None


def _stack(matrices: list[mx.array]) -> mx.array:
    return matrices[0] if len(matrices) == 1 else mx.concatenate(matrices)


def _bias(linears: Sequence[Any]) -> mx.array | None:
    return _stack([linear.bias for linear in linears]) if "bias" in linears[0] else None
