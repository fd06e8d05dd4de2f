"""The RNN-T loss (Graves 2012): minus the log of the probability that all ways through the lattice together give the pieces.

A way goes from frame 0 without pieces to the last frame with all of them: a blank leads to the next frame, a piece to the next
piece within the frame; a blank ends it. With t frames behind it and u pieces given, a way's share is

    alpha[t, u] = log(exp(alpha[t - 1, u] + blank[t - 1, u]) + exp(alpha[t, u - 1] + label[t, u - 1])).

For one u that is a cumulative log-sum over t, so the whole lattice takes U + 1 vectorised steps. The way back is the same
lattice mirrored, done in the same steps as further rows of the batch, and both together give the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rnnt_loss(
    logits: Tensor, pieces: Tensor, frames: Tensor, symbols: Tensor, *, blank: int, delay_penalty: float = 0.0
) -> Tensor:
    """(B,) losses.

    logits: (B, T, U + 1, classes); pieces: (B, U) ids; frames, symbols: (B,) lengths, at least 1 and at least 0. What lies
    beyond them counts nothing. ``delay_penalty``: nats by which a piece is less likely for every frame it comes later
    (Kang et al. 2022).
    """
    blanks, labels = log_probabilities(logits, pieces, blank)
    if delay_penalty:
        middle = (frames[:, None] - 1) / 2
        early = middle - torch.arange(logits.shape[1], device=logits.device)
        labels = labels + delay_penalty * early[:, :, None]
    return lattice_loss(blanks, labels, frames, symbols)


def log_probabilities(logits: Tensor, pieces: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the blank, (B, T, U + 1), and of each next piece, (B, T, U), float32 or better."""
    total = torch.logsumexp(logits if logits.dtype == torch.float64 else logits.float(), -1)
    index = pieces[:, None, :, None].expand(-1, logits.shape[1], -1, -1)
    labels = logits[:, :, :-1].gather(-1, index)[..., 0]
    return logits[..., blank] - total, labels - total[:, :, :-1]


def lattice_loss(blanks: Tensor, labels: Tensor, frames: Tensor, symbols: Tensor) -> Tensor:
    """(B,) losses of log-probabilities (B, T, U + 1) and (B, T, U); lengths (B,)."""
    return _Lattice.apply(blanks, labels, frames, symbols)


class _Lattice(torch.autograd.Function):
    """In float64, as it subtracts long sums; next to the joint network it is small."""

    @staticmethod
    def forward(ctx: Any, blanks: Tensor, labels: Tensor, frames: Tensor, symbols: Tensor) -> Tensor:
        blank, label = blanks.double().transpose(1, 2), labels.double().transpose(1, 2)  # (B, U + 1, T), (B, U, T)
        there, back = _ways(
            torch.cat([blank, _mirrored(blank, symbols + 1, frames - 1)]),
            torch.cat([label, _mirrored(label, symbols, frames)]),
        ).chunk(2)
        rows = torch.arange(len(frames), device=frames.device)
        last_blank = blank[rows, symbols, frames - 1]
        whole = (there[rows, symbols, frames - 1] + last_blank)[:, None, None]
        # back[., u, t]: from piece u of frame t to the end, but for the last blank.
        back = _mirrored(back, symbols + 1, frames) + last_blank[:, None, None]
        time, piece = (torch.arange(size, device=frames.device) for size in (blank.shape[2], blank.shape[1]))
        within = (time < frames[:, None])[:, None] & (piece <= symbols[:, None])[:, :, None]
        # Every step's share of all ways is the gradient of minus the loss.
        by_blank = torch.zeros_like(blank)
        by_blank[:, :, :-1] = _shares((there + blank)[:, :, :-1] + back[:, :, 1:] - whole, within[:, :, 1:])
        by_blank[rows, symbols, frames - 1] = 1
        by_label = _shares(there[:, :-1] + label + back[:, 1:] - whole, within[:, 1:])
        ctx.save_for_backward(by_blank.transpose(1, 2).to(blanks.dtype), by_label.transpose(1, 2).to(labels.dtype))
        return -whole[:, 0, 0].to(blanks.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        by_blank, by_label = ctx.saved_tensors
        return -gradient[:, None, None] * by_blank, -gradient[:, None, None] * by_label, None, None


def _ways(blank: Tensor, label: Tensor) -> Tensor:
    """Alpha, (B, U + 1, T), of log-probabilities (B, U + 1, T) and (B, U, T)."""
    waited = blank.cumsum(2) - blank  # by blanks alone from frame 0 to frame t
    steps = waited[:, :-1] + label - waited[:, 1:]
    columns = [torch.zeros_like(blank[:, 0])]  # alpha less what was waited
    for u in range(label.shape[1]):
        columns.append(torch.logcumsumexp(columns[-1] + steps[:, u], 1))
    return torch.stack(columns, 1) + waited


def _shares(logs: Tensor, counted: Tensor) -> Tensor:
    return logs.masked_fill(~counted, -torch.inf).exp()


def _mirrored(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(B, U, T): entry (u, t) is the one at (rows - 1 - u, columns - 1 - t); any number where there is none.

    For the blanks that lead on, ``columns`` is a frame less: the last one leads nowhere.
    """
    u = torch.arange(x.shape[1], device=x.device)
    t = torch.arange(x.shape[2], device=x.device)
    row = (rows[:, None] - 1 - u).clamp(min=0)[:, :, None].expand(x.shape)
    column = (columns[:, None] - 1 - t).clamp(min=0)[:, None].expand(x.shape)
    return x.gather(1, row).gather(2, column) if x.numel() else x
