"""Conversations by the row: who speaks when, what the text channel holds, and how much each frame counts. numpy only.

A batch holds no sound, only where in :class:`Sounds` each stretch of it lies; it is laid out where the network runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vcpipe.bench.mini.material import Line, Material, Sounds
from vcpipe.bench.mini.shape import EOS, PAD
from vcpipe.bench.mini.timeline import CUT_DELAY, USER_FRAME, USER_RATE, Reply, first_frame, text_frames
from vcpipe.bench.mini.tokens import SPECIALS

#: How much a frame's text counts: PAD when nobody is about to speak, PAD while the user or the assistant speaks, and what
#: must be right to the frame: every token, EOS, and the PADs in the frames before a reply, since one that starts early is lost.
QUIET, BUSY, SHARP = 0.1, 0.3, 1.0
_BUSY_BEFORE, _SHARP_BEFORE = 25, 6

#: The last words of a question, the last one first, that the network has to be able to tell before it replies, and when.
RECALLED_WORDS = 10

#: Numbers of a question that are to be known then too; the one in its reply is, so many frames later.
RECALLED_NUMBERS, RESULT_LATER = 2, 2
_RECALLED_FRAMES = (-3, -2, -1)


@dataclass(frozen=True)
class Habits:
    """Probabilities of what may happen, per row, per exchange or per frame as said."""

    no_question: float = 0.06  # a row
    echo: float = 0.4  # a row: the assistant is heard in the user's channel
    prompt: float = 0.08  # a row begins with a system prompt
    long_pause: float = 0.1  # an exchange comes after more than 2.5 s
    interrupted: float = 0.12  # an exchange
    revoiced: float = 0.6  # an exchange: played faster or slower
    spliced: float = 0.4  # an exchange whose line was also spoken
    late: float = 0.12  # an exchange: the reply comes 1 or 2 frames after its time
    early: float = 0.03  # one frame before it
    moved: float = 0.05  # a token stands a frame beside its place
    forgotten: float = 0.02  # a token is not among the previous ids
    wrong: float = 0.02  # another token is there
    invented: float = 0.002  # a token where there is none


#: Clean timelines, as evaluation wants them.
PLAIN = Habits(*[0.0] * 13)


#: A stretch of sound: its first sample among all renderings, how many samples are laid, the index in the batch (all rows
#: one after the other) of the first one, samples of the rendering for one laid, factor.
Laid = tuple[int, int, int, float, float]


@dataclass
class Batch:
    """``speech``: what users say; ``echo``: what the assistant says, at full level, where users hear it in their microphones.

    ``text``, ``previous``, ``prompt`` (-1: none): (B, T) ids; ``weight`` (B, T); ``recall_at``: row and frame, ``recall_words``
    and ``recall_numbers`` (-1: none) what is to be known there, ``recall_results`` (-1: none) what RESULT_LATER frames later;
    ``replies``: (row, reply, frame until which nothing else is said).
    """

    speech: list[Laid]
    echo: list[Laid]
    text: np.ndarray
    previous: np.ndarray
    weight: np.ndarray
    prompt: np.ndarray
    recall_at: np.ndarray  # (Q, 2)
    recall_words: np.ndarray  # (Q, RECALLED_WORDS)
    recall_numbers: np.ndarray  # (Q, RECALLED_NUMBERS)
    recall_results: np.ndarray  # (Q,)
    replies: list[tuple[int, Reply, int]]


class Conversations:
    """Draws batches of ``rows`` rows of ``frames`` frames. The rows are full: what does not fit is cut off at the end."""

    def __init__(
        self, material: Material, vocabulary: int, rows: int, frames: int, seed: int, habits: Habits | None = None
    ) -> None:
        self._material, self._vocabulary = material, vocabulary
        self._rows, self._frames = rows, frames
        self._habits = habits or Habits()
        self._rng = np.random.default_rng(seed)
        self._chances = np.cumsum(material.weights)
        self._prompts = [ids for reply in material.replies if len(ids := [token for _, token in reply.laid.tokens]) > 2]

    def batch(self) -> Batch:
        """The next batch."""
        rows = [self._row() for _ in range(self._rows)]
        return _stack(rows)

    def _row(self) -> _Row:
        rng, habits = self._rng, self._habits
        row = _Row(self._frames)
        if rng.random() < habits.prompt:
            self._put_prompt(row)
        echo = rng.random() < habits.echo
        if rng.random() >= habits.no_question:
            self._put_exchanges(row, echo)
        row.previous = self._disturbed(row.heard)
        return row

    # -------------------------------------------------------------------------------------------- exchanges
    def _put_exchanges(self, row: _Row, echo: bool) -> None:
        """Questions and replies until the row is full."""
        rng, habits, sounds = self._rng, self._habits, self._material.sounds
        start = row.prompt_frames * USER_FRAME + self._pause()
        following = self._ask()
        while start < row.samples:
            line, rendering = following
            following = self._ask()
            ratio = rng.uniform(0.92, 1.08) if rng.random() < habits.revoiced else 1.0
            end = row.put(row.speech, sounds, rendering, start, ratio, 10 ** (rng.uniform(-5, 5) / 20))
            due = self._material.replies[line.reply].laid.moved(first_frame(end))
            late = self._delay()
            reply = due.moved(late)
            start = reply.end * USER_FRAME + self._pause()
            if rng.random() < habits.interrupted:
                onset = reply.first * USER_FRAME + int(rng.uniform(0.3, 1.5) * USER_RATE)
                if onset // USER_FRAME + CUT_DELAY < reply.end:
                    reply = reply.interrupted(onset)
                    start = onset - int(sounds.onset[following[1]])
            row.say(line, due.first, reply, self._moved(reply))
            if echo:
                self._put_echo(row, line, reply)

    def _ask(self) -> tuple[Line, int]:
        """A line and one of its renderings."""
        rng = self._rng
        line = self._material.lines[int(np.searchsorted(self._chances, rng.random() * self._chances[-1]))]
        spliced = not line.spoken or (line.spliced and rng.random() < self._habits.spliced)
        choices = line.spliced if spliced else line.spoken
        return line, choices[rng.integers(len(choices))]

    def _pause(self) -> int:
        """Samples before a question."""
        seconds = (
            self._rng.uniform(2.5, 8.0) if self._rng.random() < self._habits.long_pause else self._rng.uniform(0, 2.5)
        )
        return int(seconds * USER_RATE)

    def _delay(self) -> int:
        """Frames by which a reply misses its time. A network that has missed it must still begin, so that is shown to it."""
        chance = self._rng.random()
        if chance < self._habits.late:
            return int(self._rng.integers(1, 3))
        return -1 if chance < self._habits.late + self._habits.early else 0

    def _moved(self, reply: Reply) -> Reply:
        """The same with some tokens a frame beside their places, where that is free."""
        frames, ids = [frame for frame, _ in reply.tokens], [token for _, token in reply.tokens]
        for i in range(1, len(frames)):
            if self._rng.random() < self._habits.moved:
                frame = frames[i] + int(self._rng.choice((-1, 1)))
                if frames[i - 1] < frame < (frames[i + 1] if i + 1 < len(frames) else reply.end):
                    frames[i] = frame
        return replace(reply, tokens=tuple(zip(frames, ids, strict=True)))

    def _disturbed(self, text: np.ndarray) -> np.ndarray:
        """The previous ids of a text channel, (T,), with some tokens lost, wrong or invented."""
        rng, habits = self._rng, self._habits
        previous = np.concatenate([[PAD], text[:-1]])
        chance, others = rng.random(len(previous)), rng.integers(len(SPECIALS), self._vocabulary, len(previous))
        said = previous != PAD
        disturbed = np.where(said & (chance < habits.forgotten), PAD, previous)
        disturbed = np.where(said & (chance > 1 - habits.wrong), others, disturbed)
        return np.where(~said & (chance < habits.invented), others, disturbed)

    # -------------------------------------------------------------------------------------------- around them
    def _put_echo(self, row: _Row, line: Line, reply: Reply) -> None:
        """The reply's sound as the user's microphone hears it, a little later."""
        start = reply.sound * USER_FRAME + int(self._rng.uniform(0, 0.15) * USER_RATE)
        limit = (reply.end - reply.sound) * USER_FRAME
        row.put(row.echo, self._material.sounds, self._material.replies[line.reply].echo, start, 1.0, 1.0, limit)

    def _put_prompt(self, row: _Row) -> None:
        """A system prompt before the first frame of audio: BOS, some text, EOS, as a session puts it on the audio channel."""
        text = [token for i in self._rng.integers(len(self._prompts), size=3) for token in self._prompts[i]]
        ids = [1, *text[: self._rng.integers(3, 40)], EOS]
        row.prompt[: len(ids)] = ids[: row.frames]
        row.prompt_frames = len(ids)
        row.void[: len(ids)] = True  # whatever is said there is dropped


class _Row:
    """One row while it is filled."""

    def __init__(self, frames: int) -> None:
        self.frames, self.samples = frames, frames * USER_FRAME
        self.text = np.full(frames, PAD, np.int64)
        self.heard = self.text  # with moved tokens: what becomes the previous ids
        self.weight = np.full(frames, QUIET, np.float32)
        self.void = np.zeros(frames, bool)  # frames that do not count at all
        self.prompt = np.full(frames, -1, np.int64)
        self.prompt_frames = 0
        self.previous = self.text
        self.speech: list[Laid] = []
        self.echo: list[Laid] = []
        self.recall_at: list[int] = []
        self.recall_words: list[np.ndarray] = []
        self.recall_numbers: list[tuple[int, ...]] = []
        self.recall_results: list[int] = []
        self.replies: list[tuple[Reply, int]] = []

    def put(
        self,
        stretches: list[Laid],
        sounds: Sounds,
        rendering: int,
        start: int,
        ratio: float,
        gain: float,
        limit: int | None = None,
    ) -> int:
        """Lay a rendering at sample ``start``, ``limit`` samples at most; returns where it ends, be that outside the row."""
        whole = int((sounds.samples[rendering] - 1) / ratio) + 1
        length = min(whole, self.samples - start, whole if limit is None else limit)
        if length > 0:
            stretches.append((int(sounds.offset[rendering]), length, start, ratio, gain))
        return start + whole

    def say(self, line: Line, due: int, reply: Reply, moved: Reply) -> None:
        """Put a reply on the text channel that is due in frame ``due``; ``moved`` is what the previous ids say."""
        text, heard = text_frames([reply], self.frames), text_frames([moved], self.frames)
        said = text != PAD
        self.text = np.where(said, text, self.text)
        self.heard = np.where(heard != PAD, heard, self.heard)
        self._raise_weight(slice(max(0, due - _BUSY_BEFORE), reply.end), BUSY)
        self._raise_weight(slice(max(0, due - _SHARP_BEFORE), reply.tokens[0][0] if reply.tokens else due), SHARP)
        self._raise_weight(said, SHARP)
        # Neither a reply's delay nor a token among the previous ids that stands beside its place can be foreseen.
        self.void[min(due, reply.first) : max(due, reply.first)] = True
        self.void |= text != heard
        self._recall(line, due)
        if self.replies:
            before, until = self.replies[-1]
            self.replies[-1] = (before, min(until, due - 1))
        self.replies.append((reply, self.frames))

    def final_weight(self) -> np.ndarray:
        return np.where(self.void, 0, self.weight).astype(np.float32)

    def _raise_weight(self, frames: slice | np.ndarray, weight: float) -> None:
        self.weight[frames] = np.maximum(self.weight[frames], weight)

    def _recall(self, line: Line, due: int) -> None:
        """The words and numbers that have to be known just before a reply, and the number that it tells."""
        numbers = (*line.numbers, *[-1] * RECALLED_NUMBERS)[:RECALLED_NUMBERS]
        words = np.zeros(RECALLED_WORDS, np.int64)
        last = line.words[::-1][:RECALLED_WORDS]
        words[: len(last)] = last
        for frame in _RECALLED_FRAMES:
            if 0 <= due + frame < self.frames:
                self.recall_at.append(due + frame)
                self.recall_words.append(words)
                self.recall_numbers.append(numbers)
                self.recall_results.append(line.result if due + frame + RESULT_LATER < self.frames else -1)


def _stack(rows: list[_Row]) -> Batch:
    where = [(i, frame) for i, row in enumerate(rows) for frame in row.recall_at]
    words = [words for row in rows for words in row.recall_words]
    numbers = [numbers for row in rows for numbers in row.recall_numbers]
    return Batch(
        speech=[laid for i, row in enumerate(rows) for laid in _in_batch(row.speech, i * row.samples)],
        echo=[laid for i, row in enumerate(rows) for laid in _in_batch(row.echo, i * row.samples)],
        text=np.stack([row.text for row in rows]),
        previous=np.stack([row.previous for row in rows]),
        weight=np.stack([row.final_weight() for row in rows]),
        prompt=np.stack([row.prompt for row in rows]),
        recall_at=np.array(where, np.int64).reshape(-1, 2),
        recall_words=np.array(words, np.int64).reshape(-1, RECALLED_WORDS),
        recall_numbers=np.array(numbers, np.int64).reshape(-1, RECALLED_NUMBERS),
        recall_results=np.array([result for row in rows for result in row.recall_results], np.int64),
        replies=[(i, reply, until) for i, row in enumerate(rows) for reply, until in row.replies],
    )


def _in_batch(stretches: list[Laid], first: int) -> list[Laid]:
    return [(source, samples, first + start, ratio, gain) for source, samples, start, ratio, gain in stretches]
