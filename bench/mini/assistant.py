"""Talks to a checkpoint as a user would: sound into a session of the real pipeline, text, transcript and sound out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vcpipe.bench.mini.clips import loudness
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.events import Event

FRAME_S = 0.08

#: Root mean square above which sound counts as heard: -45 dB of full scale.
AUDIBLE = 10 ** (-45 / 20)

#: Silence is fed in bursts, in which frames overlap, until the assistant has been quiet for one burst.
_BURST = 8
#: Frames that are waited for a reply to begin and, whatever is said, in all.
_PATIENCE, _MOST = 30, 100


@dataclass
class Heard:
    """One session. ``pieces``: (frame, text) of the assistant's words; ``samples`` (1764 a frame,) at ``rate``."""

    rate: int
    pieces: list[tuple[int, str]] = field(default_factory=list)
    transcript: str = ""
    chunks: list[np.ndarray] = field(default_factory=list)

    @property
    def frames(self) -> int:
        return len(self.chunks)

    def text(self, first: int = 0, end: int | None = None) -> str:
        """What is written from frame ``first`` to before frame ``end``."""
        return "".join(piece for frame, piece in self.pieces if first <= frame and (end is None or frame < end)).strip()

    def sound(self, first: int = 0, end: int | None = None) -> np.ndarray:
        """(n,) float32 of those frames."""
        return np.concatenate([np.zeros(0, np.float32), *self.chunks[first:end]])

    def audible(self, first: int = 0, end: int | None = None) -> bool:
        """Whether those frames hold any sound worth the name."""
        return bool((loudness(self.sound(first, end), self.rate) > AUDIBLE).any())

    def onset_s(self, first: int) -> float | None:
        """When it begins to be heard, in seconds of the session; None if never from frame ``first`` on."""
        on = np.flatnonzero(loudness(self.sound(first), self.rate) > AUDIBLE)
        return first * FRAME_S + float(on[0]) / 100 if on.size else None


class Assistant:
    """A pipeline that is asked one session after the other."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._size = pipeline.geometry.frame_samples

    def hear(self, samples: np.ndarray) -> Heard:
        """A session over (n,) float32 at 16 kHz, and over so much silence as the reply takes."""
        padded = np.concatenate([samples, np.zeros(-len(samples) % self._size, np.float32)]).astype(np.float32)
        heard = Heard(self._pipeline.geometry.output_sample_rate)
        silence = np.zeros(_BURST * self._size, np.float32)
        with self._pipeline.open_session(seed=0) as session:
            self._take(heard, session.push_audio(padded))
            asked = heard.frames
            while not self._done(heard, asked):
                self._take(heard, session.push_audio(silence))
        return heard

    def _take(self, heard: Heard, events: list[Event]) -> None:
        for event in events:
            if event.kind == "assistant_text_delta":
                heard.pieces.append((event.frame_index, event.delta or ""))
            elif event.kind == "user_transcript_delta":
                heard.transcript = event.text or ""
            elif event.kind == "audio":
                assert event.samples is not None
                heard.chunks.append(event.samples)

    def _done(self, heard: Heard, asked: int) -> bool:
        waited = heard.frames - asked
        if waited >= _MOST:
            return True
        recent = heard.frames - _BURST
        if heard.text(recent) or heard.audible(recent) or waited < _BURST:
            return False
        return bool(heard.text(asked)) or waited >= _PATIENCE
