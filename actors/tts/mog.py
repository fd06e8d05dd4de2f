"""Mixture-of-Gaussians head: a pair of hidden states -> mean and spread of the continuous code to quantise.

The means have low rank: component k is low_mat[k] @ (proj_mus[k] @ x), so only the chosen component is ever computed.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.product import Activation, RmsNorm, product, product_of_sum
from vcpipe.actors.tts.config import TtsConfig
from vcpipe.actors.tts.layers import OffsetNorm, StackedMlp, matrix_of, settle


class MlpLayer(nn.Module):
    """x + post_norm(MLP(pre_norm(x)))."""

    def __init__(self, dims: int, hidden_dims: int, eps: float) -> None:
        super().__init__()
        self.pre_norm = OffsetNorm(dims, eps)
        self.mlp = StackedMlp(dims, hidden_dims)
        self.post_norm = OffsetNorm(dims, eps)


class MogHead(nn.Module):
    """See the module; ``proj_mus.weight`` and ``low_mat`` are read raw and must never be quantised.

    ``prepare`` puts the projections that every step multiplies whole into one.
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
        self.projections = matrix_of(self.proj_logits, self.proj_else, self.proj_logs)  # to predictions + Z + 1
        settle(self, "proj_logits", "proj_logs", "proj_else")

    def take_tables(self) -> tuple[mx.array, mx.array]:
        """The tables of which a pass reads one component, given away: (predictions, rank, H), (predictions, Z, rank)."""
        rank, dims = self.low_mat.shape[-1], self.proj_mus.weight.shape[-1]
        tables = self.proj_mus.weight.reshape(self.predictions, rank, dims), self.low_mat
        settle(self, "proj_mus", "low_mat")
        return tables

    @property
    def final_norm(self) -> RmsNorm:
        """The norm after all layers."""
        rms: RmsNorm = self.mlp_stack[-1].rms
        return rms

    def guided(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Conditional and unconditional x (1, 2, H) -> what guidance makes of them (1, 1, H), its projections (1, 1, O)."""
        x, mixed, post = self._through(x)
        conditional, unconditional = mx.split(self.final_norm(x + post(mixed)), 2, axis=1)
        x = conditional + self.guidance_scale * (conditional - unconditional)
        return x, product(x, self.projections)

    def projected(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The same before guidance: -> projections (1, 2, O) of the norm of what the layers made of x, (1, 2, H).

        Guidance being linear, it may as well come last, which takes fewer launches.
        """
        return product_of_sum(*self._through(x), self.final_norm, self.projections)

    def _through(self, x: mx.array) -> tuple[mx.array, mx.array, RmsNorm]:
        """All layers, without the last one's sum: -> x, what to add to it, and the norm of that."""
        first, *others = self.mlp_stack[:-1]
        gated = product(x, first.mlp.gate_up, norm=first.pre_norm.rms, activation=Activation.GATED_GELU)
        mixed, post = product(gated, first.mlp.down), first.post_norm.rms
        for layer in others:
            gated, x = product_of_sum(x, mixed, post, layer.pre_norm.rms, layer.mlp.gate_up, Activation.GATED_GELU)
            mixed, post = product(gated, layer.mlp.down), layer.post_norm.rms
        return x, mixed, post


def draw_component(logits: mx.array, top_p: float, uniform: mx.array) -> mx.array:
    """Index (1,) drawn from the nucleus of ``logits`` (1, 1, N) by N ``uniform`` numbers in [0, 1)."""
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
