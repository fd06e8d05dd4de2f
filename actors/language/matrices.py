"""Matrices as the running network holds them: dense or packed, side by side where they meet the same input.

A bfloat16 checkpoint meets activations of two dtypes: bfloat16 in a streaming session's prompt, float32 in audio frames.
MLX then widens the narrower operand in every product. Weights never change, so that is done once, when the network for
float32 activations is made; the values, and so the products, are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.matvec import quantized_matvec

#: A packed embedding table is unpacked for good while that takes at most this much: one operation a look-up, not many.
UNPACK_LIMIT_BYTES = 256 << 20

#: Makes the form of a weight that the activations at hand want.
Convert = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class _Dense:
    """``weight`` (I, O): a transposed view of what the checkpoint stores; ``bias`` (O,)."""

    weight: mx.array
    bias: mx.array | None

    @classmethod
    def join(cls, linears: Sequence[Any]) -> _Dense:
        return cls(_stack([linear.weight for linear in linears]).T, _bias(linears))

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.weight if self.bias is None else mx.addmm(self.bias, x, self.weight)

    def converted(self, convert: Convert, convert_matrix: Convert) -> _Dense:
        return _Dense(convert_matrix(self.weight), None if self.bias is None else convert(self.bias))


@dataclass(frozen=True)
class _Packed:
    """``weight`` (O, I * bits / 32) uint32, ``scales`` and ``biases`` (O, I / group_size); ``bias`` (O,)."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bias: mx.array | None
    group_size: int
    bits: int

    @classmethod
    def join(cls, linears: Sequence[Any]) -> _Packed:
        weight, scales, biases = (
            _stack([linear[name] for linear in linears]) for name in ("weight", "scales", "biases")
        )
        return cls(weight, scales, biases, _bias(linears), linears[0].group_size, linears[0].bits)

    def __call__(self, x: mx.array) -> mx.array:
        product = quantized_matvec(x, self.weight, self.scales, self.biases, self.group_size, self.bits)
        return product if self.bias is None else product + self.bias

    def converted(self, convert: Convert, convert_matrix: Convert) -> _Packed:
        bias = None if self.bias is None else convert(self.bias)
        return replace(self, scales=convert(self.scales), biases=convert(self.biases), bias=bias)


class Projection:
    """Linear layers with one input: (..., I) -> (..., O), their outputs one behind the other."""

    def __init__(self, parts: Sequence[_Dense | _Packed]) -> None:
        self._parts = parts

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
        values = (getattr(part, field.name) for part in self._parts for field in fields(part))
        mx.eval([value for value in values if isinstance(value, mx.array)])

    @property
    def dense_weights(self) -> int:
        """How many numbers stand in dense matrices."""
        return sum(part.weight.size for part in self._parts if isinstance(part, _Dense))


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
