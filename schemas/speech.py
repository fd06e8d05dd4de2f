"""Speech turns: text in, sound out. Their options, checked once, and what comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from vcpipe.schemas.config import check_seed

_NO_LOGITS = (
    "the speech decoder draws from a mixture of Gaussians and takes the nearest codes; there are no token logits that "
    "a repetition could be taken from"
)
_CHECKPOINTS_OWN = "how sound is drawn belongs to the checkpoint (tts_config of its config.json)"

#: Options that other speech models have -> why this one has not.
_REJECTED = {
    "repetition_penalty": _NO_LOGITS,
    "repetition_window": _NO_LOGITS,
    "temperature": _CHECKPOINTS_OWN,
    "top_k": _CHECKPOINTS_OWN,
    "top_p": _CHECKPOINTS_OWN,
}


@dataclass(frozen=True, slots=True)
class SpeechOptions:
    """Options of a series of turns.

    ``seed``: of a turn that is not given another one. ``hold_back``: ids kept back until newer ones or the end come.
    ``min_segment_characters``, ``max_segment_characters``: text is let go at a sign from the former length on, at a space from
    the latter on; when, not what, is said depends on them. ``chunk_frames``: frames of one returned chunk.
    ``overlap_frames``: 0 decodes frame by frame with the whole past, exactly; more decodes every chunk by itself, from that
    many frames before it, which are discarded (nothing is blended). ``max_pending_frames``: most frames that may wait.
    ``silence_frames``: so many frames in a row, none louder than ``silence_level`` (RMS of samples in -1..1; None: the
    checkpoint's own), end a turn whose text is over.
    """

    seed: int = 0
    hold_back: int = 0
    min_segment_characters: int = 8
    max_segment_characters: int = 24
    chunk_frames: int = 1
    overlap_frames: int = 0
    max_pending_frames: int = 4096
    silence_frames: int = 4
    silence_level: float | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name, least in (
            ("hold_back", 0),
            ("min_segment_characters", 1),
            ("max_segment_characters", self.min_segment_characters),
            ("chunk_frames", 1),
            ("max_pending_frames", 1),
            ("silence_frames", 1),
        ):
            _check_count(name, getattr(self, name), least)
        _check_count("overlap_frames", self.overlap_frames, 0)
        if self.overlap_frames >= self.chunk_frames and self.overlap_frames:
            raise ValueError(
                f"overlap_frames must be smaller than chunk_frames ({self.chunk_frames}), not {self.overlap_frames}"
            )
        level = self.silence_level
        if level is not None and not (math.isfinite(level) and level >= 0):
            raise ValueError(f"silence_level must be a number from 0 on, or None, not {level}")

    @classmethod
    def of(cls, **fields: Any) -> SpeechOptions:
        """From fields by name. ValueError, with the reason, for options that only other speech models have."""
        check_rejected(fields)
        return cls(**fields)


def check_rejected(fields: dict[str, Any]) -> None:
    """ValueError where one of ``fields`` is an option that this model cannot have; the message gives the reason."""
    for name in fields:
        if name in _REJECTED:
            raise ValueError(f"{name} is not accepted: {_REJECTED[name]}")


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")


@dataclass(frozen=True, slots=True)
class SpeechChunk:
    """Sound of consecutive frames: (frames * 1764,) float32 at 22.05 kHz and their (frames, Q) int32 codes.

    ``frame_index``: of the first frame, counted from 0 in every turn.
    """

    frame_index: int
    samples: np.ndarray
    codes: np.ndarray

    @property
    def frames(self) -> int:
        """Frames that the chunk holds."""
        return len(self.codes)
