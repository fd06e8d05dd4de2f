"""In-order data of a session: coordinator -> perception -> language -> tts -> codec, or a part of this way.

Whatever opens, feeds or ends a session travels on these pipes and therefore cannot overtake anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vcpipe.schemas.envelope import Codec, array_field
from vcpipe.schemas.geometry import STAGES


@dataclass(frozen=True, slots=True)
class OpenSession:
    """coordinator -> every stage of the route in turn: create the state of a session.

    ``offline``: compute over the whole waveform instead of frame by frame.
    ``system_prompt``: None takes the checkpoint's default. ``seed``: of the speech decoder's random numbers.
    ``use_language_cache`` / ``use_perception_cache``: diagnostic switches, see SessionOptions.
    ``max_frames``: offline only, truncates the encoder's output. ``prompt_codes``: (38, Q) codec codes of silence, known
    from the codec's Ready. ``prompt_positions``: timeline positions of the prompt, filled in by language.
    ``route``: the stages that the session visits, consecutive ones; no other stage hears of it. ``task``: what
    for, and with it the kind of session that these stages open: "voice_chat", "transcription" or "speech".
    """

    KIND: ClassVar[str] = "open_session"
    offline: bool = False
    system_prompt: str | None = None
    seed: int = 0
    use_language_cache: bool = True
    use_perception_cache: bool = True
    max_frames: int | None = None
    prompt_positions: int = 0
    prompt_codes: np.ndarray | None = array_field("int32", (None, None), optional=True)
    route: tuple[str, ...] = STAGES
    task: str = "voice_chat"


@dataclass(frozen=True, slots=True)
class PcmFrame:
    """coordinator -> perception: float32 mono PCM in [-1, 1] at 16 kHz, one frame (offline: any number of samples)."""

    KIND: ClassVar[str] = "pcm_frame"
    samples: np.ndarray = array_field("float32", (None,))


@dataclass(frozen=True, slots=True)
class Projected:
    """perception -> language: one encoder frame in language-model space, (1, 1, hidden) float32."""

    KIND: ClassVar[str] = "projected"
    projected: np.ndarray = array_field("float32", (1, 1, None))


@dataclass(frozen=True, slots=True)
class TextStep:
    """language -> tts: the assistant's text id of one audio frame."""

    KIND: ClassVar[str] = "text_step"
    text_id: int


@dataclass(frozen=True, slots=True)
class Codes:
    """tts -> codec: the codes of one audio frame, (Q,) int32, control codes not yet replaced."""

    KIND: ClassVar[str] = "codes"
    codes: np.ndarray = array_field("int32", (None,))


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """coordinator -> every stage of the route in turn: no more frames; finish, report StageEnded and free the session."""

    KIND: ClassVar[str] = "end_of_stream"


@dataclass(frozen=True, slots=True)
class CloseSession:
    """coordinator -> every stage of the route in turn: last message of a cancelled session; free it, report StageEnded."""

    KIND: ClassVar[str] = "close_session"


DATA = Codec(OpenSession, PcmFrame, Projected, TextStep, Codes, EndOfStream, CloseSession)
