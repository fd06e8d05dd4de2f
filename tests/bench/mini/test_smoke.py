"""Which questions the smoke test asks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import soundfile as sf

from vcpipe.bench.mini.questions import Question
from vcpipe.bench.mini.smoke import choose, write


def asked(text: str, answer: str, kind: str) -> Question:
    return Question(text, text, answer, np.full(100, 0.5, np.float32), kind, "someone")


def test_as_many_as_wanted_of_each_kind_are_chosen_and_no_reply_twice() -> None:
    lines = [
        asked("one", "It is one.", "flite"),
        asked("uno", "It is one.", "kokoro"),
        asked("two", "It is two.", "flite"),
        asked("three", "It is three.", "flite"),
        asked("four", "It is four.", "kokoro"),
        asked("five", "It is five.", "kokoro"),
    ]
    chosen = choose(lines, lambda question: question.text != "four", {"flite": 2, "kokoro": 1})
    assert [question.text for question in chosen] == ["one", "two", "five"]


def test_what_was_chosen_before_is_replaced(tmp_path: Path) -> None:
    write([asked("what is one", "It is one.", "flite")], tmp_path)
    write([asked("what is two", "It is two.", "flite")], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"questions.json", "what_is_two.flac"}
    (line,) = json.loads((tmp_path / "questions.json").read_text())
    assert (line["voice"], line["reply"]) == ("flite someone", "It is two.")
    samples, rate = sf.read(tmp_path / line["file"])
    assert rate == 16000 and len(samples) == 100
