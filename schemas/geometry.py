"""The frame clock in numbers: how much of everything one 80 ms frame holds."""

from __future__ import annotations

from dataclasses import dataclass

#: Stages of a voice-chat session in the order in which data visits them.
STAGES = ("perception", "language", "tts", "codec")

#: Most PCM a session may hold beyond the frames in flight, in seconds.
MAX_BACKLOG_S = 30.0


@dataclass(frozen=True, slots=True)
class FrameGeometry:
    """Sizes of one frame, read from a checkpoint's config (the defaults are those of the 11B checkpoint).

    Rates are in Hz, ``frame_duration_s`` in seconds, ``codebooks`` counts the codes of one frame.
    """

    input_sample_rate: int = 16000
    output_sample_rate: int = 22050
    frame_duration_s: float = 0.08
    codebooks: int = 31

    @property
    def frame_samples(self) -> int:
        """Input samples of one frame (1280)."""
        return round(self.input_sample_rate * self.frame_duration_s)

    @property
    def output_samples(self) -> int:
        """Output samples of one frame (1764)."""
        return round(self.output_sample_rate * self.frame_duration_s)

    @property
    def frame_ns(self) -> int:
        """Length of one frame in nanoseconds."""
        return round(self.frame_duration_s * 1e9)
