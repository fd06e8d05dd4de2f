"""What a client may ask and what a server may say, free of any wire form.

A :class:`Dialect` stands between the wire and a connection and translates both ways: a client's JSON object -> commands
(:data:`Command`), notices (:data:`Notice`) -> JSON objects. The connection knows commands and notices only, so a further
dialect is one more class. ``vcpipe.launch.server.native`` is the protocol of docs/realtime.md.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry
from vcpipe.schemas.pcm import pcm16
from vcpipe.schemas.streaming import TranscriptDelta

JsonObject = dict[str, Any]

ErrorCode = Literal["invalid_request", "server_busy", "session_initialization_failed", "inference_error"]

#: Where a connection stands: nothing accepted yet; a session is being opened; open; input closed by a commit.
Phase = Literal["configuring", "opening", "open", "committed"]

#: Close codes. Ended as asked, a limit passed, the server's fault, come back later.
CLOSE_DONE, CLOSE_LIMIT, CLOSE_FAULT, CLOSE_BUSY = 1000, 1008, 1011, 1013

#: Longest part of a client's message that is repeated to it.
_MAX_ECHO = 200


class ClientError(Exception):
    """Something to tell the client; the connection goes on unless ``close`` names a close code.

    ``param``: the field that was wrong, "session.seed" for instance. ``event_id``: that of the client's message.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        event_id: str | None = None,
        close: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.event_id = event_id
        self.close = close


# ----------------------------------------------------------------------------------------------------- client -> server
@dataclass(frozen=True, slots=True)
class Configure:
    """Open the session. ``max_streaming_seconds``: None, or the client's wish; the server's own limit holds in any case.
    Of a transcription, which has no prompt, seed or timings, it is the limit of a turn.

    ``model``: None or a name, which must be the served one. ``timings``: send a FrameTiming with every frame.
    ``ignored``: names of fields that mean nothing here; they are reported in :class:`Updated`.
    """

    system_prompt: str | None = None
    seed: int = 0
    max_streaming_seconds: float | None = None
    model: str | None = None
    timings: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Append:
    """PCM for the model: (n,) float32 in [-1, 1) at 16 kHz, any n."""

    pcm: np.ndarray


@dataclass(frozen=True, slots=True)
class Commit:
    """No more PCM. ``pad_partial``: samples that fill no frame become one more, padded with zeros; else they are dropped.
    Of a transcription it ends a turn, and all its samples are heard.
    """

    pad_partial: bool = True


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget the PCM that was not handed to the model yet; of a transcription, the turn that was not committed."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop everything at once and end."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with a Pong, before anything else."""


@dataclass(frozen=True, slots=True)
class CreateResponse:
    """Ask for an answer. The model is always on, so nothing has to be done."""


Command = Configure | Append | Commit | Clear | Cancel | Ping | CreateResponse


# ----------------------------------------------------------------------------------------------------- server -> client
@dataclass(frozen=True, slots=True)
class Created:
    """First notice of a connection that was admitted."""

    session_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Updated:
    """The session is open, with these values in effect."""

    session_id: str
    model: str
    system_prompt: str | None
    seed: int
    max_streaming_seconds: float
    timings: bool
    geometry: FrameGeometry
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """The input is closed; what is left follows, ``done`` last."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """PCM that waited was forgotten."""


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to Ping."""


@dataclass(frozen=True, slots=True)
class ResponseRequested:
    """A CreateResponse was taken."""


@dataclass(frozen=True, slots=True)
class TranscriptionReady:
    """A transcription is open, with these values in effect. ``max_turn_seconds``: most audio of a turn."""

    session_id: str
    model: str
    max_turn_seconds: float
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnBegan:
    """The first audio of a turn of a transcription came. ``previous_id``: of the turn before, None for the first."""

    item_id: str
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """No more audio of this turn; its text is on its way."""

    item_id: str
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class TurnText:
    """Text to append to a turn's."""

    item_id: str
    delta: TranscriptDelta


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A committed turn is transcribed. ``frames``: of the encoder; ``seconds``: of its audio."""

    item_id: str
    previous_id: str | None
    transcript: str
    frames: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """A turn has no text, or only the part that was told."""

    item_id: str
    error: ClientError


Notice = (
    Created
    | Updated
    | Committed
    | Cleared
    | Pong
    | ResponseRequested
    | ClientError
    | Event
    | FrameTiming
    | TranscriptionReady
    | TurnBegan
    | TurnCommitted
    | TurnText
    | TurnDone
    | TurnFailed
)


class Dialect(Protocol):
    """One connection's translator; may keep state (resamplers, item ids). Called on the event loop only."""

    def read(self, message: JsonObject, phase: Phase) -> list[Command]:
        """Commands of one client message, in order; raises ClientError.

        ``phase`` is "configuring" until a Configure was taken; Configure must not be returned in another phase. The
        error's ``event_id`` is filled in by the caller.
        """

    def write(self, notice: Notice) -> list[JsonObject]:
        """Messages that tell the client of ``notice``, none where the dialect has no word for it."""


# -------------------------------------------------------------------------------------------------------------- helpers
def parse_message(text: str) -> JsonObject:
    """The JSON object of one text message; raises ClientError."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ClientError("invalid_request", "message must be a JSON object")
    return message


def event_id_of(message: JsonObject) -> str | None:
    """The client's own id of its message, where it can be given back."""
    event_id = message.get("event_id")
    if isinstance(event_id, str) and len(event_id) <= _MAX_ECHO and is_unicode(event_id):
        return event_id
    return None


def is_unicode(text: str) -> bool:
    r"""False for a string that no UTF-8 can carry: JSON's "\ud800" is half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """A client's value as it may be repeated in an error message."""
    text = ascii(value)
    return text if len(text) <= _MAX_ECHO else text[: _MAX_ECHO - 3] + "..."


def stamped(kind: str, **fields: Any) -> JsonObject:
    """A server message of type ``kind`` with an id of its own."""
    return {"type": kind, "event_id": f"event_{secrets.token_hex(8)}", **fields}


def pcm16_from_base64(audio: Any) -> np.ndarray:
    """Base64 of little-endian PCM16 -> (n,) float32, divided by 32768. Strict: raises ClientError."""
    try:
        data = base64.b64decode(audio, validate=True) if isinstance(audio, str) else None
    except (ValueError, binascii.Error):
        data = None
    if data is None:
        raise ClientError("inference_error", "audio must be valid base64 PCM16", param="audio")
    if len(data) % 2:
        text = f"audio must hold whole 16-bit samples; {len(data)} bytes are an odd number, nothing of them was taken"
        raise ClientError("inference_error", text, param="audio")
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


def audio_to_base64(samples: np.ndarray) -> str:
    """Float samples -> base64 of little-endian PCM16, clipped, times 32767, rounded half to even."""
    return base64.b64encode(pcm16(samples)).decode("ascii")


def whole_number(value: Any) -> int | None:
    """An int, a float without a fraction, or a string of an int; else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and len(value) <= 32:
        try:
            return int(value)
        except ValueError:
            return None
    return None


@dataclass(frozen=True, slots=True)
class Timings:
    """A frame's way in milliseconds: each stage's step, from sent to released, and how late it was."""

    frame_index: int
    stages: dict[str, float] = field(default_factory=dict)
    end_to_end_ms: float = 0.0
    lateness_ms: float = 0.0

    @classmethod
    def of(cls, timing: FrameTiming, frame_ms: float) -> Timings:
        """Of one frame; late is what a frame took beyond its own length."""
        stages = {stage: (t.finished_ns - t.started_ns) / 1e6 for stage, t in timing.stages.items()}
        end_to_end = (timing.released_ns - timing.sent_ns) / 1e6
        lateness = max(0.0, (timing.released_ns - timing.due_ns) / 1e6 - frame_ms)
        return cls(timing.frame_index, stages, end_to_end, lateness)
