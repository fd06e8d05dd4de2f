"""Mixture-of-Gaussians head: a pair of hidden states -> mean and spread of the continuous code to quantise.

The means have low rank: component k is low_mat[k] @ (proj_mus[k] @ x), so only the chosen component is ever computed.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.tts.config import TtsConfig
from vcpipe.actors.tts.layers import GatedMlp, OffsetNorm, widen_linears


class MlpLayer(nn.Module):
    """x + norm(MLP(norm(x)))."""

    def __init__(self, dims: int, hidden_dims: int, eps: float) -> None:
        super().__init__()
        self.pre_norm = OffsetNorm(dims, eps)
        self.mlp = GatedMlp(dims, hidden_dims)
        self.post_norm = OffsetNorm(dims, eps)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.post_norm(self.mlp(self.pre_norm(x)))


class MogHead(nn.Module):
    """See the module; ``proj_mus.weight`` and ``low_mat`` are read raw and must never be quantised."""

    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        head, dims = config.mog_head, config.hidden_size
        self.guidance_scale, self.top_p, self.min_log_std = config.guidance_scale, config.top_p, head.min_log_std
        layers: list[nn.Module] = [MlpLayer(dims, head.intermediate_size, head.eps) for _ in range(head.num_layers)]
        self.mlp_stack = [*layers, OffsetNorm(dims, head.eps)]
        self.proj_logits = nn.Linear(dims, head.num_predictions, bias=False)
        self.proj_mus = nn.Linear(dims, head.num_predictions * head.low_rank, bias=False)
        self.proj_logs = nn.Linear(dims, 1, bias=False)
        self.proj_else = nn.Linear(dims, config.latent_size, bias=False)
        self.low_mat = mx.zeros((head.num_predictions, config.latent_size, head.low_rank))

    def prepare(self) -> None:
        """Widen what every step multiplies whole; of ``proj_mus`` only one component is read."""
        for module in (*self.mlp_stack, self.proj_logits, self.proj_logs, self.proj_else):
            widen_linears(module)

    def __call__(self, x: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
        """Conditional and unconditional x (2, 1, H), key of one uniform draw -> mean (1, 1, Z), log_std (1, 1, 1)."""
        for layer in self.mlp_stack:
            x = layer(x)
        conditional, unconditional = x[:1], x[1:]
        x = conditional + self.guidance_scale * (conditional - unconditional)  # (1, 1, H)
        component = draw_component(keep_top_p(self.proj_logits(x), self.top_p), key).reshape(1)
        log_std = mx.maximum(self.proj_logs(x), self.min_log_std)
        return self._mean(x, component) * mx.exp(log_std) + self.proj_else(x), log_std

    def _mean(self, x: mx.array, component: mx.array) -> mx.array:
        """x (1, 1, H), component (1,) -> (1, 1, Z)."""
        predictions, latent, rank = self.low_mat.shape
        projections = self.proj_mus.weight.reshape(predictions, rank, -1)[component]  # (1, rank, H)
        low = projections @ x.reshape(1, -1, 1)  # (1, rank, 1)
        return (self.low_mat[component] @ low).reshape(1, 1, latent)


def keep_top_p(logits: mx.array, top_p: float) -> mx.array:
    """Nucleus rule on the last axis: an entry stays while the probability mass above it is below ``top_p``.

    The others become -inf. The most probable entry always stays; 1.0 keeps all.
    """
    probabilities = mx.softmax(logits.astype(mx.float32), axis=-1)
    ascending = mx.argsort(probabilities, axis=-1)
    ordered = mx.take_along_axis(probabilities, ascending, axis=-1)
    mass_above = mx.cumsum(ordered, axis=-1, reverse=True, inclusive=False)
    keep = mx.put_along_axis(mx.zeros(logits.shape, mx.bool_), ascending, mass_above < top_p, axis=-1)
    return mx.where(keep, logits, -float("inf"))


def draw_component(logits: mx.array, key: mx.array) -> mx.array:
    """Sample an index of the last axis by the Gumbel-max trick, with one uniform draw of the logits' shape."""
    uniform = mx.random.uniform(shape=logits.shape, key=key)
    gumbel = -mx.log(-mx.log(uniform + 1e-8) + 1e-8)
    return mx.argmax(mx.log(mx.softmax(logits.astype(mx.float32), axis=-1)) + gumbel, axis=-1)
