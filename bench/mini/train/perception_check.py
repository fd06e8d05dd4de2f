"""How well speech is recognised: clips alone, in conversation, words spliced together as by telephone, and no speech at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vcpipe.bench.mini.augment import augment
from vcpipe.bench.mini.nets.perception import SpeechRecogniser
from vcpipe.bench.mini.scoring import word_errors
from vcpipe.bench.mini.sound import Bank, Clip, Splicer, spoken
from vcpipe.bench.mini.tokens import Pieces
from vcpipe.bench.mini.train.stretches import FRAME, RATE, Batch, Layout, Line

#: Voices that only the dev split has.
_NEW_VOICES = {"af_river", "bm_fable"}
_FRAMES_AT_ONCE = 6400


@dataclass
class _Set:
    """Stretches to recognise; ``lines``: for every stretch its lines and where each begins (s)."""

    name: str
    batches: list[Batch] = field(default_factory=list)
    lines: list[list[tuple[Line, float]]] = field(default_factory=list)
    augmented: bool = False


class Check:
    """The sets, made once."""

    def __init__(
        self, users: Bank, answers: Bank, pieces: Pieces, device: torch.device, *, clips: Sequence[Clip] | None = None
    ) -> None:
        """``clips``: what to recognise, by default the dev split."""
        self._pieces, self._device = pieces, device
        self._users, self._answers = users.on(device), answers.on(device)
        rng = np.random.default_rng(0)
        clips = [clip for clip in users.clips if clip.split == "dev"] if clips is None else clips
        lines = [Line.of_clip(clip) for clip in clips]
        spliced = _spliced(users, clips, rng)
        self._sets = [
            _stretches("dev", [[line] for line in lines], pieces, rng),
            _stretches("talk", [lines[i : i + 12] for i in range(0, len(lines), 12)], pieces, rng),
            _stretches("words", [[line] for line in spliced], pieces, rng, augmented=True),
            _silence(answers, pieces, rng),
        ]

    def __call__(self, network: SpeechRecogniser) -> dict[str, float]:
        """Word error rates (per cent), the delay of words' last pieces (s), words a minute heard where nobody spoke."""
        numbers: dict[str, float] = {}
        for found in self._sets:
            heard = self._recognise(network, found)
            if found.name == "silence":
                minutes = sum(batch.frames * len(batch.symbols) for batch in found.batches) * FRAME / RATE / 60
                numbers["silence_words_a_minute"] = sum(len(self._text(row).split()) for row in heard) / minutes
                continue
            if not found.lines:
                continue
            wanted = [" ".join(line.transcript for line, _ in lines) for lines in found.lines]
            numbers[f"{found.name}_wer"] = _error_rate(wanted, [self._text(row) for row in heard])
            if found.name == "dev":
                numbers |= self._by_engine(found, wanted, heard) | self._delay(found, wanted, heard)
        return numbers

    @torch.no_grad()
    def _recognise(self, network: SpeechRecogniser, found: _Set) -> list[list[tuple[int, int]]]:
        generator = torch.Generator(self._device).manual_seed(0)
        rows = []
        for batch in found.batches:
            batch = batch.to(self._device)
            speech, echo = batch.sound(self._users, self._answers)
            sound = augment(speech, echo, generator) if found.augmented else speech
            frames = torch.full((len(sound),), batch.frames, device=self._device)
            rows += network.greedy(network.encoder.features(sound), frames)
        return rows

    def _text(self, row: Sequence[tuple[int, int]]) -> str:
        return self._pieces.text(piece for piece, _ in row)

    def _by_engine(self, found: _Set, wanted: list[str], heard: list[list[tuple[int, int]]]) -> dict[str, float]:
        groups: dict[str, list[int]] = defaultdict(list)
        for i, [(line, _)] in enumerate(found.lines):
            assert line.clip is not None
            groups[line.clip.engine].append(i)
            if line.clip.voice in _NEW_VOICES:
                groups["new_voices"].append(i)
        texts = [self._text(row) for row in heard]
        return {
            f"{name}_wer": _error_rate([wanted[i] for i in rows], [texts[i] for i in rows])
            for name, rows in groups.items()
        }

    def _delay(self, found: _Set, wanted: list[str], heard: list[list[tuple[int, int]]]) -> dict[str, float]:
        """From a word's end until the frame with its last piece has been heard; of lines recognised without error."""
        delays, last_delays = [], []
        for lines, text, row in zip(found.lines, wanted, heard, strict=True):
            [(line, start)] = lines
            if not line.word_ends or self._text(row) != text:
                continue
            last_frames: list[int] = []
            for piece, frame in row:
                if self._pieces.names[piece].startswith("▁") or not last_frames:
                    last_frames.append(frame)
                last_frames[-1] = frame
            if len(last_frames) != len(line.word_ends):  # there was a sign for a beginning word, and no word
                continue
            heard_at = (np.array(last_frames) + 1) * FRAME / RATE
            delays += list(heard_at - start - line.word_ends)
            last_delays.append(delays[-1])
        if not delays:
            return {}
        return {
            "delay": float(np.mean(delays)),
            "last_word_delay": float(np.mean(last_delays)),
            "last_word_delay_95": float(np.quantile(last_delays, 0.95)),
        }


# ------------------------------------------------------------------------------------------------ the sets
def _stretches(
    name: str, groups: list[list[Line]], pieces: Pieces, rng: np.random.Generator, *, augmented: bool = False
) -> _Set:
    """One stretch a group: up to a second, its lines with pauses of 1 to 3 s, 0.8 s."""
    found = _Set(name, augmented=augmented)
    planned = []
    for lines in groups:
        places, position = [], rng.uniform(0.1, 1)
        for line in lines:
            places.append((line, position))
            position += line.samples / RATE + rng.uniform(1, 3)
        end = places[-1][1] + lines[-1].samples / RATE + 0.8
        planned.append((int(np.ceil(end * RATE / FRAME)), places))
    planned.sort(key=lambda plan: plan[0])
    while planned:
        count = max(1, _FRAMES_AT_ONCE // planned[-1][0])
        chosen, planned = planned[-count:], planned[:-count]
        layout = Layout(len(chosen), chosen[-1][0], pieces)
        for row, (_, places) in enumerate(chosen):
            for line, start in places:
                layout.say(row, int(start * RATE), line)
            found.lines.append(places)
        found.batches.append(layout.finished())
    return found


def _spliced(users: Bank, clips: Sequence[Clip], rng: np.random.Generator) -> list[Line]:
    """Words cut out of these clips one by one, and short lines of them, of new voices where there are any."""
    chosen = {clip.id for clip in clips if clip.words}
    chosen = {clip.id for clip in clips if clip.voice in _NEW_VOICES} or chosen
    if not chosen:
        return []
    splicer = Splicer(users, rng, keep=lambda clip: clip.id in chosen)
    words = sorted({spoken(word) for clip in clips if clip.id in chosen for word, _, _ in clip.words})
    texts = [*words, *(clip.transcript.replace(" ", ", ") for clip in clips if len(clip.transcript.split()) < 5)]
    found = []
    for text in texts:
        line = splicer.line(text)
        if line is not None:
            found.append(Line(" ".join(map(spoken, text.split())), None, line[0]))
    return found


def _silence(answers: Bank, pieces: Pieces, rng: np.random.Generator) -> _Set:
    """Noise for 32 stretches of 12 s, with the assistant's echo in half of them."""
    layout = Layout(32, 150, pieces)
    for row in range(16):
        position = 0
        while position < layout.samples - RATE:
            clip = answers.clips[int(rng.integers(len(answers.clips)))]
            position = layout.answer(row, position, clip, answers.rate) + RATE
    return _Set("silence", [layout.finished()], [], augmented=True)


# ------------------------------------------------------------------------------------------------ errors
def _error_rate(wanted: list[str], heard: list[str]) -> float:
    """Per cent of the wanted words."""
    errors = sum(word_errors(a.split(), b.split()) for a, b in zip(wanted, heard, strict=True))
    return 100 * errors / max(1, sum(len(text.split()) for text in wanted))
