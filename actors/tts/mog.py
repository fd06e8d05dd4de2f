"""Mixture-of-Gaussians head: a pair of hidden states -> mean and spread of the continuous code to quantise.

The means have low rank: component k is low_mat[k] @ (proj_mus[k] @ x), so only the chosen component is ever computed.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.tts import kernels
from vcpipe.actors.tts.config import TtsConfig
from vcpipe.actors.tts.layers import OffsetNorm, StackedMlp, add_norm, as_factor, dense_weight, settle


class MlpLayer(nn.Module):
    """x + post_norm(MLP(pre_norm(x)))."""

    def __init__(self, dims: int, hidden_dims: int, eps: float) -> None:
        super().__init__()
        self.pre_norm = OffsetNorm(dims, eps)
        self.mlp = StackedMlp(dims, hidden_dims)
        self.post_norm = OffsetNorm(dims, eps)


class MogHead(nn.Module):
    """See the module; ``proj_mus.weight`` and ``low_mat`` are read raw and must never be quantised.

    ``prepare`` puts the projections that every step multiplies whole into one, and widens the two tables of which it reads
    one component.
    """

    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        head, dims = config.mog_head, config.hidden_size
        self.guidance_scale, self.top_p, self.min_log_std = config.guidance_scale, config.top_p, head.min_log_std
        self.latent_size, self.predictions = config.latent_size, head.num_predictions
        layers: list[nn.Module] = [MlpLayer(dims, head.intermediate_size, head.eps) for _ in range(head.num_layers)]
        self.mlp_stack = [*layers, OffsetNorm(dims, head.eps)]
        self.proj_logits = nn.Linear(dims, head.num_predictions, bias=False)
        self.proj_mus = nn.Linear(dims, head.num_predictions * head.low_rank, bias=False)
        self.proj_logs = nn.Linear(dims, 1, bias=False)
        self.proj_else = nn.Linear(dims, config.latent_size, bias=False)
        self.low_mat = mx.zeros((head.num_predictions, config.latent_size, head.low_rank))

    def prepare(self) -> None:
        """Derive what a step multiplies with; the projections as they were loaded are let go."""
        whole = [dense_weight(linear) for linear in (self.proj_logits, self.proj_else, self.proj_logs)]
        self._projections = as_factor(mx.concatenate(whole))  # (1, H, predictions + Z + 1)
        low_rank = self.low_mat.shape[-1]
        to_low = self.proj_mus.weight.astype(mx.float32).reshape(self.predictions, low_rank, -1)
        self._to_low = to_low.swapaxes(1, 2)  # (predictions, H, rank)
        self._from_low = self.low_mat.astype(mx.float32).swapaxes(1, 2)  # (predictions, rank, Z)
        self._only = mx.zeros((1,), mx.uint32)
        settle(self, "proj_logits", "proj_mus", "proj_logs", "proj_else", "low_mat")

    def __call__(self, x: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
        """Conditional and unconditional x (1, 2, H), key of one uniform draw -> mean (1, 1, Z), log_std (1, 1, 1)."""
        *layers, final = self.mlp_stack
        norms = [*(layer.pre_norm for layer in layers), final]
        normed = norms[0](x)
        for layer, following in zip(layers, norms[1:], strict=True):
            x, normed = add_norm(x, layer.mlp(normed), layer.post_norm, following)
        conditional, unconditional = mx.split(normed, 2, axis=1)
        x = conditional + self.guidance_scale * (conditional - unconditional)  # (1, 1, H)
        parts = [self.predictions, self.predictions + self.latent_size]
        logits, rest, log_std = mx.split(x @ self._projections, parts, axis=-1)
        log_std = mx.maximum(log_std, self.min_log_std)
        uniform = mx.random.uniform(shape=logits.shape, key=key)
        component = draw_component(logits, self.top_p, uniform)
        low = mx.gather_mm(x, self._to_low, self._only, component)  # (1, 1, rank)
        mean = mx.gather_mm(low, self._from_low, self._only, component)
        return mean * mx.exp(log_std) + rest, log_std


def draw_component(logits: mx.array, top_p: float, uniform: mx.array) -> mx.array:
    """Index (1,) drawn from the nucleus of ``logits`` (1, 1, N) by N ``uniform`` numbers in [0, 1)."""
    if kernels.can_draw(logits.size):
        return kernels.draw(logits, top_p, uniform)
    return gumbel_max(keep_top_p(logits, top_p), uniform).reshape(1)


def keep_top_p(logits: mx.array, top_p: float) -> mx.array:
    """Nucleus rule on the last axis: an entry stays while the probability mass above it is below ``top_p``.

    The others become -inf. The most probable entry always stays; 1.0 keeps all.
    """
    probabilities = mx.softmax(logits.astype(mx.float32), axis=-1)
    ascending = mx.argsort(probabilities, axis=-1)
    ordered = mx.take_along_axis(probabilities, ascending, axis=-1)
    mass_above = mx.cumsum(ordered, axis=-1, reverse=True, inclusive=False)
    # Every entry is overwritten by the mass above it, at its own place.
    mass_above = mx.put_along_axis(ordered, ascending, mass_above, axis=-1)
    return mx.where(mass_above < top_p, logits, -float("inf"))


def gumbel_max(logits: mx.array, uniform: mx.array) -> mx.array:
    """Sample an index (..., 1) of the last axis by the Gumbel-max trick, with uniform numbers of the logits' shape."""
    # log p plus the Gumbel number -log(-log u), both logarithms kept off zero.
    scores = mx.log(mx.softmax(logits.astype(mx.float32), axis=-1)) - mx.log(1e-8 - mx.log(uniform + 1e-8))
    return mx.argmax(scores, axis=-1, keepdims=True)
