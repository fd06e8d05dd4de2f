"""Live transcription as its caller sees it: one protocol, in the process of the model and across pipes.

    session = stage.create_streaming_session()  # or pipeline.open_transcription()
    session.feed(samples)  # any number of times, of any size; a producer's thread may do it
    session.close()
    while not session.done:
        print("".join(session.step()), end="")

The deltas joined are the transcript.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

#: How far behind the input a transcript is by construction, in ms: an encoder frame, without frames after it.
TRANSCRIPTION_DELAY_MS = 80


@runtime_checkable
class StreamingSession(Protocol):
    """One turn of speech to text. A producer feeds and closes, one consumer steps until ``done``.

    After :meth:`close` nothing may be fed: the next turn takes another session, or this one after ``reset()`` where it has
    that. ``reset()`` (back to the initial state) and ``cancel()`` (done at once, nothing more is said) are extensions that
    not every implementation needs.
    """

    #: Rate of the samples in Hz. Nothing is resampled here.
    input_sample_rate: int

    def feed(self, samples: np.ndarray) -> None:
        """Queue mono float32 PCM, (n,), without running the model; what is kept is copied.

        ValueError for another rank or a sample that is not finite, RuntimeError after :meth:`close`, BufferError where more
        than 30 s would be queued. Whatever is raised, nothing of ``samples`` was taken and nothing queued was lost.
        """

    def step(self, *, max_decode_tokens: int = 4) -> list[str]:
        """One bounded unit of work. Returns text to append; an empty list does not mean that the end is reached.

        ValueError for ``max_decode_tokens`` < 1.
        """

    def close(self) -> None:
        """End of the input; may be repeated. The consumer steps on until ``done``."""

    @property
    def done(self) -> bool:
        """Whether all that was fed before :meth:`close` is decoded."""


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """Text to append, and the encoder frame in which it was recognised.

    ``start_s`` to ``end_s``: the 80 ms of input that this frame was the first to hear; frame 0 hears the very beginning only.
    The words may have begun earlier: a recogniser decides once it has heard enough.
    """

    text: str
    frame_index: int
    start_s: float
    end_s: float

    @classmethod
    def of_frame(cls, text: str, frame_index: int, frame_duration_s: float) -> TranscriptDelta:
        """Text of an encoder frame, with its times."""
        return cls(text, frame_index, max(frame_index - 1, 0) * frame_duration_s, frame_index * frame_duration_s)


def check_streaming_options(temperature: float, language: str | None, transcription_delay_ms: int | None) -> None:
    """ValueError for what the model cannot do: sampling, a given language, frames after the present one."""
    if temperature != 0:
        raise ValueError(f"temperature must be 0: transcription is greedy, got {temperature}")
    if language is not None:
        raise ValueError(f"language must be None: the model takes no language, got {language!r}")
    if transcription_delay_ms not in (None, TRANSCRIPTION_DELAY_MS):
        raise ValueError(
            f"transcription_delay_ms must be {TRANSCRIPTION_DELAY_MS} (no frames ahead), got {transcription_delay_ms}"
        )


def check_decode_tokens(max_decode_tokens: int) -> None:
    """ValueError below 1."""
    if max_decode_tokens < 1:
        raise ValueError(f"max_decode_tokens must be at least 1, not {max_decode_tokens}")


def checked_pcm(samples: Any) -> np.ndarray:
    """Mono PCM as (n,) float32, possibly the very array given. ValueError for another rank or a sample that is not finite."""
    pcm = np.asarray(samples, dtype=np.float32)
    if pcm.ndim != 1:
        raise ValueError(f"samples must be mono, (n,), not of shape {pcm.shape}")
    if not np.isfinite(pcm).all():
        raise ValueError(f"samples must be finite; sample {int(np.argmin(np.isfinite(pcm)))} is not")
    return pcm
