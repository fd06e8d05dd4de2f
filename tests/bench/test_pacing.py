"""Fitting the pacing: constants that made the words come out again, and what cannot be fitted."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from vcpipe.actors.speech.pacing import Pacing, WordLength, count_sounds
from vcpipe.bench.pacing import fit, read_corpus
from vcpipe.schemas.errors import ConfigError

RULE = Pacing(WordLength(0.5, 0.25, 1.5), WordLength(2.0, 0.5, 1.0), 3.0, 1.25)
WORDS = ["a", "the", "capital", "of", "France", "seven", "opposite", "strengths", "idea", "queue", "go", "Monday"]


def recordings(wobble: float = 0.0) -> list[list[tuple[str, float, float]]]:
    """Spoken by RULE, in frames of 80 ms, the first word 20 ms after the beginning."""
    rng = random.Random(5)
    spoken = []
    for _ in range(200):
        words = [rng.choice(WORDS) + rng.choice(["", "", "", ",", "."]) for _ in range(rng.randrange(1, 9))]
        start, line = 0.25, []
        for word in words:
            line.append((word, start * 0.08, (start + RULE.final(word) + rng.uniform(0, wobble)) * 0.08))
            start += RULE.frames(word)
        spoken.append(line)
    return spoken


def test_the_rule_is_found_again() -> None:
    pacing, errors = fit(recordings(), 0.08)
    assert pacing == Pacing(RULE.running, RULE.final, RULE.clause_pause, RULE.sentence_pause, end_margin=0.0)
    assert {kind: summary["mean_absolute"] for kind, summary in errors.items()} == dict.fromkeys(errors, 0.0)
    assert sum(summary["words"] for summary in errors.values()) == sum(map(len, recordings()))


def test_the_margin_covers_late_ends() -> None:
    pacing, errors = fit(recordings(wobble=2.0), 0.08)
    assert pacing.end_margin == pytest.approx(errors["final"]["p95"], abs=0.01)
    assert 0.5 < pacing.end_margin < 1.5
    assert errors["running"]["mean_absolute"] == 0.0


def test_the_command(tmp_path: Path) -> None:
    corpus = tmp_path / "words.jsonl"
    corpus.write_text("".join(json.dumps({"id": "x", "words": words}) + "\n" for words in recordings()))
    command = [sys.executable, "-m", "vcpipe.bench.pacing", "--corpus", str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    config, *errors = map(json.loads, done.stdout.splitlines())
    assert Pacing.from_config(config).final == RULE.final
    assert [line["kind"] for line in errors] == ["running", "clause", "sentence", "final"]


def test_a_corpus_that_cannot_be(tmp_path: Path) -> None:
    corpus = tmp_path / "words.jsonl"
    corpus.write_text('{"words": [["a", 0.1, 0.2]]}\n{"words": [["a", 0.1]]}\n')
    with pytest.raises(ConfigError, match=r"line 2: expected \{\"words\""):
        read_corpus(corpus)
    with pytest.raises(ConfigError, match="too few words"):
        fit([[("Hello.", 0.1, 0.4)]], 0.08)


def test_sounds_of_the_words_differ() -> None:
    assert len({count_sounds(word) for word in WORDS}) > 6
