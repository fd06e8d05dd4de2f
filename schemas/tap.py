"""What the tap publishes: copies of every event, timing and change of a session. Topics are listed in docs/tap.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vcpipe.schemas.envelope import Codec, array_field


@dataclass(frozen=True, slots=True)
class TapEvent:
    """Topic ``event.<name>``: an event of a session, see :class:`vcpipe.schemas.events.Event`."""

    KIND: ClassVar[str] = "tap_event"
    name: str
    token_id: int | None = None
    delta: str | None = None
    text: str | None = None
    sample_rate: int | None = None
    samples: np.ndarray | None = array_field("float32", (None,), optional=True)
    audio_codes: np.ndarray | None = array_field("int32", (None,), optional=True)


@dataclass(frozen=True, slots=True)
class TapTiming:
    """Topic ``timing``: one released frame, in monotonic ns. ``stages``: [stage, sent, started, finished, spans]."""

    KIND: ClassVar[str] = "tap_timing"
    due_ns: int
    sent_ns: int
    released_ns: int
    stages: list


@dataclass(frozen=True, slots=True)
class TapSession:
    """Topic ``session``: ``state`` is opened, ended or failed, with the ``error`` that ended it."""

    KIND: ClassVar[str] = "tap_session"
    state: str
    error: str | None = None


TAP = Codec(TapEvent, TapTiming, TapSession)
