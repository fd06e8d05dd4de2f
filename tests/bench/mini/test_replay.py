"""Replayed training steps: on a CPU as plain steps, and the way to trust a graph with graphs that only pretend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from vcpipe.bench.mini import replay  # noqa: E402
from vcpipe.bench.mini.training import Run, wait_for  # noqa: E402

STEPS = 12


def run_in(folder: Path) -> Run:
    torch.manual_seed(0)
    return Run(folder, nn.Linear(4, 1), seconds=1e6, peak_rate=1e-2, warm_up=4, settings={})


def loss_of(run: Run) -> Callable[..., dict[str, Tensor]]:
    """Of a row of inputs and what they should give."""
    return lambda given, wanted: {"loss": (run.network(given) - wanted).square().mean(), "size": given.square().mean()}


def inputs(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    given = torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))
    return given, given.sum(1, keepdim=True)


def plainly_trained(folder: Path) -> list[Tensor]:
    run = run_in(folder)
    for i in range(STEPS):
        run.update(loss_of(run)(*inputs(i))["loss"])
    return run.state()


def test_on_a_cpu_steps_are_plain(tmp_path, capsys):
    run = run_in(tmp_path / "a")
    step = run.replayed(loss_of(run))
    assert "no CUDA device" in capsys.readouterr().out
    for i in range(STEPS):
        step(*inputs(i))
    assert run.steps == STEPS
    for ours, theirs in zip(run.state(), plainly_trained(tmp_path / "b"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_average_follows_the_weights(tmp_path):
    run = run_in(tmp_path)
    average = [weight.clone() for weight in run.weights]
    for i in range(STEPS):
        run.update(loss_of(run)(*inputs(i))["loss"])
        kept = min(0.999, (2 + i) / (11 + i))
        average = [kept * mean + (1 - kept) * weight for mean, weight in zip(average, run.weights, strict=True)]
    for ours, expected in zip(run.average.parameters(), average, strict=True):
        torch.testing.assert_close(ours, expected.detach())


def test_a_run_is_waited_for_until_it_has_finished(tmp_path):
    run = run_in(tmp_path)
    run.save()
    wait_for(tmp_path, 0.0)
    run.event(loss=1.0)
    with pytest.raises(TimeoutError, match="no finished run"):
        wait_for(tmp_path, 0.0)
    run.finish()
    wait_for(tmp_path, 0.0)


# ------------------------------------------------------------------------------------------------ graphs
class Pretended:
    """A graph that takes the step anew. ``stale``: it goes on reading its first inputs."""

    stale = False
    captured = 0

    def __init__(self, function: Any, inputs: Any, stream: Any, memory: Any) -> None:
        self._function, self._inputs = function, [each.clone() for each in inputs]
        type(self).captured += 1

    def replay(self, inputs: Any) -> dict[str, Tensor]:
        return dict(self._function(*(self._inputs if self.stale else inputs)))


@pytest.fixture
def pretended(monkeypatch):
    """CUDA as far as :class:`Replayed` asks for it."""
    graphs = type("Graphs", (Pretended,), {})

    class Stream:
        def wait_stream(self, other: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: Any) -> None: ...

    cuda: dict[str, Any] = {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: stream,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(replay.torch.cuda, name, stand_in)
    monkeypatch.setattr(replay, "Graph", graphs)
    monkeypatch.setattr(replay, "_leave_capture", lambda stream: None)
    return graphs


def on_gpu(run: Run, step: Any) -> Any:
    """As if the weights were on a GPU."""
    run.stream = replay.torch.cuda.Stream()
    return run.replayed(step)


def test_replays_train_as_plain_steps_do(tmp_path, pretended, capsys):
    run = run_in(tmp_path / "a")
    step = on_gpu(run, loss_of(run))
    for i in range(STEPS):
        step(*inputs(i))
    assert pretended.captured == 1 and capsys.readouterr().out.count("a replayed step against a plain one") == 2
    for ours, theirs in zip(run.state(), plainly_trained(tmp_path / "b"), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_every_shape_has_a_graph(tmp_path, pretended):
    run = run_in(tmp_path)
    step = on_gpu(run, loss_of(run))
    for i in range(2 * STEPS):
        step(*inputs(i, rows=8 if i % 2 else 6))
    assert pretended.captured == 2 and run.steps == 2 * STEPS and not step.plain


def test_random_numbers_are_the_same_in_a_replay(tmp_path, pretended, capsys):
    run = run_in(tmp_path)

    def step(given: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        return loss_of(run)(given + torch.randn_like(given), wanted)

    replayed = on_gpu(run, step)
    for i in range(STEPS):
        replayed(*inputs(i))
    assert "kernel by kernel" not in capsys.readouterr().out


def fails(*arguments: Any) -> None:
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


@pytest.mark.parametrize("fault", ["stale inputs", "no capture"])
def test_graphs_that_fail_are_not_used(tmp_path, pretended, monkeypatch, capsys, fault):
    if fault == "stale inputs":
        pretended.stale = True
    else:
        monkeypatch.setattr(pretended, "__init__", fails)
    run = run_in(tmp_path / "a")
    step = on_gpu(run, loss_of(run))
    for i in range(STEPS):
        step(*inputs(i))
    told = [line for line in capsys.readouterr().out.splitlines() if "kernel by kernel from now on" in line]
    assert step.plain and len(told) == 1 and ("off by" if fault == "stale inputs" else "not permitted") in told[0]
    for ours, theirs in zip(run.state(), plainly_trained(tmp_path / "b"), strict=True):
        torch.testing.assert_close(ours, theirs)
