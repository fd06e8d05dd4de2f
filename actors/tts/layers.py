"""Small layers shared by the backbone, the character encoder and the MoG head.

What a layer derives from its weights alone is made once by ``prepare``, which runs after loading and changes no result by
even a bit. Derived arrays have names with a leading underscore: MLX does not count them as parameters.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


class GemmaNorm(nn.Module):
    """RMS norm scaled by 1 + weight; the sum is rounded to the stored dtype, as in Gemma 3. (..., D) float32 -> same."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.zeros((dims,))
        self._scale = self.weight
        self.eps = eps

    def prepare(self) -> None:
        """Make the scale."""
        self._scale = (1.0 + self.weight).astype(mx.float32)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self._scale, self.eps)


class OffsetNorm(nn.Module):
    """RMS norm scaled by 1 + weight, all in float32 and cast back. (..., D) of any dtype -> same."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.zeros((dims,))
        self._scale = self.weight
        self.eps = eps

    def prepare(self) -> None:
        """Make the scale."""
        self._scale = 1.0 + self.weight.astype(mx.float32)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x.astype(mx.float32), self._scale, self.eps).astype(x.dtype)


class GatedMlp(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x)), without biases."""

    def __init__(self, dims: int, hidden_dims: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims, hidden_dims, bias=False)
        self.up_proj = nn.Linear(dims, hidden_dims, bias=False)
        self.down_proj = nn.Linear(hidden_dims, dims, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


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


def widen_linears(module: nn.Module) -> None:
    """Store the dense linear layers below ``module`` in float32.

    For layers whose input is float32: MLX would widen their weights in every step. Quantised layers stay as they are.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.update({name: value.astype(mx.float32) for name, value in layer.parameters().items()})
