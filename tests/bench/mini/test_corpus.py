"""The domain, its splits and the plans of what is spoken are the same everywhere; clips are cut where their words say."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from vcpipe.bench.mini import corpus
from vcpipe.bench.mini.clips import level, speech_span, trim
from vcpipe.bench.mini.kokoro import _word_times
from vcpipe.bench.mini.plans import plan_answers, plan_questions
from vcpipe.bench.mini.sentences import general_sentences
from vcpipe.bench.mini.wordings import further_sums, number

RATE = 16000


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def test_lines_and_splits_stay_what_they_are() -> None:
    """Clips were made of them: a changed line or split would make results incomparable."""
    items = corpus.items()
    assert Counter(item.split for item in items) == {"train": 9962, "test": 1861, "dev": 671}
    rows = [[item.question, item.answer, item.intent, item.split, item.composition] for item in items]
    assert digest(rows) == "8a9acf91110b85b3"
    assert digest(general_sentences(300)) == "763b616960e5f0d0"


@pytest.mark.parametrize(
    ("words", "reply"),
    [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("seven minus three", "It is four."),
        ("TUESDAY", "After Tuesday comes Wednesday."),
        ("november", "After November comes December."),
        ("bravo", "Bravo stands for B."),
        ("a", "After A comes B."),
        ("how many legs does a snake have", "A snake has no legs."),
        ("tell me a joke", "Sorry, I do not know that."),
        ("what is the capital of nowhere", None),
    ],
)
def test_the_reply_is_a_function_of_the_words(words: str, reply: str | None) -> None:
    assert corpus.reply_to(words) == reply


def test_held_out_compositions_are_nowhere_else() -> None:
    held = {item.composition for item in corpus.items() if item.split == "test"}
    assert held.isdisjoint(item.composition for item in corpus.items() if item.split != "test")
    lines = {split: {item.question for item in corpus.items() if item.split == split} for split in ("dev", "test")}
    for group in ("kokoro", "programs"):
        assert lines["test"].isdisjoint(line["text"] for line in plan_questions(group))
        # Further parts are there to learn from: neither do they tell the dev split.
        further = {line["text"] for line in plan_questions(group, part=1)}
        assert lines["test"].isdisjoint(further)
        assert lines["dev"].isdisjoint(further)


def test_every_reply_can_be_learnt() -> None:
    spoken = {line["text"] for line in plan_answers() if line["kind"] == "answer"}
    assert spoken == set(corpus.answers())
    assert {item.answer for item in corpus.items() if item.split == "dev"} <= {
        item.answer for item in corpus.items() if item.split == "train"
    }


def test_plans_name_the_same_clips() -> None:
    ids = [
        line["id"] for plan in (plan_answers(), plan_questions("kokoro"), plan_questions("programs")) for line in plan
    ]
    assert len(ids) == len(set(ids)) == 6733
    assert digest(ids) == "34df5bc161952b94"


def test_numbers_are_spelled_without_hyphens() -> None:
    assert [number(n) for n in (0, 13, 40, 99, 100, 142)] == [
        *("zero", "thirteen", "forty", "ninety nine", "one hundred"),
        "one hundred forty two",
    ]


def tone(seconds: float) -> np.ndarray:
    return np.sin(np.arange(int(seconds * RATE), dtype=np.float32) * 0.3)


def test_trimming_keeps_words_at_their_sound() -> None:
    silence = np.zeros(RATE // 2, np.float32)
    sound = np.concatenate([silence, tone(0.3), silence[: RATE // 10], tone(0.4), silence])
    assert speech_span(sound, RATE) == pytest.approx((0.5, 1.3), abs=0.011)
    # As the synthesiser tells them: 40 ms late.
    words = [("one", 0.53, 0.85), ("two", 0.94, 1.2)]
    cut, moved = trim(sound, RATE, words, before=0.06, after=0.08)
    assert len(cut) / RATE == pytest.approx(0.94, abs=0.011)
    assert moved is not None
    (_, first, _), (_, second, end) = moved
    assert (first, second, end) == pytest.approx((0.06, 0.46, 0.86), abs=0.011)
    assert cut[0] == cut[-1] == 0


def test_levels_are_alike_unless_a_peak_forbids_it() -> None:
    quiet = level(tone(1.0) * 0.001)
    assert np.sqrt(np.mean(quiet**2)) == pytest.approx(10 ** (-23 / 20), rel=1e-3)
    peaky = np.zeros(RATE, np.float32)
    peaky[100] = 0.5
    assert np.abs(level(peaky)).max() == pytest.approx(0.89, rel=1e-3)


def test_durations_of_phonemes_become_times_of_words() -> None:
    ends = np.array([0.1, 0.2, 0.3, 0.35, 0.5, 0.55, 0.7])  # mark, h, i, space, y, ".", mark
    assert _word_times(["hi", "y."], list("hi y."), ends) == [("hi", 0.1, 0.3), ("y.", 0.35, 0.5)]
    assert _word_times(["hi"], list("hi y."), ends) is None


def test_further_calculations_are_none_of_the_domains() -> None:
    further, known = list(further_sums()), corpus.items()
    assert len(further) > 10_000
    assert not {line.question for line in further} & {item.question for item in known}
    assert not {line.composition for line in further} & {item.composition for item in known}
    said = {item.answer for item in known}
    assert {line.answer for line in further} <= said
