"""Norms over the last axis, as products take them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """RMS norm over each of ``groups`` equal parts of the last axis, times ``scale`` (D,)."""

    scale: mx.array
    eps: float
    groups: int = 1

    def __call__(self, x: mx.array) -> mx.array:
        if self.groups == 1:
            return mx.fast.rms_norm(x, self.scale, self.eps)
        grouped = x.reshape(*x.shape[:-1], self.groups, -1)
        normed = self.scale.reshape(self.groups, -1) * mx.fast.rms_norm(grouped, None, self.eps)
        return normed.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer norm over the last axis with ``scale`` and ``offset`` (D,)."""

    scale: mx.array
    offset: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.scale, self.offset, self.eps)


Norm = RmsNorm | LayerNorm
