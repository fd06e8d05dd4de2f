"""Small layers shared by the backbone, the character encoder and the MoG head.

What a layer derives from its weights alone is made once by ``prepare``, which runs after loading. Derived arrays have names
with a leading underscore: MLX does not count them as parameters.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.tts import kernels


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

    def prepare(self) -> None:
        """Make the scale."""
        self._scale = self.scale
        settle(self)

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
        settle(self)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x.astype(mx.float32), self._scale, self.eps).astype(x.dtype)


def add_norm(
    x: mx.array, y: mx.array, post: GemmaNorm | OffsetNorm, following: GemmaNorm | OffsetNorm
) -> tuple[mx.array, mx.array]:
    """x + post(y) and what ``following`` makes of it; all (1, N, D) float32."""
    if kernels.usable():
        return kernels.add_norm(x, y, (post._scale, post.eps), (following._scale, following.eps))
    x = x + post(y)
    return x, following(x)


def gelu_tanh(x: mx.array) -> mx.array:
    """Gaussian error linear unit in its tanh form. Plain operations, as they are part of a compiled step."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


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
    """A gated MLP on float32 rows (1, N, D). ``prepare`` makes one matrix of gate and up projection."""

    def prepare(self) -> None:
        """Derive what a step multiplies with; the projections as they were loaded are let go."""
        self._gate_up = as_factor(mx.concatenate([dense_weight(self.gate_proj), dense_weight(self.up_proj)]))
        self._down = as_factor(dense_weight(self.down_proj))
        settle(self, "gate_proj", "up_proj", "down_proj")

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(x @ self._gate_up, 2, axis=-1)
        return (gelu_tanh(gate) * up) @ self._down


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


def as_factor(weight: mx.array) -> mx.array:
    """Weight (O, I) -> (1, I, O): rows (1, N, I) times it are one operation, without changes of shape."""
    return weight.T[None]


def settle(module: nn.Module, *names: str) -> None:
    """Evaluate what ``module`` has derived and let the named children go, so that no weight is held twice."""
    mx.eval([value for name, value in module.items() if name.startswith("_")])
    for name in names:
        del module[name]
