"""Which questions the smoke test asks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import soundfile as sf

from vcpipe.bench.mini.questions import Question
from vcpipe.bench.mini.smoke import choose, write


def asked(text: str, answer: str, kind: str, intent: str = "arithmetic_plus") -> Question:
    return Question(text, text, answer, np.full(100, 0.5, np.float32), kind, "someone", intent)


def test_as_many_as_wanted_of_each_kind_are_chosen_and_no_reply_twice() -> None:
    lines = [
        asked("One plus zero.", "It is one.", "flite"),
        asked("Two minus one.", "It is one.", "kokoro"),
        asked("One plus one.", "It is two.", "flite"),
        asked("One plus two.", "It is three.", "flite"),
        asked("Double two.", "It is four.", "kokoro"),
        asked("Say music.", "Music.", "kokoro", "say"),
    ]
    chosen = choose(lines, lambda question: question.text != "Double two.", {"flite": 2, "kokoro": 1})
    assert [question.text for question in chosen] == ["One plus zero.", "One plus one.", "Say music."]


def test_calculations_leave_room_for_others() -> None:
    lines = [asked(f"One plus {word}.", f"It is {word}.", "flite") for word in ("two", "three", "four", "five")]
    lines.append(asked("Say music.", "Music.", "flite", "say"))
    chosen = choose(lines, lambda question: True, {"flite": 10})
    assert [question.text for question in chosen] == [line.text for line in (*lines[:3], lines[4])]


def test_what_was_chosen_before_is_replaced(tmp_path: Path) -> None:
    write([asked("what is one", "It is one.", "flite")], tmp_path)
    write([asked("what is two", "It is two.", "flite")], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"questions.json", "what_is_two.flac"}
    (line,) = json.loads((tmp_path / "questions.json").read_text())
    assert (line["voice"], line["reply"]) == ("flite someone", "It is two.")
    samples, rate = sf.read(tmp_path / line["file"])
    assert rate == 16000 and len(samples) == 100
