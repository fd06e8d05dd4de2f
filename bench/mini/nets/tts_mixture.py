"""Mixture-of-Gaussians head of the speech decoder: likelihood of a continuous code, and codes drawn by refinement.

``vcpipe.actors.tts.mog`` and ``passes`` in PyTorch, for many frames at once. A frame's codes are fixed in passes (MaskGIT):
each predicts what the codebooks fixed so far leave of the continuous code, and fixes a few more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vcpipe.bench.mini.nets.tts_text import GatedMlp, OffsetNorm, linear

#: What a checkpoint's config leaves out.
MIN_LOG_STD, EXPONENT, ITERATIONS = -4.0, 3.0, 8


def codebooks_per_pass(config: Mapping[str, Any]) -> list[int]:
    """Codebooks that each pass fixes, passes that fix none left out: (1 - (i / n)^e)^(1 / e) of them are open before pass i."""
    iterations, exponent = config.get("num_iterations", ITERATIONS), config.get("exponent", EXPONENT)
    shares = [(1.0 - (i / iterations) ** exponent) ** (1.0 / exponent) for i in range(iterations)]
    still_open = [math.ceil(share * config["num_quantizers"]) for share in shares]
    fixed = [now - after for now, after in zip(still_open, [*still_open[1:], 0], strict=True)]
    return [count for count in fixed if count]


def known_counts(config: Mapping[str, Any]) -> list[int]:
    """Codebooks known before each pass: 0, 1, 2, 5, 9 of 31 in eight iterations."""
    counts = codebooks_per_pass(config)
    return [sum(counts[:i]) for i in range(len(counts))]


class MlpLayer(nn.Module):
    """x + post_norm(MLP(pre_norm(x)))."""

    def __init__(self, dims: int, hidden_dims: int) -> None:
        super().__init__()
        self.pre_norm = OffsetNorm(dims)
        self.mlp = GatedMlp(dims, hidden_dims)
        self.post_norm = OffsetNorm(dims)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.post_norm(self.mlp(self.pre_norm(x)))


@dataclass(frozen=True)
class Likelihood:
    """Of N residuals, (N,) each: ``nll`` in nats under the mixture; ``drawn_nll``: under a drawn component, on average.

    ``log_std``; ``entropy`` of the choice among components, in nats; ``component``: the one most responsible for the residual.
    """

    nll: Tensor
    drawn_nll: Tensor
    log_std: Tensor
    entropy: Tensor
    component: Tensor


class MogHead(nn.Module):
    """P components with means of rank R, one spread for all of them and all dimensions."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        head, dims = config["mog_head"], config["hidden_size"]
        self.latent, self.components, self.rank = config["latent_size"], head["num_predictions"], head["low_rank"]
        self.guidance, self.top_p, self.noise = config["guidance_scale"], config["top_p"], config["noise_scale"]
        self.min_log_std = head.get("min_log_std", MIN_LOG_STD)
        layers = [MlpLayer(dims, head["intermediate_size"]) for _ in range(head["num_layers"])]
        self.mlp_stack = nn.ModuleList([*layers, OffsetNorm(dims)])
        self.proj_logits = linear(dims, self.components, gain=0.1)
        self.proj_mus = linear(dims, self.components * self.rank)
        self.proj_logs = linear(dims, 1, gain=0.1)
        self.proj_else = linear(dims, self.latent, gain=0.3)
        self.low_mat = nn.Parameter(torch.randn(self.components, self.latent, self.rank) * self.rank**-0.5)

    def stack(self, x: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        for layer in self.mlp_stack:
            x = layer(x)
        return x

    # -------------------------------------------------------------------------------------------- training
    def likelihood(self, x: Tensor, residual: Tensor) -> Likelihood:
        """Of residuals (N, Z) under the mixtures that x (N, H), out of the stack, stands for."""
        logits, log_std = self.proj_logits(x), self._log_std(x)
        low = self.proj_mus(x).unflatten(-1, (self.components, self.rank))
        means = torch.einsum("npr,pzr->npz", low, self.low_mat)  # in units of the spread
        wanted = (residual - self.proj_else(x)) * torch.exp(-log_std)
        squared = (means - wanted[:, None]).square().sum(dim=-1)  # (N, P)
        log_prior = logits.log_softmax(dim=-1)
        log_joint = log_prior - 0.5 * squared
        constant = self.latent * (log_std[:, 0] + 0.5 * math.log(2 * math.pi))
        nll = constant - log_joint.logsumexp(dim=-1)
        prior = log_prior.exp()
        drawn_nll = constant + 0.5 * (prior * squared).sum(dim=-1)
        entropy = -(prior * log_prior).sum(dim=-1).detach()
        return Likelihood(nll, drawn_nll, log_std.detach()[:, 0], entropy, log_joint.detach().argmax(dim=-1))

    def _log_std(self, x: Tensor) -> Tensor:
        return self.proj_logs(x).clamp(min=self.min_log_std)

    # -------------------------------------------------------------------------------------------- drawing
    def draw(self, x: Tensor, uniform: Tensor, normal: Tensor) -> Tensor:
        """A continuous code (N, Z) from x (N, H), guided or not, by uniform (N, P) and normal (N, Z) numbers."""
        component = gumbel_max(keep_top_p(self.proj_logits(x), self.top_p), uniform)  # (N,)
        low = self.proj_mus(x).unflatten(-1, (self.components, self.rank))
        low = low[torch.arange(len(x), device=x.device), component]  # (N, R)
        std = torch.exp(self._log_std(x))
        mean = torch.einsum("nr,nzr->nz", low, self.low_mat[component]) * std + self.proj_else(x)
        return mean + std * normal * self.noise

    def guided(self, conditional: Tensor, unconditional: Tensor | None) -> Tensor:
        """Inputs (N, H) of the stack -> what is projected: guidance acts on the stack's output."""
        if unconditional is None:
            return self.stack(conditional)
        with_text, without = self.stack(torch.cat([conditional, unconditional])).chunk(2)
        return with_text + self.guidance * (with_text - without)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Nucleus rule on the last axis: an entry stays while the mass above it is below ``top_p``; others become -inf."""
    ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    mass_above = ordered.cumsum(dim=-1) - ordered
    return logits.masked_fill(torch.zeros_like(logits).scatter(-1, order, mass_above) >= top_p, -torch.inf)


def gumbel_max(logits: Tensor, uniform: Tensor) -> Tensor:
    """Index (...,) of the last axis, drawn with uniform numbers of the logits' shape."""
    return (logits.log_softmax(dim=-1) - torch.log(1e-8 - torch.log(uniform + 1e-8))).argmax(dim=-1)


def nearest(left: Tensor, entries: Tensor) -> Tensor:
    """Codes (N,) of the entries (K, Z) nearest to what is left, (N, Z)."""
    return torch.addmm(entries.square().sum(dim=-1), left, entries.T, alpha=-2.0).argmin(dim=-1)
