"""The evaluation counts what it says it counts, here on an assistant that follows a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from vcpipe.bench.mini import recordings
from vcpipe.bench.mini.assistant import Assistant, Heard
from vcpipe.bench.mini.evaluate import (
    GOALS,
    Examination,
    Results,
    started_in_time,
    transcript_errors,
)
from vcpipe.bench.mini.judge import scored_words
from vcpipe.bench.mini.questions import Conversation, Question, needs_corpus, quiet_minutes
from vcpipe.bench.mini.scoring import word_errors
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry

FRAME = 1280
LOUD = np.sin(np.arange(1764, dtype=np.float32) * 0.2) * 0.2
SILENT = np.zeros(1764, np.float32)


class ScriptedPipeline:
    """``script``: frame -> word said in it; ``sounding``: frames in which it is heard."""

    geometry = FrameGeometry()

    def __init__(self, script: dict[int, str], sounding: range) -> None:
        self._script, self._sounding = script, sounding

    @contextmanager
    def open_session(self, seed: int) -> Iterator[ScriptedPipeline]:
        self._frame = 0
        yield self

    def push_audio(self, samples: np.ndarray) -> list[Event]:
        assert len(samples) % FRAME == 0
        events = []
        for _ in range(len(samples) // FRAME):
            if self._frame in self._script:
                events.append(Event("assistant_text_delta", self._frame, 40, self._script[self._frame], "unused"))
            sound = LOUD if self._frame in self._sounding else SILENT
            events.append(Event("audio", self._frame, samples=sound))
            self._frame += 1
        events.append(Event("user_transcript_delta", self._frame, delta="", text="what is it"))
        return events


def assistant(script: dict[int, str], sounding: range) -> Assistant:
    return Assistant(cast(Any, ScriptedPipeline(script, sounding)))


def speech(frames: int) -> np.ndarray:
    return np.full(frames * FRAME, 0.1, np.float32)


def question(answer: str, frames: int = 10) -> Question:
    return Question("What is it?", "what is it", answer, speech(frames), "kokoro")


REPLY = {14: " It", 15: " is", 17: " four", 18: "."}


# ------------------------------------------------------------------------------------------------ listening
def test_it_listens_until_the_reply_is_over_and_no_longer() -> None:
    heard = assistant(REPLY, range(16, 30)).hear(speech(10))
    assert heard.text() == "It is four."
    assert heard.transcript == "what is it"
    assert 38 <= heard.frames < 38 + 8
    assert heard.audible(16, 17) and not heard.audible(0, 16) and not heard.audible(30)


def test_it_waits_for_a_reply_that_does_not_come() -> None:
    heard = assistant({}, range(0)).hear(speech(10))
    assert heard.text() == "" and 40 <= heard.frames <= 48


def test_it_does_not_listen_for_ever() -> None:
    assert assistant(dict.fromkeys(range(1000), " so"), range(1000)).hear(speech(3)).frames < 3 + 110


def test_text_is_told_apart_by_frames() -> None:
    heard = Heard(22050, list(REPLY.items()))
    assert (heard.text(15), heard.text(0, 15), heard.text(19)) == ("is four.", "It", "")


# ------------------------------------------------------------------------------------------------ counting
@pytest.mark.parametrize(("frame", "in_time"), [(10, False), (13, True), (16, True), (21, False), (99, False)])
def test_a_reply_is_expected_between_02_and_08_seconds(frame: int, in_time: bool) -> None:
    heard = assistant(REPLY, range(frame, frame + 20)).hear(speech(10))
    assert started_in_time(question("It is four."), heard) is in_time


def test_right_means_exactly_right() -> None:
    results = Results()
    examination = Examination(assistant(REPLY, range(16, 30)), results)
    examination.ask([question("It is four."), question("It is four"), question("It is for.")], "dev questions")
    assert [line["right"] for line in results.log] == [True, False, False]
    assert results.details["dev questions"] == {"kokoro": {"asked": 3, "right_percent": 33.3}}


def test_words_of_the_transcript_are_counted_over_all_questions() -> None:
    heard = Heard(22050, transcript="what it is")
    assert transcript_errors([(question("x"), heard), (question("x"), Heard(22050, transcript="what is it"))]) == (
        pytest.approx(100 * 2 / 6)
    )


def test_follow_up_questions_are_scored_one_by_one() -> None:
    talk = Conversation(
        [question("It is four."), question("Hello.")], speech(40), [0, 30 * FRAME], [10 * FRAME, 40 * FRAME]
    )
    script = REPLY | {44: " Hello", 45: " there"}
    assert list(Examination(assistant(script, range(16, 26)), Results()).follow_ups([talk])) == [True, False]


@pytest.mark.parametrize(
    ("sounding", "after", "right"),
    [
        (range(16, 23), {}, True),  # falls silent
        (range(16, 34), {}, False),  # goes on speaking
        (range(16, 23), {31: " and"}, False),  # goes on writing
    ],
)
def test_an_interruption_must_be_heeded(sounding: range, after: dict[int, str], right: bool) -> None:
    talk = Conversation([question("x"), question("Hello.")], speech(34), [0, 20 * FRAME], [10 * FRAME, 34 * FRAME])
    examination = Examination(assistant({14: " It", **after, 38: " Hello", 39: "."}, sounding), Results())
    assert list(examination.barge_ins([talk])) == [right]


def test_a_minute_without_a_question_must_stay_quiet() -> None:
    minutes = {name: samples[: 20 * FRAME] for name, samples in quiet_minutes(2).items()}
    assert list(minutes) == ["silence", "white noise", "pink noise"]
    assert np.std(minutes["pink noise"]) == pytest.approx(0.01, rel=0.3)
    assert list(Examination(assistant({}, range(0)), Results()).quiet(minutes)) == [True, True, True]
    assert list(Examination(assistant({}, range(5, 7)), Results()).quiet(minutes)) == [False, False, False]


# ------------------------------------------------------------------------------------------------ results
def test_what_cannot_be_measured_says_what_it_needs() -> None:
    results = Results()

    def needs() -> list[float]:
        raise ConfigError("needs distillmos")

    results.measure("speech_quality", by=needs)
    results.measure("dev_right", by=lambda: [91.0])
    results.measure("speech_errors", by=lambda: [12.5])
    lines = {line["name"]: line for line in results.to_json()["measures"]}
    assert list(lines) == list(GOALS)
    assert (lines["speech_quality"]["value"], lines["speech_quality"]["shown"]) == (
        None,
        "not measured: needs distillmos",
    )
    assert (lines["dev_right"]["met"], lines["dev_right"]["shown"]) == (True, "91.0 %")
    assert (lines["speech_errors"]["met"], lines["speech_errors"]["goal"]) == (False, "at most 12 %")


def test_words_are_scored_as_they_sound() -> None:
    assert scored_words("It's 42, the 3rd grey x-ray.") == ["its", "forty", "two", "the", "third", "gray", "x", "ray"]
    assert scored_words("112 and 365") == scored_words("one hundred twelve and three hundred sixty five")
    assert scored_words("Too late for 2") == scored_words("two late four to")


@pytest.mark.parametrize(
    ("wanted", "heard", "errors"),
    [("a b c", "a b c", 0), ("a b c", "a c", 1), ("a b", "b a", 2), ("", "a", 1), ("a", "", 1)],
)
def test_word_errors_are_the_edit_distance(wanted: str, heard: str, errors: int) -> None:
    assert word_errors(wanted.split(), heard.split()) == errors


def test_missing_recordings_and_corpus_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_FOLDER", tmp_path / "sounds")
    with pytest.raises(ConfigError, match="needs the Debian package asterisk-core-sounds-en-wav"):
        recordings.recorded_questions()
    with pytest.raises(ConfigError, match=r"has no users\.jsonl"):
        needs_corpus(tmp_path)


def test_recorded_words_are_asked_with_the_replies_of_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def fake(file: str) -> np.ndarray:
        read.append(file)
        return LOUD

    monkeypatch.setattr(recordings, "_FOLDER", Path(__file__).parent)
    monkeypatch.setattr(recordings, "_read", fake)
    asked = {entry.text: entry for entry in recordings.recorded_questions(sums=2)}
    assert asked["Sunday"].answer == "After Sunday comes Monday."
    assert asked["Q"].answer == "After Q comes R."
    assert asked["november"].answer == "After November comes December."
    assert {"digits/day-0", "digits/mon-11", "letters/q", "phonetic/n_p", "digits/minus", "letters/plus"} <= set(read)
    assert sum(entry.kind == "recorded sum" for entry in asked.values()) == 2
