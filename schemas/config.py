"""Options, resolved and checked once, then frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.geometry import STAGES

ClockKind = Literal["file", "wall", "stepped"]

#: Positions of a session are counted in 32 bits.
_MAX_POSITIONS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """How the processes of a pipeline are started.

    ``checkpoint``: an existing folder. ``stages``: which actors, consecutive ones of a session's four. ``device``: "cpu", "gpu"
    or None for MLX's default. ``window``: most frames of a session in flight. ``tap``: endpoint for the public copy of
    everything, or None. ``endpoints``: own endpoints by pipe name ("perception.in", "reports", ...) where the private ipc ones
    will not do. ``startup_timeout_s`` bounds loading, ``step_timeout_s`` a single step of a stage. ``tts_history_frames``: last
    positions that the speech decoder sees at most, one a frame; None leaves the model its own windows.
    """

    checkpoint: Path
    stages: tuple[str, ...] = STAGES
    device: str | None = None
    window: int = 8
    tap: str | None = None
    endpoints: dict[str, str] = field(default_factory=dict)
    startup_timeout_s: float = 900.0
    step_timeout_s: float = 300.0
    tts_history_frames: int | None = None

    def __post_init__(self) -> None:
        if self.stages not in {STAGES[i:j] for i in range(len(STAGES)) for j in range(i + 1, len(STAGES) + 1)}:
            raise ConfigError(
                f"stages {', '.join(self.stages) or 'none'}: accepted are consecutive ones of {', '.join(STAGES)}"
            )
        if self.device not in (None, "cpu", "gpu"):
            raise ConfigError(f"device {self.device!r} is unknown; accepted: cpu, gpu")
        if self.window < 1:
            raise ConfigError(f"window must be at least 1 frame, not {self.window}")
        check_tts_history(self.tts_history_frames)
        if unknown := self.endpoints.keys() - set(self.pipe_names):
            accepted = ", ".join(self.pipe_names)
            raise ConfigError(f"endpoint {min(unknown)!r} belongs to no pipe; accepted: {accepted}")

    @property
    def pipe_names(self) -> list[str]:
        """Names of all pipes, in the order of the stages."""
        return ["reports", *(f"{stage}.{pipe}" for stage in self.stages for pipe in ("in", "control"))]


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of one streaming session.

    ``system_prompt``: None takes the checkpoint's default. ``seed``: non-negative; the same seed gives the same bytes.
    ``max_streaming_seconds``: None for no limit. ``use_language_cache`` / ``use_perception_cache``: False recomputes
    from the history (diagnostic, slow). ``profile``: keep per-stage timings of every frame (about 100 bytes a frame).
    ``clock``: "file" sends frames as fast as credit allows, "wall" one every 80 ms, "stepped" one a call of ``step``.
    """

    system_prompt: str | None = None
    seed: int = 0
    max_streaming_seconds: float | None = None
    use_language_cache: bool = True
    use_perception_cache: bool = True
    profile: bool = False
    clock: ClockKind = "file"

    def __post_init__(self) -> None:
        check_seed(self.seed)
        limit = self.max_streaming_seconds
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise ValueError(f"max_streaming_seconds must be a positive number of seconds, not {limit}")
        if self.clock not in ("file", "wall", "stepped"):
            raise ValueError(f"clock {self.clock!r} is unknown; accepted: file, wall, stepped")

    def max_frames(self, frame_duration_s: float) -> int | None:
        """Frames within the limit, truncated: 2.32 s of 0.08 s frames are 28, not 29, in double precision."""
        limit = self.max_streaming_seconds
        return None if limit is None else int(limit / frame_duration_s)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of an offline run over a whole waveform.

    ``max_frames``: at least 2, truncates the encoder's output. ``extra_decoding_seconds``: silence appended to the input.
    ``use_language_cache``: the reference recomputes the whole history for every frame by default; True is faster.
    """

    system_prompt: str | None = None
    seed: int = 0
    max_frames: int | None = None
    extra_decoding_seconds: float = 0.0
    use_language_cache: bool = False

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.max_frames is not None and self.max_frames < 2:
            raise ValueError(f"max_frames must be at least 2, not {self.max_frames}")
        if not (math.isfinite(self.extra_decoding_seconds) and self.extra_decoding_seconds >= 0):
            raise ValueError(f"extra_decoding_seconds must not be negative, got {self.extra_decoding_seconds}")


def check_seed(seed: int) -> None:
    """Raises ValueError unless ``seed`` is an int in 0 .. 2**64 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an integer from 0 to 2**64 - 1, not {seed!r}")


def check_tts_history(frames: int | None) -> None:
    """Raises ConfigError unless ``frames`` is None or an int in 1 .. 2**31 - 1: a position always sees itself."""
    if frames is None:
        return
    if isinstance(frames, bool) or not isinstance(frames, int) or not 1 <= frames <= _MAX_POSITIONS:
        raise ConfigError(f"tts_history_frames must be an integer from 1 to {_MAX_POSITIONS}, not {frames!r}")
