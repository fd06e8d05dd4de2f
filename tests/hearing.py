"""Live transcription in the process of the model: the tiny checkpoint, and what tests let it hear."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from vcpipe.actors.perception.actor import PerceptionStage, load
from vcpipe.actors.perception.rnnt import GreedyDecoder
from vcpipe.actors.perception.transcription import TranscriptionSession
from vcpipe.actors.stage import StageConfig
from vcpipe.schemas.streaming import TranscriptDelta

DATA = Path(__file__).parent / "data"
RATE = 16000
FRAME = 1280


def load_tiny(name: str = "bf16") -> PerceptionStage:
    return load(StageConfig("perception", DATA / "tiny" / name), lambda step, fraction: None)


def golden_input() -> np.ndarray:
    samples, _ = soundfile.read(DATA / "golden" / "input.wav", dtype="float32")
    return samples


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32)


def cut(samples: np.ndarray, size: int) -> list[np.ndarray]:
    return [samples[start : start + size] for start in range(0, samples.size, size)]


def drain(session: TranscriptionSession, budget: int = 4) -> list[TranscriptDelta]:
    """Step to the end. A session that never ends fails here."""
    deltas: list[TranscriptDelta] = []
    for _ in range(20_000):
        if session.done:
            return deltas
        deltas += session.advance(budget)
    pytest.fail("the session did not end")


def transcribe(
    session: TranscriptionSession, chunks: Iterable[np.ndarray], budget: int = 4
) -> tuple[list[TranscriptDelta], int]:
    """All deltas, stepping once a chunk, and the number of encoder frames."""
    deltas: list[TranscriptDelta] = []
    for chunk in chunks:
        session.feed(chunk)
        deltas += session.advance(budget)
    session.close()
    return deltas + drain(session, budget), session.frames


def whole(stage: PerceptionStage, samples: np.ndarray) -> tuple[list[tuple[int, str]], int]:
    """Encoder over the whole waveform, then the greedy search: what every frame's pieces spell, and the number of frames."""
    _, encoded = stage.perceive_whole(samples)
    decoder, found = GreedyDecoder(stage.transducer), []
    for index, frame in enumerate(encoded[0]):
        for token in decoder.step(stage.transducer.score(frame[None], decoder.from_prediction)):
            if text := stage.pieces.text(token):
                found.append((index, text))
    return found, encoded.shape[1]


def texts(deltas: list[TranscriptDelta]) -> str:
    return "".join(delta.text for delta in deltas)
