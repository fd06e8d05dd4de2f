"""Whole training steps as CUDA graphs.

A small network's step is thousands of small kernels, and launching them takes far longer than running them. Captured once, all
of them are launched as one. What a graph reads and writes has to stay where it is, so inputs are copied into tensors of the
graph's own, and numbers that change from step to step, like the learning rate, lie on the device. A step must not wait for the
device, nor decide anything by what is there.

What is captured is compared with the same step taken kernel by kernel before it is trusted; where it cannot be captured or
differs, training goes on without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

#: Computes named scalars of some inputs, the loss among them under "loss".
Step = Callable[..., dict[str, Tensor]]

#: Steps of one shape taken before it is captured, in which libraries and the optimiser set themselves up, and replays that are
#: compared with plain steps: two, so that a graph that went on reading the first inputs would be found out.
_WARM_UP, _COMPARED = 3, 2

#: How far a replay may be off: the loss and the gradient's norm, relative; what the step adds to the weights, relative to its
#: norm. Sums in another order change the least certain weights most, since Adam makes all steps equally long.
_LOSS_OFF, _NORM_OFF, _CHANGE_OFF = 1e-3, 2e-2, 0.2


class Descent(Protocol):
    """What a replayed step needs of a run.

    ``stream``: on which all of training stays, None without CUDA; ``memory``: the pool that all graphs share.
    """

    weights: list[Tensor]
    stream: torch.cuda.Stream | None
    memory: object

    def prepare(self) -> None:
        """Begin a step: bring what changes from step to step to the device."""

    def descend(self, loss: Tensor) -> Tensor:
        """Change the weights; the norm of the gradient."""

    def state(self) -> list[Tensor]:
        """All tensors that :meth:`descend` changes."""

    def log(self, **numbers: Tensor | float) -> None:
        """Take down what the step gave."""


class Replayed:
    """``step`` and the descent that follows it. Call it with the step's inputs: tensors on the device, of a few fixed shapes.

    ``changed``: tensors that the step itself changes; the default generator's random numbers go on by themselves.
    ``plain``: whether steps are taken kernel by kernel.
    """

    def __init__(self, run: Descent, step: Step, *, changed: Sequence[Tensor] = (), graph: bool = True) -> None:
        self._run, self._step, self._changed = run, step, list(changed)
        self.plain = not graph or run.stream is None
        self._graphs: dict[tuple[torch.Size, ...], Graph] = {}
        self._taken: dict[tuple[torch.Size, ...], int] = {}
        if self.plain:
            print("steps are taken kernel by kernel:", "as wanted" if not graph else "no CUDA device", flush=True)

    def __call__(self, *inputs: Tensor) -> None:
        """One step of training; what it gave is logged."""
        self._run.prepare()
        self._run.log(**self._numbers(inputs))

    def _numbers(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        if self.plain:
            return self._whole(*inputs)
        key = tuple(each.shape for each in inputs)
        taken = self._taken[key] = self._taken.get(key, 0) + 1
        if taken <= _WARM_UP:
            return self._aside(inputs)
        if taken <= _WARM_UP + _COMPARED:
            return self._compared(key, inputs)
        return self._graphs[key].replay(inputs)

    def _whole(self, *inputs: Tensor) -> dict[str, Tensor]:
        numbers = self._step(*inputs)
        norm = self._run.descend(numbers["loss"])
        return {name: value.detach() for name, value in numbers.items()} | {"gradient_norm": norm.detach()}

    def _aside(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Kernel by kernel, on the stream that is captured."""
        stream = self._run.stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            numbers = self._whole(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return numbers

    def _compared(self, key: tuple[torch.Size, ...], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """The same step twice: kernel by kernel, and replayed from the same beginning."""
        state = [*self._run.state(), *self._changed]
        before, chance = _copies(state), torch.cuda.get_rng_state()
        expected = self._aside(inputs)
        after = _copies(state)
        _restore(state, before)
        outer = torch.cuda.current_stream()
        try:
            if key not in self._graphs:
                self._graphs[key] = Graph(self._whole, inputs, self._run.stream, self._run.memory)
            torch.cuda.set_rng_state(chance)
            numbers = self._graphs[key].replay(inputs)
            fault = self._difference(expected, numbers, before, after)
        except RuntimeError as error:
            _leave_capture(outer)
            torch.cuda.set_rng_state(chance)
            fault = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        if not fault:
            return numbers
        print(f"steps are taken kernel by kernel from now on: {fault}", flush=True)
        self.plain = True
        self._graphs.clear()
        _restore(state, after)
        return expected

    def _difference(
        self, expected: dict[str, Tensor], found: dict[str, Tensor], before: list[Tensor], after: list[Tensor]
    ) -> str:
        """What is wrong with a replay, or nothing; prints the comparison."""
        off = {
            name: float((found[name] - expected[name]).abs() / expected[name].abs().clamp(min=1e-6))
            for name in ("loss", "gradient_norm")
        }
        count = len(self._run.weights)
        changes = torch.cat([(new - old).flatten() for new, old in zip(after[:count], before[:count], strict=True)])
        replayed = torch.cat(
            [(weight.detach() - old).flatten() for weight, old in zip(self._run.weights, before[:count], strict=True)]
        )
        off["change"] = float((replayed - changes).norm() / changes.norm().clamp(min=1e-12))
        told = ", ".join(f"{name} {value:.1e}" for name, value in off.items())
        limits = {"loss": _LOSS_OFF, "gradient_norm": _NORM_OFF, "change": _CHANGE_OFF}
        # Written so that a value that is no number is a fault.
        good = all(off[name] <= limit for name, limit in limits.items())
        print(f"a replayed step against a plain one, relative difference: {told}", flush=True)
        return "" if good else f"a replayed step is off by {told}"


class Graph:
    """One captured call of ``function`` on inputs of these shapes. Graphs that take turns may share their ``memory``."""

    def __init__(self, function: Step, inputs: Sequence[Tensor], stream: object, memory: object) -> None:
        self._inputs = [each.clone() for each in inputs]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads pin memory meanwhile, which only this mode allows.
        with torch.cuda.graph(self._graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            self._numbers = function(*self._inputs)

    def replay(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """What ``function`` gives for ``inputs``: tensors that the next replay writes anew."""
        torch._foreach_copy_(self._inputs, list(inputs), non_blocking=True)
        self._graph.replay()
        return self._numbers


def _leave_capture(outer: torch.cuda.Stream) -> None:
    """A capture that breaks off leaves its stream current, and the generator waiting for its end."""
    torch.cuda.set_stream(outer)
    generator, fresh = torch.cuda.default_generators[outer.device_index], torch.Generator(outer.device)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().clone() for each in tensors]


@torch.no_grad()
def _restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for each, value in zip(tensors, values, strict=True):
        each.copy_(value)
