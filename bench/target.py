"""What is measured: a checkpoint folder, or random weights in the shapes of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcpipe.actors.checkpoint import load_tokenizer, read_config, resolve_checkpoint
from vcpipe.actors.shards import list_tensors
from vcpipe.bench.shapes import write_checkpoint
from vcpipe.bench.worker import Worker
from vcpipe.launch.console import LoadingBar
from vcpipe.launch.library import EMBEDDED_CHECKPOINT
from vcpipe.pipeline.pipeline import Listener, Pipeline
from vcpipe.schemas.config import PipelineConfig, check_tts_history
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.geometry import STAGES

_RANDOM = "vcpipe.bench.random_stage"
_WORDS = "You are a friendly assistant who answers every question in one short sentence and then listens again."


@dataclass(frozen=True, slots=True)
class Target:
    """``folder`` has weights, unless ``random``. ``device``: "cpu", "gpu" or None for MLX's default.

    ``tts_history_frames``: see PipelineConfig.
    """

    name: str
    folder: Path
    random: bool
    device: str | None
    tts_history_frames: int | None = None

    def __post_init__(self) -> None:
        check_tts_history(self.tts_history_frames)

    def start(self, listener: Listener | None = None) -> Pipeline:
        """All four actors, ready."""
        config = PipelineConfig(self.folder, device=self.device, tts_history_frames=self.tts_history_frames)
        with LoadingBar().shown() as bar:
            return Pipeline(config, bar.update, listener, modules=dict.fromkeys(STAGES, _RANDOM) if self.random else {})

    def start_peer(self) -> Worker:
        """The public MLX implementation on the same weights, in a process of its own. It cannot bound its history."""
        if self.tts_history_frames is not None:
            raise ConfigError("--tts-history-frames does not go with --peer: mlx-vlm cannot bound its history")
        facts = {"checkpoint": str(self.folder), "random": self.random, "device": self.device}
        return Worker("vcpipe.bench.peer_worker", facts)

    def module(self, stage: str) -> str:
        """The module that loads a stage."""
        return _RANDOM if self.random else f"vcpipe.actors.{stage}.actor"

    def facts(self) -> dict[str, Any]:
        """What a reader of figures must know of the model; ``bits`` of the language model, 0 for not packed."""
        config = read_config(self.folder)
        bits = (config["quantization"] or {}).get("bits", 0)
        facts = {"model": self.name, "random_weights": self.random, "dtype": self._dtype(), "language_bits": bits}
        return facts if self.tts_history_frames is None else {**facts, "tts_history_frames": self.tts_history_frames}

    def _dtype(self) -> str:
        if self.random:
            return "bfloat16"
        sizes: dict[str, int] = {}
        for info in list_tensors(self.folder).values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
        return max((size, names[dtype]) for dtype, size in sizes.items() if dtype in names)[1]

    def prompt(self, tokens: int, variant: int = 0) -> tuple[str, int]:
        """A system prompt of at least so many tokens (few more), its marks around it counted; and how many it has."""
        tokenizer = load_tokenizer(self.folder)
        words = [f"{variant}.", *_WORDS.split()]
        text, count, used = "", 0, 0
        while count < tokens:
            text = f"{text} {words[used % len(words)]}".strip()
            used += 1
            count = len(tokenizer.encode(text, add_special_tokens=False).ids) + 2
        return text, count


@contextmanager
def open_target(
    model: str | None, shape: str | None, bits: int | None, device: str | None, tts_history_frames: int | None = None
) -> Iterator[Target]:
    """``model``: folder or Hub name; ``shape``: random weights instead, with ``bits``; neither: the embedded checkpoint."""
    if model is not None and shape is not None:
        raise ConfigError("give --model or --shape, not both")
    if shape is None:
        if bits is not None:
            raise ConfigError("--bits belongs to --shape; a checkpoint has the bits it was written with")
        folder = EMBEDDED_CHECKPOINT if model is None else resolve_checkpoint(model)
        name = "embedded" if model is None else folder.resolve().name
        yield Target(name, folder, False, device, tts_history_frames)
        return
    with tempfile.TemporaryDirectory(prefix="vcpipe-shape-") as made:
        write_checkpoint(Path(made), shape, bits or 0)
        yield Target(shape, Path(made), True, device, tts_history_frames)
