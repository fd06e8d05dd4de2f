"""One way to train all parts: a run in a folder, with a budget of seconds, that can be taken up again.

A run leaves ``weights.safetensors`` (the moving average of the weights, float32, with the checkpoint's names), ``log.jsonl`` (a
line of running means every few seconds, and one for each evaluation) and ``settings.json``.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vcpipe.bench.mini.replay import Replayed, Step

_LOG_SECONDS = 5.0
_SAVE_SECONDS = 60.0


def device() -> torch.device:
    """The GPU where there is one, with products in TF32."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_weights(network: nn.Module, folder: Path) -> None:
    """Load the weights that a run left in ``folder``; names and shapes have to agree."""
    network.load_state_dict(load_file(str(folder / "weights.safetensors")))


def wait_for(folder: Path, seconds: float = 600.0) -> None:
    """Return when the run in ``folder`` has finished, which may be at work in another process. TimeoutError after ``seconds``.

    A folder that holds weights and no log counts as finished.
    """
    weights, log = folder / "weights.safetensors", folder / "log.jsonl"
    until = time.monotonic() + seconds
    while not weights.exists() or (log.exists() and '"finished"' not in log.read_text()):
        if time.monotonic() > until:
            raise TimeoutError(f"{folder}: no finished run after {seconds:.0f} s")
        time.sleep(0.5)


class Run:
    """Optimises ``network`` until ``seconds`` are over; ``average`` is the moving average of its weights.

    The learning rate rises over ``warm_up`` steps to ``peak_rate`` and falls along a half cosine over the time, so that a run
    ends well however fast the machine is. Gradients are clipped to the norm ``clip``; AdamW decays matrices only.
    """

    def __init__(
        self,
        folder: Path,
        network: nn.Module,
        *,
        seconds: float,
        peak_rate: float,
        settings: dict[str, Any],
        warm_up: int = 300,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.98),
        clip: float = 1.0,
        average: float = 0.999,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.network = network
        self.average = copy.deepcopy(network).eval().requires_grad_(False)
        self.steps = 0
        self._seconds, self._peak_rate, self._warm_up = seconds, peak_rate, warm_up
        self._clip, self._decay_of_average = clip, average
        self.weights = [p for p in network.parameters() if p.requires_grad]
        trained = {id(p) for p in self.weights}
        pairs = zip(network.parameters(), self.average.parameters(), strict=True)
        self._averages = [mean for p, mean in pairs if id(p) in trained]
        matrices = [p for p in self.weights if p.ndim > 1]
        vectors = [p for p in self.weights if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        place = self.weights[0].device
        on_gpu = place.type == "cuda"
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=on_gpu, capturable=on_gpu)
        # For replayed steps: gradients are accumulated on the stream that saw a weight first, so all steps stay on one, and
        # what changes from step to step lies on the device.
        self.stream = torch.cuda.Stream() if on_gpu else None
        self.memory = torch.cuda.graph_pool_handle() if on_gpu else None
        self._forgotten = torch.zeros((), device=place)
        if on_gpu:
            for group in self._optimizer.param_groups:
                group["lr"] = torch.zeros((), device=place)
        self._began: float | None = None
        self._saved = self._logged = 0.0
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}
        (folder / "settings.json").write_text(json.dumps(settings, indent=1, default=str) + "\n")

    # -------------------------------------------------------------------------------------------- time
    def elapsed(self) -> float:
        """Seconds since the first call of :meth:`going`."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def fraction(self) -> float:
        """Share of the time that is used up, 0 to 1."""
        return min(1.0, self.elapsed() / self._seconds)

    def going(self) -> bool:
        """Whether time is left. Saves now and then."""
        if self._began is None:
            self._began = time.monotonic()
        if self.elapsed() - self._saved > _SAVE_SECONDS:
            self._saved = self.elapsed()
            self.save()
        return self.elapsed() < self._seconds

    # -------------------------------------------------------------------------------------------- steps
    def rate(self) -> float:
        """Learning rate of the next step."""
        rising = min(1.0, (self.steps + 1) / self._warm_up)
        return self._peak_rate * rising * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.fraction())))

    def update(self, loss: Tensor) -> None:
        """One step down the gradient of ``loss``."""
        self.prepare()
        self.log(loss=loss.detach(), gradient_norm=self.descend(loss))

    def replayed(self, step: Step, *, changed: Sequence[Tensor] = (), graph: bool = True) -> Replayed:
        """Steps that compute named scalars of their inputs, go down the gradient of "loss" and log, as CUDA graphs if possible.

        See :class:`~vcpipe.bench.mini.replay.Replayed` for what ``step`` may do; without ``graph`` nothing is captured.
        """
        return Replayed(self, step, changed=changed, graph=graph)

    def prepare(self) -> None:
        """Begin a step: set its learning rate and how much of the average it replaces."""
        rate = self.rate()
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.steps += 1
        # Early on the average would mostly hold the random start: let it forget faster.
        self._forgotten.fill_(1 - min(self._decay_of_average, (1 + self.steps) / (10 + self.steps)))

    def descend(self, loss: Tensor) -> Tensor:
        """The rest of a step, which may be captured: change weights and average; the norm of the gradient."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.weights, self._clip, foreach=True)
        self._optimizer.step()
        with torch.no_grad():
            apart = torch._foreach_sub(self.weights, self._averages)
            torch._foreach_mul_(apart, self._forgotten)
            torch._foreach_add_(self._averages, apart)
            for mean, now in zip(self.average.buffers(), self.network.buffers(), strict=True):
                mean.copy_(now)
        return norm.detach()

    def state(self) -> list[Tensor]:
        """What :meth:`descend` changes, the weights first."""
        kept = [value for state in self._optimizer.state.values() for value in state.values()]
        return [*self.weights, *self._averages, *kept]

    # -------------------------------------------------------------------------------------------- records
    def log(self, **numbers: Tensor | float) -> None:
        """Add to running means; they are printed and written every few seconds (only then is the GPU waited for)."""
        for name, value in numbers.items():
            self._sums[name] = self._sums.get(name, 0.0) + (value.detach() if isinstance(value, Tensor) else value)
            self._counts[name] = self._counts.get(name, 0) + 1
        if self.elapsed() - self._logged > _LOG_SECONDS:
            self._logged = self.elapsed()
            means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
            self._sums, self._counts = {}, {}
            self.event(**means)

    def event(self, **numbers: Tensor | float) -> None:
        """Print and write a line at once."""
        rounded = {name: round(float(value), 5) for name, value in numbers.items()}
        line = {"seconds": round(self.elapsed(), 1), "step": self.steps, "rate": round(self.rate(), 7)} | rounded
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(f"{self.folder.name}:", json.dumps(line), flush=True)

    def save(self) -> None:
        """Write the moving average of the weights."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.average.state_dict().items()}
        unfinished = self.folder / "weights.unfinished"
        save_file(tensors, str(unfinished))
        unfinished.replace(self.folder / "weights.safetensors")

    def finish(self) -> None:
        """Save, and note how far the run came."""
        self.save()
        self.event(finished=1.0)
