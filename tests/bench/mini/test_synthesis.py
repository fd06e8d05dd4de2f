"""Speaking the corpus, with a synthesiser that hums."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vcpipe.bench.mini import synthesis
from vcpipe.bench.mini.plans import plan_questions, plan_words
from vcpipe.bench.mini.questions import Question
from vcpipe.bench.mini.sound import Splicer, load_users
from vcpipe.bench.mini.voices import PROGRAM_VOICES, Speech


def hum(text: str, voice: str, speed: float) -> Speech:
    """0.25 s a word, and silence around it that a clip should not keep."""
    tone = 0.3 * np.sin(np.arange(4000 * len(text.split())) / 9).astype(np.float32)
    return Speech(np.pad(tone, 8000), 16000, None)


HUMMING = dict.fromkeys(PROGRAM_VOICES, hum)


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """A corpus of three questions of the plan's first part, three of its second and eight single words."""
    for part in (0, 1):
        plan = plan_questions("programs", part)
        name = "programs_1" if part else "programs"
        synthesis.make_questions(tmp_path, name, plan, HUMMING, "0/1", 3)
    synthesis.make_questions(tmp_path, "programs_words", plan_words("programs")[::31], HUMMING, "0/1", 8)
    synthesis.index(tmp_path)
    return tmp_path


def test_the_index_holds_all_parts_and_the_words(spoken: Path) -> None:
    lines = [json.loads(line) for line in (spoken / "users.jsonl").read_text().splitlines()]
    wanted = [record["id"] for part in (0, 1) for record in plan_questions("programs", part)[:3]]
    assert [line["id"] for line in lines[:6]] == wanted
    assert [line["text"] for line in lines[6:]] == [word["text"] for word in plan_words("programs")[::31][:8]]
    assert {line["intent"] for line in lines[6:]} == {"word"}


def test_what_is_made_is_not_made_again(spoken: Path) -> None:
    before = (spoken / "users.jsonl").read_text()
    synthesis.make_questions(spoken, "programs_words", plan_words("programs")[::31], {}, "0/1", 8)
    synthesis.index(spoken)
    assert (spoken / "users.jsonl").read_text() == before


def test_a_clip_of_one_word_knows_when_it_is_said(spoken: Path) -> None:
    clips = load_users(spoken).clips
    (word, start, end) = clips[-1].words[0]
    assert (word, start) == (clips[-1].text, 0.06)
    assert end - start == pytest.approx(0.25, abs=0.02)
    assert all(not clip.words for clip in clips if len(clip.text.split()) > 1), "a program does not tell them"


@pytest.mark.parametrize("halting", [0, 1])
def test_halting_lines_pause_between_their_words(spoken: Path, monkeypatch: pytest.MonkeyPatch, halting: int) -> None:
    monkeypatch.setattr(Splicer, "_HALTING", halting)
    bank = load_users(spoken)
    words = [clip.text for clip in bank.clips[-3:]]
    for seed in range(5):
        found = Splicer(bank, np.random.default_rng(seed)).line(" ".join(words))
        assert found is not None
        _, places = found
        assert [word for word, _, _ in places] == words
        pauses = [after[1] - before[2] for before, after in zip(places, places[1:], strict=False)]
        # 30 ms around every word are not the word.
        low, high = (0.05, 0.3) if halting else (0.0, 0.06)
        assert all(low + 0.059 <= pause <= high + 0.061 for pause in pauses)


def test_a_question_ends_with_its_last_word() -> None:
    speech = hum("what is this", "", 1.0).samples[8000:-8000]
    breath = np.full(8000, 0.3 * 10 ** (-30 / 20), np.float32) * np.sin(np.arange(8000) / 3).astype(np.float32)
    question = Question("", "", "", np.concatenate([speech, breath]), "kokoro")
    assert question.end_s == pytest.approx(0.75, abs=0.011)
