"""The RNN-T loss against all ways written out, and its gradient against differences."""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from vcpipe.bench.mini.train.rnnt_loss import lattice_loss, log_probabilities, rnnt_loss  # noqa: E402


def brute_force(logits: torch.Tensor, pieces: list[int], frames: int, blank: int) -> float:
    """Every way: in which frame each piece comes, in order."""
    log_p = logits.double().log_softmax(-1)
    ways = []
    for places in itertools.combinations_with_replacement(range(frames), len(pieces)):
        total, given = 0.0, 0
        for t in range(frames):
            while given < len(pieces) and places[given] == t:
                total += float(log_p[t, given, pieces[given]])
                given += 1
            total += float(log_p[t, given, blank])
        ways.append(total)
    return -float(torch.tensor(ways, dtype=torch.float64).logsumexp(0))


def test_equals_the_sum_over_all_ways() -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(6, 3, 4, 5)
    pieces = torch.randint(0, 4, (6, 3))
    frames, symbols = torch.tensor([3, 3, 2, 1, 3, 1]), torch.tensor([3, 2, 3, 3, 0, 0])
    found = rnnt_loss(logits, pieces, frames, symbols, blank=4)
    for b in range(6):
        t, u = int(frames[b]), int(symbols[b])
        wanted = brute_force(logits[b, :t, : u + 1], pieces[b, :u].tolist(), t, 4)
        assert float(found[b]) == pytest.approx(wanted, rel=1e-5)


def test_a_batch_without_pieces_is_all_blanks() -> None:
    logits = torch.randn(2, 4, 1, 5)
    found = rnnt_loss(logits, torch.zeros(2, 0, dtype=torch.long), torch.tensor([4, 2]), torch.tensor([0, 0]), blank=4)
    blanks = logits.log_softmax(-1)[..., 0, 4]
    assert torch.allclose(found, -torch.stack([blanks[0].sum(), blanks[1, :2].sum()]), atol=1e-5)


def test_gradient() -> None:
    torch.manual_seed(1)
    blanks = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([4, 2, 1]), torch.tensor([2, 3, 0])
    assert torch.autograd.gradcheck(lambda *x: lattice_loss(*x, *lengths), (blanks, labels))
    logits = torch.randn(2, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    pieces = torch.tensor([[1, 2], [0, 0]])
    lengths = torch.tensor([3, 2]), torch.tensor([2, 1])
    assert torch.autograd.gradcheck(lambda x: rnnt_loss(x, pieces, *lengths, blank=3, delay_penalty=0.1), (logits,))


def test_padding_counts_nothing() -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, 5, 4, 6)
    pieces = torch.tensor([[3, 1, 2]])
    lengths = torch.tensor([3]), torch.tensor([1])
    wild = logits.clone()
    wild[:, 3:] = 1e4 * torch.randn(1, 2, 4, 6)
    wild[:, :, 2:] = 1e4 * torch.randn(1, 5, 2, 6)
    wild.requires_grad_(True)
    found = rnnt_loss(wild, pieces, *lengths, blank=5)
    assert torch.equal(found, rnnt_loss(logits, pieces, *lengths, blank=5))
    (gradient,) = torch.autograd.grad(found.sum(), wild)
    assert bool(gradient[:, 3:].eq(0).all()) and bool(gradient[:, :, 2:].eq(0).all())
    assert bool(gradient.isfinite().all()) and float(gradient.abs().max()) > 0.1


def test_long_and_improbable_stretches_keep_their_precision() -> None:
    torch.manual_seed(3)
    blanks, labels = (
        -30 * torch.rand(2, 100, 21, dtype=torch.float64),
        -30 * torch.rand(2, 100, 20, dtype=torch.float64),
    )
    alpha = torch.full((100, 21), -math.inf, dtype=torch.float64)
    for t, u in itertools.product(range(100), range(21)):
        before = [alpha[t - 1, u] + blanks[0, t - 1, u]] if t else []
        before += [alpha[t, u - 1] + labels[0, t, u - 1]] if u else []
        alpha[t, u] = torch.stack(before).logsumexp(0) if before else 0.0
    wanted = -(alpha[-1, -1] + blanks[0, -1, -1])
    found = lattice_loss(blanks.float(), labels.float(), torch.tensor([100, 100]), torch.tensor([20, 20]))
    assert float(found[0]) == pytest.approx(float(wanted), rel=1e-5)


def test_a_delay_penalty_prefers_early_pieces() -> None:
    logits = torch.zeros(1, 6, 2, 3)
    pieces, lengths = torch.tensor([[0]]), (torch.tensor([6]), torch.tensor([1]))

    def mean_frame(penalty: float) -> float:
        blanks, labels = log_probabilities(logits, pieces, 2)
        labels = labels - penalty * torch.arange(6)[:, None]
        labels.requires_grad_(True)
        (share,) = torch.autograd.grad(-lattice_loss(blanks, labels, *lengths).sum(), labels)
        return float((share[0, :, 0] * torch.arange(6)).sum())

    assert mean_frame(0.0) == pytest.approx(2.5, abs=1e-4)
    assert mean_frame(0.5) < 1.5
    # The offset by which the loss counts delay from the middle changes no gradient, and cancels for one piece evenly spread.
    plain, penalised = (rnnt_loss(logits, pieces, *lengths, blank=2, delay_penalty=p) for p in (0.0, 1e-3))
    assert float(penalised) == pytest.approx(float(plain), abs=1e-4)
