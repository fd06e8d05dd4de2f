"""stage -> coordinator: what a stage did with a frame or a session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vcpipe.schemas.envelope import Codec, array_field


@dataclass(frozen=True, slots=True)
class Opened:
    """The stage has the session's state (prompt and warm-up included). ``duration_ms``: time it took."""

    KIND: ClassVar[str] = "opened"
    stage: str
    duration_ms: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """perception: text newly recognised in this frame.

    ``delta`` is the suffix of the stripped transcript; the joined deltas are the cumulative text. Sent only in frames
    that kept at least one piece. Offline, one report carries the whole transcript.
    """

    KIND: ClassVar[str] = "transcript"
    delta: str


@dataclass(frozen=True, slots=True)
class Transcribed:
    """perception, at the end of a transcription: the number of its encoder frames.

    Its :class:`Transcript` reports carry the index of the encoder frame; only the first of them is stripped, at its start.
    """

    KIND: ClassVar[str] = "transcribed"
    frames: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """language: the two ids of one frame.

    For each channel whose id is not special: ``delta`` (what an event shows), and how the cumulative text changes:
    drop ``erase`` characters at its end, then add ``append``. None for all three where the id is special.
    """

    KIND: ClassVar[str] = "tokens"
    text_id: int
    function_id: int
    text_delta: str | None = None
    text_erase: int = 0
    text_append: str = ""
    function_delta: str | None = None
    function_erase: int = 0
    function_append: str = ""


@dataclass(frozen=True, slots=True)
class AudioFrame:
    """codec: decoded speech of one frame, (1764,) float32 and its (Q,) codes after control replacement.

    Offline, the codes of every frame come with empty samples; at the end the waveform comes in pieces with empty codes,
    under the index of the piece's first frame.
    """

    KIND: ClassVar[str] = "audio_frame"
    samples: np.ndarray = array_field("float32", (None,))
    codes: np.ndarray = array_field("int32", (None,))


@dataclass(frozen=True, slots=True)
class StageTiming:
    """Every stage, once a frame, after all else it has to say about that frame.

    All times are ``time.monotonic_ns()``. ``sent_ns``: the input left the stage before; ``started_ns`` and
    ``finished_ns``: the step. ``spans``: [name, start_ns, end_ns] of its parts; the rest of the step is messaging.
    """

    KIND: ClassVar[str] = "stage_timing"
    stage: str
    sent_ns: int
    started_ns: int
    finished_ns: int
    spans: list


@dataclass(frozen=True, slots=True)
class StageEnded:
    """The stage has freed the session after EndOfStream or CloseSession. ``frames``: frames it stepped."""

    KIND: ClassVar[str] = "stage_ended"
    stage: str
    frames: int


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """The stage refused or lost one session; others go on. ``error``: what was wrong and what is accepted."""

    KIND: ClassVar[str] = "session_failed"
    stage: str
    error: str


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of a stage's start: ``step`` in words, ``fraction`` in 0..1."""

    KIND: ClassVar[str] = "loading"
    stage: str
    step: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The stage has its weights and is warm.

    ``protocol``: must equal the parent's. ``device``: as MLX prints it. ``memory_bytes``: MLX memory in use.
    ``warnings``: one line each. ``prompt_codes``: (38, Q) codec codes of silence, from the codec only.
    """

    KIND: ClassVar[str] = "ready"
    stage: str
    protocol: int
    pid: int
    device: str
    mlx_version: str
    load_s: float
    warm_up_s: float
    memory_bytes: int
    warnings: list
    prompt_codes: np.ndarray | None = array_field("int32", (None, None), optional=True)


@dataclass(frozen=True, slots=True)
class Beat:
    """Once a second, from a thread of its own: ``busy_since_ns`` (0: idle) finds a stuck step, not a dead process."""

    KIND: ClassVar[str] = "beat"
    stage: str
    busy_since_ns: int
    sessions: int
    rss_bytes: int
    mlx_bytes: int
    mlx_cache_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Last words of a stage that cannot go on. ``expected``: the user can mend it, ``error`` says how."""

    KIND: ClassVar[str] = "failed"
    stage: str
    error: str
    traceback: str
    expected: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """The stage has freed everything and leaves on request."""

    KIND: ClassVar[str] = "stopped"
    stage: str


REPORTS = Codec(
    Opened,
    Transcript,
    Transcribed,
    Tokens,
    AudioFrame,
    StageTiming,
    StageEnded,
    SessionFailed,
    Loading,
    Ready,
    Beat,
    Failed,
    Stopped,
)
