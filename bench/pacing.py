"""Fit the pacing of speech to recordings with word times: ``python -m vcpipe.bench.pacing --corpus answers.jsonl``.

A line of the corpus is a recording: ``{"words": [["Hello,", 0.02, 0.43], ["you.", 0.48, 0.80]], ...}``, words as written with
start and end in seconds. Prints what belongs into the checkpoint's config.json under ``vcpipe``, and how far the rule is off.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from vcpipe.actors.speech.pacing import Pacing, WordLength, count_sounds
from vcpipe.schemas.errors import ConfigError

#: End of the sound of so many in a hundred last words that EOS is to wait for.
_END_PERCENTILE = 95

Word = tuple[str, float, float]


@dataclass
class Lengths:
    """Observations: a word's letters and vowel groups, and how many frames it takes."""

    sounds: list[tuple[int, int]]
    frames: list[float]

    def add(self, word: str, frames: float) -> None:
        self.sounds.append(count_sounds(word))
        self.frames.append(frames)


def fit(recordings: list[list[Word]], frame_s: float) -> tuple[Pacing, dict[str, dict[str, float]]]:
    """Least squares over all words -> the rule, and the error in frames by kind of word.

    A word is running, or ends a clause, a sentence or the recording (``final``: there the length of its sound is known).
    """
    observed = {kind: Lengths([], []) for kind in ("running", "clause", "sentence", "final")}
    for words in recordings:
        for (word, start, end), following in zip(words, [*words[1:], None], strict=True):
            until = end if following is None else following[1]
            observed["final" if following is None else _kind(word)].add(word, (until - start) / frame_s)
    running, _ = _solve([observed["running"]])
    final, pauses = _solve([observed[kind] for kind in ("final", "clause", "sentence")])
    pacing = Pacing(running, final, max(0.0, pauses[0]), max(0.0, pauses[1]))
    late = _errors(observed["final"], final, 0.0)
    margin = round(float(max(0.0, np.percentile(late, _END_PERCENTILE))), 2) if len(late) else pacing.end_margin
    pacing = Pacing(running, final, pacing.clause_pause, pacing.sentence_pause, end_margin=margin)
    rules = {
        "running": (running, 0.0),
        "clause": (final, pauses[0]),
        "sentence": (final, pauses[1]),
        "final": (final, 0.0),
    }
    return pacing, {kind: _summary(_errors(observed[kind], *rule)) for kind, rule in rules.items()}


def _kind(word: str) -> str:
    """By the sign at the word's end, as :meth:`Pacing.frames` tells them apart."""
    marks = Pacing(WordLength(0, 0, 0), WordLength(0, 0, 0), clause_pause=1.0, sentence_pause=2.0)
    return {0.0: "running", 1.0: "clause", 2.0: "sentence"}[marks.frames(word)]


def _solve(kinds: list[Lengths]) -> tuple[WordLength, list[float]]:
    """One rule for several kinds of words -> its constants, and what all but the first kind take on top."""
    rows, frames = [], []
    for number, lengths in enumerate(kinds):
        extra = [float(number == other) for other in range(1, len(kinds))]
        rows += [[1.0, *sounds, *extra] for sounds in lengths.sounds]
        frames += lengths.frames
    if not rows:
        raise ConfigError(
            "the corpus has too few words: some inside phrases and some at the end of recordings are needed"
        )
    solution = [round(float(value), 2) for value in np.linalg.lstsq(np.array(rows), np.array(frames), rcond=None)[0]]
    return WordLength(*solution[:3]), solution[3:]


def _errors(lengths: Lengths, rule: WordLength, pause: float) -> np.ndarray:
    """Frames that words take beyond the rule."""
    predicted = [rule.base + rule.letter * letters + rule.vowel_group * groups for letters, groups in lengths.sounds]
    return np.array(lengths.frames) - np.array(predicted) - pause


def _summary(errors: np.ndarray) -> dict[str, float]:
    if not len(errors):
        return {"words": 0}
    p5, p50, p95 = (round(float(value), 2) for value in np.percentile(errors, [5, 50, 95]))
    return {
        "words": len(errors),
        "mean_absolute": round(float(np.abs(errors).mean()), 2),
        "p5": p5,
        "p50": p50,
        "p95": p95,
    }


def as_config(pacing: Pacing) -> dict[str, Any]:
    """What belongs into config.json under ``vcpipe.pacing``."""
    lengths = {name: getattr(pacing, name) for name in ("running", "final")}
    numbers = {name: getattr(pacing, name) for name in ("clause_pause", "sentence_pause", "speech_delay", "end_margin")}
    return {name: [rule.base, rule.letter, rule.vowel_group] for name, rule in lengths.items()} | numbers


def read_corpus(path: Path) -> list[list[Word]]:
    """Words of every recording that has some. Raises ConfigError naming the line that is none."""
    recordings = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            words = [(str(word), float(start), float(end)) for word, start, end in json.loads(line).get("words") or []]
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'{path}, line {number}: expected {{"words": [[word, start, end], ...]}}: {error}'
            ) from None
        if words:
            recordings.append(words)
    return recordings


def main(
    corpus: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSON lines with the words' times.")],
    frame_s: Annotated[float, typer.Option(help="Length of a frame in seconds.")] = 0.08,
) -> None:
    """Fit the pacing of speech to recordings with word times."""
    try:
        pacing, errors = fit(read_corpus(corpus), frame_s)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    print(json.dumps({"vcpipe": {"pacing": as_config(pacing)}}))
    for kind, summary in errors.items():
        print(json.dumps({"kind": kind, "frames_off": summary}))


if __name__ == "__main__":
    typer.run(main)
