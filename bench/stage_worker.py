"""One stage in a child process, stepped with synthetic messages: ``python -m vcpipe.bench.stage_worker FACTS``.

Audio is noise, encoder frames and codes are random numbers of the real sizes. Of the text ids three of four are PAD and
every fourth is another word, which is more speech than most conversations have.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from vcpipe.actors import runtime
from vcpipe.actors.checkpoint import geometry, read_config
from vcpipe.actors.stage import Stage, StageConfig, StageSession
from vcpipe.bench.signals import noise_frames
from vcpipe.bench.worker import Handler, Reply, serve
from vcpipe.schemas.envelope import Message
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.messages import Codes, OpenSession, PcmFrame, Projected, TextStep

_WORD_EVERY = 4
_FIRST_WORD = 300
_PROMPT_COLUMNS = 38


class SpanTimer:
    """An Emitter that keeps the time of a step's spans and drops the messages."""

    def __init__(self) -> None:
        self.spans: dict[str, float] = {}

    def send(self, message: Message, frame_index: int | None = None) -> None:
        pass

    def report(self, message: Message, frame_index: int | None = None) -> None:
        pass

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spans[name] = self.spans.get(name, 0.0) + (time.perf_counter() - start) * 1e3


class StageDriver:
    """Opens sessions of one stage and steps them. ``part``: the span that is measured, "rnnt" lies inside perception."""

    def __init__(self, stage: Stage, part: str, config: dict[str, Any]) -> None:
        self._stage = stage
        self._part = part
        self._config = config
        self._session: StageSession | None = None
        self._rng = np.random.default_rng(0)
        self._frame = 0

    def open(self, prompt: str = "", seed: int = 0) -> Reply:
        """A new session in place of the old one; milliseconds it took."""
        tts = self._config["tts_config"]
        shape = (_PROMPT_COLUMNS, tts["num_quantizers"])
        codes = np.random.default_rng(1).integers(0, tts["codebook_size"], shape, dtype=np.int32)
        self._session, self._frame = None, 0
        started = time.perf_counter()
        self._session, _ = self._stage.open(OpenSession(system_prompt=prompt, seed=seed, prompt_codes=codes))
        self._session.prefill()
        return {"open_ms": (time.perf_counter() - started) * 1e3}

    def push(self, frames: int) -> Reply:
        """Step so many frames: the part's and the whole step's milliseconds of each."""
        assert self._session is not None, "open() comes first"
        part_ms, step_ms = [], []
        for _ in range(frames):
            message, emit = self._message(), SpanTimer()
            started = time.perf_counter()
            self._session.step(message, emit)
            step_ms.append((time.perf_counter() - started) * 1e3)
            if self._part not in emit.spans:
                raise ConfigError(f"{self._stage.name} did no {self._part}: the checkpoint has no rnnt_vocabulary")
            part_ms.append(emit.spans[self._part])
            self._frame += 1
        return {"frame_ms": part_ms, "step_ms": step_ms}

    def memory(self) -> Reply:
        """Megabytes."""
        values = {"rss": runtime.rss_bytes(), "mlx": runtime.memory_bytes(), "mlx_peak": mx.get_peak_memory()}
        return {f"{name}_mb": round(value / 1e6, 1) for name, value in values.items()}

    def _message(self) -> Any:
        rng, config = self._rng, self._config
        if self._stage.name == "perception":
            return PcmFrame(noise_frames(1, geometry(config).frame_samples, seed=self._frame)[0])
        if self._stage.name == "language":
            return Projected(rng.standard_normal((1, 1, config["text_config"]["hidden_size"]), np.float32))
        if self._stage.name == "tts":
            words = config["text_config"]["vocab_size"] - _FIRST_WORD
            is_word = self._frame % _WORD_EVERY == _WORD_EVERY - 1
            return TextStep(_FIRST_WORD + self._frame % words if is_word else config["pad_token_id"])
        tts = config["tts_config"]
        return Codes(rng.integers(0, tts["codebook_size"], tts["num_quantizers"], dtype=np.int32))


def _start(facts: dict[str, Any]) -> tuple[Reply, dict[str, Handler]]:
    config = StageConfig(facts["stage"], Path(facts["checkpoint"]), facts["device"], facts["tts_history_frames"])
    runtime.set_up(config)
    started = time.monotonic()
    stage: Stage = importlib.import_module(facts["module"]).load(config, lambda step, fraction: None)
    loaded = time.monotonic()
    stage.warm_up()
    runtime.free_memory()
    mx.reset_peak_memory()
    driver = StageDriver(stage, facts["part"], read_config(config.checkpoint))
    ready = {
        "device": runtime.device_name(),
        "mlx": runtime.mlx_version(),
        "load_s": loaded - started,
        "warm_up_s": time.monotonic() - loaded,
    }
    return ready, {"open": driver.open, "push": driver.push, "memory": driver.memory}


if __name__ == "__main__":
    serve(_start)
