"""Stretches of a session to learn recognition from: who says what when. Planned in numpy; the sound is laid on the device.

A session's stream never starts anew, so a stretch holds several lines with pauses, and what was said before it may be told to
the prediction network (``history``). Some stretches hold only noise, silence or the assistant's echo, and no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from vcpipe.bench.mini.augment import Segments, lay
from vcpipe.bench.mini.sound import Bank, Clip, Splicer, spoken
from vcpipe.bench.mini.tokens import Pieces

FRAME = 1280
RATE = 16000

#: How often a clip of an engine is drawn: espeak's are often unintelligible.
_WEIGHTS = {"kokoro": 1.0, "flite": 0.8, "festival": 0.6, "espeak": 0.15}

#: Frames of a stretch (4.5 to 23 s) and how often each is drawn.
_LENGTHS, _LENGTH_SHARES = (56, 92, 142, 192, 292), (0.25, 0.3, 0.25, 0.12, 0.08)

_EMPTY_SHARE, _SPLICED_SHARE, _ECHO_SHARE, _PACED_SHARE = 0.1, 0.25, 0.3, 0.5
_TAIL = 0.4  # s after the last line: its last piece must have time to come
_LONGEST_HISTORY = 48


class Batch(NamedTuple):
    """B stretches of equal length. Segments index the banks of users and answers, and ``spliced_sound``, (n,) int16.

    targets: (B, U) ids of pieces, ``symbols``: (B,) how many; history: (B, H) pieces said before.
    """

    frames: int
    clips: Segments
    spliced: Segments
    spliced_sound: Tensor
    echo: Segments
    targets: Tensor
    symbols: Tensor
    history: Tensor

    def to(self, device: torch.device) -> Batch:
        def moved(part: Any) -> Any:
            if isinstance(part, Tensor):
                return part.to(device, non_blocking=True)
            return part.to(device) if isinstance(part, Segments) else part

        return Batch(*map(moved, self))

    def sound(self, users: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """What users say and what the assistant says, (B, frames * 1280) each; the banks' sounds on the batch's device."""
        shape = len(self.symbols), self.frames * FRAME
        speech = lay(users, self.clips, *shape)
        if self.spliced.total:
            speech += lay(self.spliced_sound, self.spliced, *shape)
        return speech, lay(answers, self.echo, *shape)


class Line(NamedTuple):
    """Something said: a clip of the bank, or the sound of a spliced one. ``word_ends``: s, where they are known."""

    transcript: str
    clip: Clip | None
    sound: np.ndarray | None = None
    word_ends: tuple[float, ...] = ()

    @classmethod
    def of_clip(cls, clip: Clip) -> Line:
        return cls(clip.transcript, clip, None, tuple(end for _, _, end in clip.words))

    @property
    def samples(self) -> int:
        return self.clip.samples if self.clip is not None else len(self.sound)  # type: ignore[arg-type]


class Layout:
    """A batch in the making. Positions are in samples."""

    def __init__(self, batch: int, frames: int, pieces: Pieces) -> None:
        self.batch, self.frames, self.samples = batch, frames, frames * FRAME
        self._pieces = pieces
        self._ids: dict[str, list[int]] = {}
        self._clips: list[tuple[int, int, int, float, float]] = []
        self._spliced: list[tuple[int, int, int, float, float]] = []
        self._echo: list[tuple[int, int, int, float, float]] = []
        self._sounds: list[np.ndarray] = []
        self._sound_samples = 0
        self._targets: list[list[int]] = [[] for _ in range(batch)]

    def say(self, row: int, position: int, line: Line, *, pace: float = 1.0, gain: float = 1.0) -> int:
        """Lay a line; where it ends. It has to fit."""
        samples = int(line.samples / pace)
        place = row * self.samples + position
        if line.clip is not None:
            self._clips.append((line.clip.offset, samples, place, pace, gain))
        else:
            assert line.sound is not None
            self._spliced.append((self._sound_samples, samples, place, pace, gain))
            self._sounds.append((line.sound * 32767).astype(np.int16))
            self._sound_samples += len(line.sound)
        self._targets[row] += self._pieces.ids(line.transcript)
        return position + samples

    def answer(self, row: int, position: int, clip: Clip, rate: int, share: float = 1.0) -> int:
        """Lay ``share`` of the assistant's sound, cut where the stretch ends; where it ends."""
        pace = rate / RATE
        samples = max(0, min(int(share * clip.samples / pace), self.samples - position))
        self._echo.append((clip.offset, samples, row * self.samples + position, pace, 1.0))
        return position + samples

    def finished(self, history: Sequence[Sequence[int]] | None = None) -> Batch:
        symbols = np.array([len(ids) for ids in self._targets])
        targets = np.zeros((self.batch, int(symbols.max(initial=0))), np.int64)
        for row, ids in zip(targets, self._targets, strict=True):
            row[: len(ids)] = ids
        before = np.zeros((self.batch, 0), np.int64) if history is None else np.array(history, np.int64)
        sound = np.concatenate([*self._sounds, np.zeros(1, np.int16)])
        return Batch(
            self.frames,
            Segments.of(self._clips),
            Segments.of(self._spliced),
            torch.from_numpy(sound),
            Segments.of(self._echo),
            torch.from_numpy(targets),
            torch.from_numpy(symbols.astype(np.int64)),
            torch.from_numpy(before.reshape(self.batch, -1)),
        )


class Stretches(IterableDataset):
    """Endless batches for training, of about ``frames`` encoder frames each."""

    def __init__(
        self, users: Bank, answers: Bank, pieces: Pieces, *, frames: int, seed: int, clips: int | None = None
    ) -> None:
        """``clips``: use only the first so many training clips."""
        super().__init__()
        self._users, self._answers, self._pieces = users, answers, pieces
        self._frames, self._seed = frames, seed
        self._clips = [clip for clip in users.clips if clip.split == "train" and clip.transcript][:clips]
        weights = np.array([_WEIGHTS[clip.engine] for clip in self._clips])
        self._chances = np.cumsum(weights / weights.sum())
        self._texts = sorted({clip.transcript for clip in self._clips})
        self._words = sorted({spoken(word) for clip in self._clips for word, _, _ in clip.words})

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng([self._seed, worker.id if worker else 0])
        chosen = {clip.id for clip in self._clips}
        splicer = Splicer(self._users, rng, keep=lambda clip: clip.id in chosen)
        while True:
            yield self._batch(rng, splicer)

    def _batch(self, rng: np.random.Generator, splicer: Splicer) -> Batch:
        frames = int(rng.choice(_LENGTHS, p=_LENGTH_SHARES))
        layout = Layout(max(1, self._frames // frames), frames, self._pieces)
        for row in range(layout.batch):
            if rng.random() < _EMPTY_SHARE:
                self._fill_empty(layout, row, rng)
            else:
                self._fill(layout, row, rng, splicer)
        return layout.finished(self._history(layout.batch, rng))

    def _fill(self, layout: Layout, row: int, rng: np.random.Generator, splicer: Splicer) -> None:
        answers = rng.random() < _ECHO_SHARE
        position = int(rng.uniform(0, 1) * RATE)
        while True:
            line = self._line(rng, splicer)
            pace = rng.uniform(0.9, 1.1) if rng.random() < _PACED_SHARE else 1.0
            if position + line.samples / pace + _TAIL * RATE > layout.samples:
                return
            position = layout.say(row, position, line, pace=pace, gain=10 ** (rng.uniform(-4, 4) / 20))
            if answers:
                position += int(rng.uniform(0.3, 0.8) * RATE)
                # Now and then the user breaks into the answer, which ends a moment later.
                if rng.random() < 0.3:
                    end = layout.answer(row, position, self._some_answer(rng), self._answers.rate, rng.uniform(0.2, 1))
                    position = max(position, end - int(0.25 * RATE))
                else:
                    position = layout.answer(row, position, self._some_answer(rng), self._answers.rate)
                    position += int(rng.uniform(0.1, 1.0) * RATE)
            else:
                position += int((rng.uniform(1, 4) if rng.random() < 0.8 else rng.uniform(0.3, 1)) * RATE)

    def _fill_empty(self, layout: Layout, row: int, rng: np.random.Generator) -> None:
        position = int(rng.uniform(0, 1) * RATE)
        while rng.random() < 0.7 and position < layout.samples:
            position = layout.answer(row, position, self._some_answer(rng), self._answers.rate)
            position += int(rng.uniform(0.2, 2) * RATE)

    def _line(self, rng: np.random.Generator, splicer: Splicer) -> Line:
        if rng.random() < _SPLICED_SHARE:
            text = self._spliced_text(rng)
            found = splicer.line(text)
            if found is not None:
                return Line(" ".join(map(spoken, text.split())), None, found[0])
        index = int(np.searchsorted(self._chances, rng.random()))
        return Line.of_clip(self._clips[min(index, len(self._clips) - 1)])

    def _spliced_text(self, rng: np.random.Generator) -> str:
        """A line of the domain, a single word, or a few words without sense. A comma makes a longer gap."""
        kind = rng.random()
        if kind < 0.5:
            words = self._texts[int(rng.integers(len(self._texts)))].split()
        elif kind < 0.8:
            words = [self._word(rng)]
        else:
            words = [self._word(rng) for _ in range(rng.integers(2, 5))]
        return (", " if rng.random() < 0.5 else " ").join(words)

    def _word(self, rng: np.random.Generator) -> str:
        """As often as it is said, or as often as any other."""
        if rng.random() < 0.5:
            words = self._texts[int(rng.integers(len(self._texts)))].split()
            return words[int(rng.integers(len(words)))]
        return self._words[int(rng.integers(len(self._words)))]

    def _some_answer(self, rng: np.random.Generator) -> Clip:
        return self._answers.clips[int(rng.integers(len(self._answers.clips)))]

    def _history(self, batch: int, rng: np.random.Generator) -> list[list[int]] | None:
        """Pieces said before each stretch, equally many for all; none for half of the batches."""
        if rng.random() < 0.5:
            return None
        length, rows = int(rng.integers(1, _LONGEST_HISTORY)), []
        for _ in range(batch):
            ids: list[int] = []
            while len(ids) < length:
                ids += self._pieces.ids(self._texts[int(rng.integers(len(self._texts)))])
            rows.append(ids[-length:])
        return rows
