"""The checkpoint in the package: a small network of the real layout that hears, answers and speaks.

Ten questions, which training did not hear, are asked through the whole pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile

import vcpipe
from vcpipe.actors.checkpoint import geometry, is_random, read_config
from vcpipe.actors.shards import list_tensors
from vcpipe.launch.library import EMBEDDED_CHECKPOINT
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry

TESTS = Path(__file__).parents[1]
QUESTIONS = TESTS / "data" / "questions"
RATE, FRAME_S = 16000, 0.08

#: Root mean square of a frame: above the first it is heard, below the second it is silence.
HEARD, SILENT = 0.02, 0.003


@dataclass(frozen=True)
class Question:
    """``samples`` (n,) float32 at 16 kHz."""

    samples: np.ndarray
    transcript: str
    reply: str

    @property
    def frames(self) -> int:
        """Frames until its last sample was heard."""
        return -(-len(self.samples) // 1280)


def questions() -> Iterator[Question]:
    """Those of tests/data/questions and the one of the README."""
    for line in json.loads((QUESTIONS / "questions.json").read_text(encoding="utf-8")):
        samples, rate = soundfile.read(QUESTIONS / line["file"], dtype="float32")
        assert rate == RATE
        yield Question(samples, line["transcript"], line["reply"])
    samples, _ = soundfile.read(TESTS.parent / "docs" / "question.wav", dtype="float32")
    yield Question(samples, "what is the capital of france", "The capital of France is Paris.")


def ask(pipeline: Pipeline, samples: np.ndarray, then_s: float) -> list[Event]:
    """Events of a session over ``samples`` and so many seconds of silence."""
    with pipeline.open_session(seed=0) as session:
        return list(session.stream([samples, np.zeros(round(then_s * RATE), np.float32)]))


def last_text(events: list[Event], kind: str) -> str:
    return ([""] + [event.text or "" for event in events if event.kind == kind])[-1]


def loudness(events: list[Event]) -> np.ndarray:
    """Root mean square of every frame of speech."""
    spoken = [event.samples for event in events if event.kind == "audio" and event.samples is not None]
    return np.sqrt(np.mean(np.square(spoken), axis=1))


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with vcpipe.start_pipeline() as running:
        yield running


def test_it_has_the_real_layout_in_small_and_a_model_card() -> None:
    config = read_config(EMBEDDED_CHECKPOINT)
    assert not is_random(config)
    assert geometry(config) == FrameGeometry()
    assert "pacing" in config["vcpipe"]  # of its own voice
    tensors = list_tensors(EMBEDDED_CHECKPOINT)
    assert sum(int(np.prod(info.shape)) for info in tensors.values() if info.dtype == "BF16") <= 15_000_000
    assert sum(path.stat().st_size for path in EMBEDDED_CHECKPOINT.iterdir()) <= 32_000_000
    card = (EMBEDDED_CHECKPOINT / "README.md").read_text(encoding="utf-8")
    assert all(word in card for word in ("apache-2.0", "## Limits", "## Training data", "## Licences"))


@pytest.mark.process
@pytest.mark.parametrize("question", list(questions()), ids=lambda question: question.transcript)
def test_it_hears_a_question_and_speaks_the_answer(pipeline: Pipeline, question: Question) -> None:
    events = ask(pipeline, question.samples, 3.6)
    assert last_text(events, "user_transcript_delta") == question.transcript
    assert last_text(events, "assistant_text_delta").strip() == question.reply
    loud = loudness(events)
    begins = int(np.argmax(loud > HEARD))
    assert 0.2 <= (begins - question.frames) * FRAME_S <= 0.9  # to a frame: the sound begins somewhere within one
    assert not (loud[1:begins] > HEARD).any()  # quiet while it listens
    assert loud[-3:].max() < SILENT  # and once it has answered


@pytest.mark.process
def test_silence_gets_no_answer(pipeline: Pipeline) -> None:
    events = ask(pipeline, np.zeros(0, np.float32), 10.0)
    assert {event.kind for event in events} == {"audio", "done"}
    assert loudness(events)[1:].max() < SILENT


@pytest.mark.process
def test_a_session_takes_one_question_after_the_other(pipeline: Pipeline) -> None:
    first, second = list(questions())[-1], list(questions())[1]
    gap = np.zeros(3 * RATE, np.float32)
    events = ask(pipeline, np.concatenate([first.samples, gap, second.samples]), 3.6)
    assert last_text(events, "assistant_text_delta").split() == f"{first.reply} {second.reply}".split()
    assert last_text(events, "user_transcript_delta") == f"{first.transcript} {second.transcript}"
