"""A voice of plain arithmetic for a server's speech routes: real turns and pacing, made-up frames."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from serving import FakePipeline

from vcpipe.actors.checkpoint import load_tokenizer
from vcpipe.actors.speech.frames import TextFrames
from vcpipe.actors.speech.pacing import Pacing
from vcpipe.actors.speech.turns import SpeechTurns
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.speech import SpeechChunk, SpeechOptions

CHECKPOINT = Path(__file__).parent / "data" / "tiny" / "bf16"
PAD, EOS = 12, 2
SAMPLES = 1764


class FakeEngine:
    """A frame's samples tell its text id, those of PAD and EOS are silent; each takes ``frame_s`` of its pipeline."""

    ahead = 8

    def __init__(self, pipeline: SpeakingPipeline) -> None:
        self._pipeline = pipeline
        self._changed = threading.Condition()
        self._ids: deque[int] = deque()
        self._frame = 0
        self._stopped = True
        self.closed = False

    def start(self, seed: int) -> None:
        if self._pipeline.refuse is not None:
            raise VcpipeError(self._pipeline.refuse)
        if self._pipeline.failure is not None:
            raise self._pipeline.failure
        with self._changed:
            self._ids.clear()
            self._frame, self._stopped = 0, False
        self._seed = seed

    def queue(self, ids: Sequence[int]) -> None:
        with self._changed:
            self._ids.extend(ids)

    def take(self) -> list[SpeechChunk]:
        return []

    def wait(self) -> SpeechChunk | None:
        deadline = time.monotonic() + self._pipeline.frame_s
        with self._changed:
            assert self._ids or self._stopped
            while not self._stopped and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._stopped:
                return None
            token = self._ids.popleft()
        if self._frame == self._pipeline.fail_at:
            raise self._pipeline.fault
        index, self._frame = self._frame, self._frame + 1
        self._pipeline.frames_made += 1
        level = 0.0 if token in (PAD, EOS) else (token + self._seed) / 1000
        return SpeechChunk(index, np.full(SAMPLES, level, np.float32), np.full((1, 31), token, np.int32))

    def finish(self) -> None:
        pass

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        self.closed = True


class SpeakingPipeline(FakePipeline):
    """Opens voices too. ``fail_at``: the frame at which ``fault`` is raised."""

    def reset(self) -> None:
        super().reset()
        self.fail_at: int | None = None
        self.fault: Exception = VcpipeError("codec: this frame cannot be")
        self.frames_made = 0
        self.voices: list[FakeEngine] = []

    def open_speech(self, options: SpeechOptions) -> SpeechTurns:
        engine = FakeEngine(self)
        self.voices.append(engine)
        text = TextFrames(load_tokenizer(CHECKPOINT), Pacing(), PAD, EOS, options)
        return SpeechTurns(engine, text, options)

    def said(self, text: str, seed: int = 0) -> np.ndarray:
        """The samples that a text becomes where nothing interrupts it."""
        twin = SpeakingPipeline()
        with twin.open_speech(SpeechOptions(seed=seed)) as turns:
            turns.reset_turn()
            chunks = list(turns.speak([text]))
        return np.concatenate([chunk.samples for chunk in chunks])

    @property
    def all_closed(self) -> bool:
        return all(voice.closed for voice in self.voices)
