"""Speaking the corpus, with a synthesiser that hums."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vcpipe.bench.mini import synthesis
from vcpipe.bench.mini.corpus import items, reply_to
from vcpipe.bench.mini.plans import plan_answers, plan_questions, plan_strangers, plan_words
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


def test_what_strangers_say_is_not_in_the_domain() -> None:
    plan = plan_strangers()
    assert len({line["text"] for line in plan}) == len(plan) == 1500
    assert {reply_to(line["text"]) for line in plan} == {None}
    assert {line["answer"] for line in plan} == {item.answer for item in items() if item.intent == "unknown"}


def test_strangers_are_learnt_with_the_reply_to_what_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from vcpipe.bench.mini.material import Amounts, load_material
    from vcpipe.bench.mini.tokens import TextTokens
    from vcpipe.launch.library import EMBEDDED_CHECKPOINT

    sorry = plan_strangers()[0]["answer"]
    monkeypatch.setattr(synthesis, "plan_answers", lambda: [line for line in plan_answers() if line["text"] == sorry])

    def answer(text: str, voice: str, speed: float) -> Speech:
        words = [(word, 0.5 + 0.25 * i, 0.75 + 0.25 * i) for i, word in enumerate(text.split())]
        return hum(text, voice, speed)._replace(words=words)

    synthesis.make_answers(tmp_path, answer, "0/1", None)
    synthesis.make_questions(tmp_path, "strangers", plan_strangers(), HUMMING, "0/1", 4)
    synthesis.make_questions(tmp_path, "programs_words", plan_words("programs"), HUMMING, "0/1", 1)
    synthesis.index(tmp_path)
    amounts = Amounts(unspoken=0, spoken=0, senseless=0, held=0, further=0)
    material = load_material(tmp_path, TextTokens(EMBEDDED_CHECKPOINT), amounts, 0)
    assert [line.text for line in material.lines] == [record["text"] for record in plan_strangers()[:4]]
    assert {material.replies[line.reply].text for line in material.lines} == {sorry}
    assert all(len(line.spoken) == 1 for line in material.lines)
