"""What a checkpoint is asked in its evaluation: dev clips, lines nobody spoke, several questions in one session."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf

from vcpipe.bench.mini import corpus
from vcpipe.bench.mini.clips import speech_span
from vcpipe.bench.mini.corpus import Item
from vcpipe.bench.mini.plans import clip_id
from vcpipe.bench.mini.progress import told
from vcpipe.bench.mini.sound import USER_RATE, Splicer, load_users
from vcpipe.bench.mini.synthesis import question as as_question
from vcpipe.bench.mini.voices import DEV_VOICES, PROGRAM_VOICES, TRAIN_VOICES, Speaker, flite
from vcpipe.schemas.errors import ConfigError

#: Replies of more seconds are worth an interruption.
_LONG_REPLY_S = 1.6

#: So far below its loudest 10 ms a question has ended, in dB: two of Kokoro's voices hum for half a second after the last
#: word, 26 dB and more below.
_END_DB = -25


@dataclass(frozen=True)
class Question:
    """``samples`` (n,) float32 at 16 kHz say ``transcript``; ``kind`` says who made them, ``voice`` in which voice.

    ``intent``: of a recorded clip, as the corpus names it.
    """

    text: str
    transcript: str
    answer: str
    samples: np.ndarray
    kind: str
    voice: str = ""
    intent: str = ""

    @property
    def end_s(self) -> float:
        """Where the speech in it ends."""
        return speech_span(self.samples, USER_RATE, _END_DB)[1]


def dev_questions(folder: Path, limit: int | None = None, kinds: tuple[str, ...] | None = None) -> list[Question]:
    """Clips of the dev split, in a mixed order; ``kind`` is the engine."""
    lines = map(json.loads, (folder / "users.jsonl").read_text(encoding="utf-8").splitlines())
    chosen = [line for line in lines if line["split"] == "dev" and (kinds is None or line["engine"] in kinds)]
    random.Random(0).shuffle(chosen)
    return [_recorded(folder, line) for line in chosen[:limit]]


def _recorded(folder: Path, line: dict[str, Any]) -> Question:
    samples, _ = sf.read(folder / "users" / f"{line['id']}.ogg", dtype="float32")
    said = line["text"], line["transcript"], line["answer"]
    return Question(*said, samples, line["engine"], line["voice"], line["intent"])


def held_out_questions(
    folder: Path, styles: Path | None, count: int, cache: Path | None = None
) -> tuple[list[Question], str]:
    """``count`` lines of held-out compositions, and who speaks them: Kokoro where its styles are given, else flite, else
    splices of the corpus' clips. ``cache``: folder in which what is spoken is kept for the next time."""
    rng = random.Random(0)
    items = [item for item in corpus.items() if item.split == "test"]
    rng.shuffle(items)
    if styles is not None:
        from vcpipe.bench.mini.kokoro import Kokoro

        voices = [*DEV_VOICES, *rng.sample(TRAIN_VOICES, 6)]
        return _spoken(items[:count], Kokoro(styles).say, voices, "kokoro", cache), f"Kokoro ({', '.join(voices)})"
    try:
        voices = PROGRAM_VOICES["flite"]
        return _spoken(items[:count], flite, voices, "flite", cache), f"flite ({', '.join(voices)})"
    except FileNotFoundError:
        return _spliced(items, folder, count), "spliced words of the corpus' clips"


def _spoken(items: list[Item], speaker: Speaker, voices: list[str], kind: str, cache: Path | None) -> list[Question]:
    found = []
    for i, item in enumerate(told(items, "held-out lines spoken")):
        voice = voices[i % len(voices)]
        kept = None if cache is None else cache / f"{clip_id('t', kind, voice, item.question)}.flac"
        if kept is not None and kept.is_file():
            samples, _ = sf.read(kept, dtype="float32")
        else:
            samples = as_question(speaker(item.question, voice, 1.0))
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                sf.write(kept, samples, USER_RATE)
        found.append(_question(item, samples, kind))
    return found


def _spliced(items: list[Item], folder: Path, count: int) -> list[Question]:
    splicer = Splicer(load_users(folder), np.random.default_rng(0))
    found: list[Question] = []
    for item in items:
        if len(found) < count and (line := splicer.line(item.question)) is not None:
            found.append(_question(item, line[0], "spliced"))
    return found


def _question(item: Item, samples: np.ndarray, kind: str) -> Question:
    return Question(item.question, corpus.transcript(item.question), item.answer, samples, kind)


# ------------------------------------------------------------------------------------------------ several in one session
@dataclass(frozen=True)
class Conversation:
    """Questions in one session, ``samples`` (n,); in samples: ``starts`` of their clips, ``ends`` of the speech in them."""

    questions: list[Question]
    samples: np.ndarray
    starts: list[int]
    ends: list[int]


def follow_ups(folder: Path, count: int, turns: int = 3) -> list[Conversation]:
    """Questions that wait until the reply before them has been said, and a second more."""
    lengths = reply_seconds(folder)
    asked = dev_questions(folder, count * turns, ("kokoro",))
    return [
        _conversation(group, [0.7 + lengths[question.answer] + 1.0 for question in group])
        for group in (asked[i : i + turns] for i in range(0, len(asked), turns))
    ]


def barge_ins(folder: Path, count: int) -> list[Conversation]:
    """Two questions, the second beginning while the reply to the first is being said, 0.6 s after its start."""
    lengths = reply_seconds(folder)
    asked = dev_questions(folder, None, ("kokoro",))
    long = [question for question in asked if lengths[question.answer] > _LONG_REPLY_S][:count]
    others = [question for question in asked if lengths[question.answer] <= _LONG_REPLY_S]
    return [_conversation([first, second], [0.56 + 0.6, 0.0]) for first, second in zip(long, others, strict=False)]


def reply_seconds(folder: Path) -> dict[str, float]:
    """Reply -> how long the corpus' recording of it is."""
    lines = map(json.loads, (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["text"]: float(line["seconds"]) for line in lines if line["kind"] == "answer"}


def _conversation(questions: list[Question], pauses_s: list[float]) -> Conversation:
    """``pauses_s``: silence after each question; the last one's is left to the session."""
    pieces, starts, ends, position = [], [], [], 0
    for question, pause_s in zip(questions, pauses_s, strict=True):
        starts.append(position)
        ends.append(position + int(question.end_s * USER_RATE))
        pieces += [question.samples, np.zeros(int(pause_s * USER_RATE), np.float32)]
        position += len(pieces[-2]) + len(pieces[-1])
    return Conversation(questions, np.concatenate(pieces[:-1]), starts, ends)


def quiet_minutes(seconds: int = 60) -> dict[str, np.ndarray]:
    """A minute each that asks nothing: silence, and noise of -40 dB, white and pink."""
    rng, count = np.random.default_rng(0), seconds * USER_RATE
    white = rng.standard_normal(count)
    bins = np.fft.rfft(white)
    pink = np.fft.irfft(bins / np.sqrt(np.maximum(np.arange(len(bins)), 1)), count)
    noises = {"white noise": white, "pink noise": pink}
    loud = {name: (noise / noise.std() * 0.01).astype(np.float32) for name, noise in noises.items()}
    return {"silence": np.zeros(count, np.float32), **loud}


def needs_corpus(folder: Path) -> None:
    """ConfigError unless ``folder`` is a corpus."""
    for name in ("users.jsonl", "answers.jsonl"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}; expected the folder of a corpus that synthesis made")
