"""The corpus in memory: every clip's samples in one array, and lines spoken anew by splicing words of several clips."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile as sf

if TYPE_CHECKING:
    import torch

USER_RATE, ANSWER_RATE = 16000, 22050

#: Silence before and after the speech in a question's clip, in s.
AROUND_S = 0.06, 0.08

#: A word as it was spoken: (word as written, start in s, end in s), in the clip's time.
Word = tuple[str, float, float]


@dataclass(frozen=True)
class Clip:
    """A recording. ``sound[offset : offset + samples]`` of its bank; fields that do not apply are empty."""

    id: str
    text: str
    transcript: str
    words: tuple[Word, ...]
    voice: str
    engine: str
    split: str
    intent: str
    answer_id: str
    seconds: float
    offset: int
    samples: int


@dataclass(frozen=True)
class Bank:
    """``sound``: int16 samples of all clips, one after the other, at ``rate`` Hz."""

    sound: np.ndarray
    rate: int
    clips: list[Clip] = field(repr=False)

    def cut(self, clip: Clip) -> np.ndarray:
        """(samples,) float32, -1 to 1."""
        return self.sound[clip.offset : clip.offset + clip.samples].astype(np.float32) / 32768

    def on(self, device: torch.device) -> torch.Tensor:
        """All samples, int16, on ``device``."""
        import torch

        return torch.from_numpy(self.sound).to(device)


def load_users(corpus: Path) -> Bank:
    """The questions, 16 kHz, training and dev split."""
    records = _records(corpus / "users.jsonl")
    return _bank(records, [corpus / "users" / f"{record['id']}.ogg" for record in records], USER_RATE)


def load_answers(corpus: Path) -> Bank:
    """The replies (intent "answer") and other sentences of the same voice (intent "general"), 22.05 kHz."""
    records = [record | {"intent": record["kind"]} for record in _records(corpus / "answers.jsonl")]
    return _bank(records, [corpus / "answers" / f"{record['id']}.flac" for record in records], ANSWER_RATE)


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _bank(records: list[dict[str, Any]], files: list[Path], rate: int) -> Bank:
    with ProcessPoolExecutor() as pool:
        sounds = list(pool.map(_read, files, [rate] * len(files), chunksize=64))
    clips, offset = [], 0
    for record, sound in zip(records, sounds, strict=True):
        clips.append(_clip(record, offset, len(sound)))
        offset += len(sound)
    return Bank(np.concatenate(sounds), rate, clips)


def _read(path: Path, rate: int) -> np.ndarray:
    sound, found = sf.read(path, dtype="int16")
    if found != rate or sound.ndim != 1:
        raise ValueError(f"{path.name} has {found} Hz and shape {sound.shape}; wanted is one channel of {rate} Hz")
    return np.asarray(sound)


def _clip(record: dict[str, Any], offset: int, samples: int) -> Clip:
    return Clip(
        id=record["id"],
        text=record["text"],
        transcript=record.get("transcript", ""),
        words=_words(record),
        voice=record.get("voice", ""),
        engine=record.get("engine", ""),
        split=record.get("split", "train"),
        intent=record["intent"],
        answer_id=record.get("answer_id", ""),
        seconds=float(record["seconds"]),
        offset=offset,
        samples=samples,
    )


def _words(record: dict[str, Any]) -> tuple[Word, ...]:
    """As the synthesiser told them. One that tells nothing may have said a single word, and when is known."""
    if record.get("words"):
        return tuple((str(word), float(start), float(end)) for word, start, end in record["words"])
    if len(record["text"].split()) == 1:
        before, after = AROUND_S
        return ((record["text"], before, float(record["seconds"]) - after),)
    return ()


# ------------------------------------------------------------------------------------------------ splicing
def spoken(word: str) -> str:
    """A written word as transcripts have it: lower case, no signs."""
    return re.sub(r"[^a-z']", "", word.lower())


class Splicer:
    """Speaks lines that nobody spoke, word by word out of training clips whose word times are known.

    A line keeps to one voice as far as that voice has its words; the rest comes from other voices. Words that ended their clip
    are taken for the last word, others for those before it, so that the melody fits where it can. Some lines are halting: word
    by word with pauses, each word as if it were the last, like somebody who reads a list.
    """

    _HALTING = 0.3
    _MARGIN = 0.03  # s around a word; its neighbours reach into it, so it is faded
    _FADE = 0.02

    def __init__(self, bank: Bank, rng: np.random.Generator, *, keep: Callable[[Clip], bool] | None = None) -> None:
        """``keep`` chooses the clips to cut words from; by default those of the training split."""
        self._bank, self._rng = bank, rng
        self._places: dict[tuple[str, bool], list[tuple[Clip, Word]]] = defaultdict(list)
        self._of_voice: dict[tuple[str, bool, str], list[tuple[Clip, Word]]] = defaultdict(list)
        wanted = keep or (lambda clip: clip.split == "train")
        for clip in filter(wanted, bank.clips):
            for i, word in enumerate(clip.words):
                last = i == len(clip.words) - 1
                self._places[spoken(word[0]), last].append((clip, word))
                self._of_voice[spoken(word[0]), last, _main_voice(clip)].append((clip, word))
        self._voices = sorted({_main_voice(clip) for clip in bank.clips if clip.words and wanted(clip)})

    def line(self, text: str) -> tuple[np.ndarray, list[Word]] | None:
        """``text`` -> ((samples,) float32, its words with their times), or None where a word was never spoken."""
        words = [word for word in text.split() if spoken(word)]
        voice = self._voices[int(self._rng.integers(len(self._voices)))]
        position = AROUND_S[0]
        pieces, places = [np.zeros(int(position * self._bank.rate), np.float32)], []
        is_halting = self._rng.random() < self._HALTING
        for i, word in enumerate(words):
            found = self._find(spoken(word), is_halting or i == len(words) - 1, voice)
            if found is None:
                return None
            sound = self._cut(*found)
            start = position + self._MARGIN
            places.append((word, start, start + len(sound) / self._bank.rate - 2 * self._MARGIN))
            pieces.append(sound)
            if i < len(words) - 1:
                pause = self._rng.uniform(*self._pause(word, is_halting))
                pieces.append(np.zeros(int(pause * self._bank.rate), np.float32))
            position += (len(sound) + (len(pieces[-1]) if i < len(words) - 1 else 0)) / self._bank.rate
        return np.concatenate(pieces), places

    @staticmethod
    def _pause(word: str, is_halting: bool) -> tuple[float, float]:
        """From and to how many seconds it may last behind a word as it is written."""
        if word[-1] in ",.":
            return 0.15, 0.3
        return (0.05, 0.3) if is_halting else (0.0, 0.06)

    def _find(self, word: str, last: bool, voice: str) -> tuple[Clip, Word] | None:
        for choices in (
            self._of_voice.get((word, last, voice)),
            self._of_voice.get((word, not last, voice)),
            self._places.get((word, last)),
            self._places.get((word, not last)),
        ):
            if choices:
                return choices[int(self._rng.integers(len(choices)))]
        return None

    def _cut(self, clip: Clip, word: Word) -> np.ndarray:
        rate = self._bank.rate
        begin = max(0, int((word[1] - self._MARGIN) * rate))
        end = min(clip.samples, int((word[2] + self._MARGIN) * rate))
        sound = self._bank.sound[clip.offset + begin : clip.offset + end].astype(np.float32) / 32768
        fade = min(int(self._FADE * rate), len(sound) // 2)
        ramp = np.linspace(0, 1, fade, dtype=np.float32)
        sound[:fade] *= ramp
        sound[len(sound) - fade :] *= ramp[::-1]
        return sound


def _main_voice(clip: Clip) -> str:
    """The voice, or of a blend "a*0.40+b" the one with the larger share."""
    if "*" not in clip.voice:
        return clip.voice
    first, rest = clip.voice.split("*", 1)
    share, second = rest.split("+", 1)
    return first if float(share) >= 0.5 else second
