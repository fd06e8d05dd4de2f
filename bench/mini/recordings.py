"""Recorded speech of a person: the prompts of the Asterisk telephone system, as questions of the domain.

The Debian package asterisk-core-sounds-en-wav (8 kHz, one speaker) holds single words. Bare words are questions as they are;
sums and differences are put together from three of them. The corpus tells the right replies.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import soundfile as sf

from vcpipe.bench.mini import corpus
from vcpipe.bench.mini.clips import level, resample, trim
from vcpipe.bench.mini.domain import CODE_WORDS, DAYS, LETTERS, MONTHS
from vcpipe.bench.mini.questions import Question
from vcpipe.bench.mini.sound import USER_RATE
from vcpipe.bench.mini.wordings import number
from vcpipe.schemas.errors import ConfigError

PACKAGE = "asterisk-core-sounds-en-wav"
_FOLDER = Path("/usr/share/asterisk/sounds/en_US_f_Allison")

#: Pause between spliced words and silence around a recording, in seconds.
_PAUSE_S, _AROUND_S = 0.08, 0.08


def _files() -> dict[str, str]:
    """Word, as the speaker says it -> file. Its day 0 is Sunday, its month 0 January."""
    files = {number(n): f"digits/{n}" for n in [*range(21), *range(30, 100, 10)]}
    files |= {day: f"digits/day-{(i + 1) % 7}" for i, day in enumerate(DAYS)}
    files |= {month: f"digits/mon-{i}" for i, month in enumerate(MONTHS)}
    files |= {f"letter {letter}": f"letters/{letter.lower()}" for letter in LETTERS}
    # "november" alone is the month, whoever says it.
    files |= {word: f"phonetic/{word[0]}_p" for word in CODE_WORDS}
    return files | {"hello": "hello", "goodbye": "vm-goodbye", "hello world": "hello-world"}


def recorded_questions(sums: int = 60, limit: int | None = None) -> list[Question]:
    """Bare words, and ``sums`` sums and differences. ConfigError where the package is not installed."""
    if not _FOLDER.is_dir():
        raise ConfigError(f"needs the Debian package {PACKAGE}")
    files = _files()
    bare = [_question(words.removeprefix("letter "), [file]) for words, file in files.items()]
    rng = random.Random(0)
    spliced: list[Question] = []
    while len(spliced) < sums:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        sign = "plus" if len(spliced) % 2 else "minus"
        if sign == "plus" or a >= b:
            parts = [files[number(a)], "letters/plus" if sign == "plus" else "digits/minus", files[number(b)]]
            spliced.append(_question(f"{number(a)} {sign} {number(b)}", parts))
    chosen = bare + spliced
    if limit is not None:
        chosen = rng.sample(chosen, min(limit, len(chosen)))
    return chosen


def _question(words: str, files: list[str]) -> Question:
    answer = corpus.reply_to(words)
    assert answer is not None, words
    pause = np.zeros(int(_PAUSE_S * USER_RATE), np.float32)
    pieces = [piece for file in files for piece in (_read(file), pause)][:-1]
    around = np.zeros(int(_AROUND_S * USER_RATE), np.float32)
    sound = level(np.concatenate([around, *pieces, around]))
    return Question(
        words, corpus.transcript(words), answer, sound, "recorded word" if len(files) == 1 else "recorded sum"
    )


def _read(file: str) -> np.ndarray:
    samples, rate = sf.read(_FOLDER / f"{file}.wav", dtype="float32")
    return trim(resample(samples, rate, USER_RATE), USER_RATE, None, before=0.02, after=0.02)[0]
