"""The native dialect: JSON messages as docs/realtime.md tabulates them, 16 kHz PCM16 in, 22.05 kHz PCM16 out."""

from __future__ import annotations

import math
from typing import Any

from vcpipe.launch.server.protocol import (
    CLOSE_FAULT,
    Append,
    Cancel,
    Clear,
    Cleared,
    ClientError,
    Command,
    Commit,
    Committed,
    Configure,
    Created,
    CreateResponse,
    JsonObject,
    Notice,
    Phase,
    Ping,
    Pong,
    Timings,
    Updated,
    audio_to_base64,
    is_unicode,
    pcm16_from_base64,
    shown,
    stamped,
    whole_number,
)
from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.schemas.config import check_seed
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry

#: Longest system prompt, in characters. Each of its tokens is a position of the session, taken in before the first frame.
MAX_PROMPT_CHARS = 16_384

_SESSION_FIELDS = frozenset(
    {"type", "model", "system_prompt", "instructions", "seed", "max_streaming_seconds", "timings"}
)
_EVENT_TYPES = {
    "assistant_text_delta": "response.text.delta",
    "function_delta": "response.function.delta",
    "user_transcript_delta": "conversation.item.input_audio_transcription.delta",
    "audio": "response.audio.delta",
    "done": "response.done",
    "cancelled": "response.cancelled",
}


class NativeDialect:
    """Stateless but for the geometry, which is the default one until the session is open."""

    def __init__(self) -> None:
        self._geometry = FrameGeometry()

    # -- client -> commands

    def read(self, message: JsonObject, phase: Phase) -> list[Command]:
        """Commands of one client message. Raises ClientError."""
        kind = message.get("type")
        if kind == "session.ping":
            return [Ping()]
        if kind == "session.update":
            return [self._configure(message, phase)]
        if phase == "configuring":
            raise ClientError("invalid_request", "send session.update before audio", param="type")
        if kind == "input_audio_buffer.append":
            return [self._append(message)]
        if kind == "input_audio_buffer.commit":
            return [Commit(_flag(message, "pad_partial", default=True))]
        if kind == "input_audio_buffer.clear":
            return [Clear()]
        if kind in ("session.cancel", "response.cancel"):
            return [Cancel()]
        if kind == "response.create":
            return [CreateResponse()]
        raise ClientError("invalid_request", f"unsupported event type {shown(kind)}", param="type")

    def _configure(self, message: JsonObject, phase: Phase) -> Configure:
        if phase != "configuring":
            raise ClientError("invalid_request", "the active session cannot be reconfigured")
        session = message.get("session", {})
        if not isinstance(session, dict):
            raise ClientError("invalid_request", "session must be an object", param="session")
        check_type(session, "realtime")
        return Configure(
            system_prompt=_system_prompt(session),
            seed=_seed(session.get("seed", 0)),
            max_streaming_seconds=limit_field(session.get("max_streaming_seconds")),
            model=model_field(session.get("model")),
            timings=_flag(session, "timings", default=False, param="session.timings"),
            ignored=tuple(sorted(name[:80] for name in session.keys() - _SESSION_FIELDS if is_unicode(name)))[:64],
        )

    def _append(self, message: JsonObject) -> Append:
        rate = message.get("sample_rate", self._geometry.input_sample_rate)
        if whole_number(rate) != self._geometry.input_sample_rate:
            text = f"sample_rate must be {self._geometry.input_sample_rate} Hz, not {shown(rate)}; resample first"
            raise ClientError("inference_error", text, param="sample_rate")
        return Append(pcm16_from_base64(message.get("audio")))

    # -- notices -> messages

    def write(self, notice: Notice) -> list[JsonObject]:
        """At most one message a notice."""
        if isinstance(notice, Event):
            return [self._event(notice)]
        if isinstance(notice, ClientError):
            return [error_message(notice)]
        if isinstance(notice, FrameTiming):
            return [self._timing(notice)]
        if isinstance(notice, Created):
            session = {"id": notice.session_id, "type": "realtime", "state": "configuring", **self._formats()}
            return [stamped("session.created", session=session)]
        if isinstance(notice, Updated):
            return [self._updated(notice)]
        if isinstance(notice, Committed):
            return [stamped("input_audio_buffer.committed")]
        if isinstance(notice, Cleared):
            return [stamped("input_audio_buffer.cleared")]
        if isinstance(notice, Pong):
            return [stamped("session.pong")]
        return []

    def _formats(self) -> JsonObject:
        return {
            "input_audio_format": {"type": "pcm16", "sample_rate": self._geometry.input_sample_rate},
            "output_audio_format": {"type": "pcm16", "sample_rate": self._geometry.output_sample_rate},
        }

    def _updated(self, updated: Updated) -> JsonObject:
        self._geometry = updated.geometry
        session = {
            "id": updated.session_id,
            "type": "realtime",
            "state": "ready",
            "model": updated.model,
            "frame_samples": updated.geometry.frame_samples,
            **self._formats(),
            "system_prompt": updated.system_prompt,
            "seed": updated.seed,
            "max_streaming_seconds": updated.max_streaming_seconds,
            "timings": updated.timings,
            "ignored_fields": list(updated.ignored),
        }
        return stamped("session.updated", session=session)

    def _event(self, event: Event) -> JsonObject:
        fields: JsonObject = {"frame_index": event.frame_index}
        if event.kind == "audio":
            assert event.samples is not None and event.audio_codes is not None
            fields |= {
                "delta": audio_to_base64(event.samples),
                "format": "pcm16",
                "sample_rate": event.sample_rate,
                "channels": 1,
                "audio_codes": event.audio_codes.tolist(),
            }
        elif event.kind == "user_transcript_delta":
            fields |= {"delta": event.delta, "transcript": event.text}
        elif event.kind in ("assistant_text_delta", "function_delta"):
            fields |= {"token_id": event.token_id, "delta": event.delta, "text": event.text}
        return stamped(_EVENT_TYPES[event.kind], **fields)

    def _timing(self, timing: FrameTiming) -> JsonObject:
        frame_ms = self._geometry.frame_duration_s * 1e3
        ms = Timings.of(timing, frame_ms)
        return stamped(
            "vcpipe.frame_timing",
            frame_index=ms.frame_index,
            stages={stage: round(value, 3) for stage, value in ms.stages.items()},
            end_to_end_ms=round(ms.end_to_end_ms, 3),
            lateness_ms=round(ms.lateness_ms, 3),
            frame_ms=frame_ms,
        )


def error_message(error: ClientError) -> JsonObject:
    """The ``error`` message."""
    return stamped("error", error=error_fields(error))


def error_fields(error: ClientError) -> JsonObject:
    """``param`` and ``event_id`` are there where they are known."""
    server = error.code == "server_busy" or error.close == CLOSE_FAULT
    fields = {
        "type": "server_error" if server else "invalid_request_error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "event_id": error.event_id,
    }
    return {name: value for name, value in fields.items() if value is not None}


def check_type(session: JsonObject, route: str) -> None:
    """``session.type``, if given, must be that of the route. Raises ClientError."""
    kind = session.get("type")
    if kind not in (None, route):
        where = "with ?intent=transcription a session transcribes, without it it is a conversation"
        raise _refused("type", f'must be "{route}", not {shown(kind)}: {where}')


def _system_prompt(session: JsonObject) -> str | None:
    """``system_prompt``, or ``instructions`` as OpenAI's clients call it."""
    given = {name: session[name] for name in ("system_prompt", "instructions") if session.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str) or not is_unicode(value):
            raise _refused(name, f"must be a string of Unicode text, not {shown(value)}")
        if len(value) > MAX_PROMPT_CHARS:
            raise _refused(name, f"must not be longer than {MAX_PROMPT_CHARS} characters, it has {len(value)}")
    if len(set(given.values())) > 1:
        raise _refused("instructions", "is another name of system_prompt; give one of them")
    return next(iter(given.values()), None)


def _seed(value: Any) -> int:
    seed = whole_number(value)
    try:
        check_seed(-1 if seed is None else seed)
    except ValueError:
        raise _refused("seed", f"must be an integer from 0 to 2**64 - 1, not {shown(value)}") from None
    assert seed is not None
    return seed


def limit_field(value: Any) -> float | None:
    """``session.max_streaming_seconds``. Raises ClientError."""
    if value is None:
        return None
    try:
        limit = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        limit = math.nan
    if not (math.isfinite(limit) and limit > 0):
        raise _refused("max_streaming_seconds", f"must be a positive number of seconds, not {shown(value)}")
    return limit


def model_field(value: Any) -> str | None:
    """``session.model``. Raises ClientError."""
    if value is not None and not isinstance(value, str):
        raise ClientError("invalid_request", f"model must be a string, not {shown(value)}", param="session.model")
    return value


def _flag(fields: JsonObject, name: str, *, default: bool, param: str | None = None) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise ClientError("invalid_request", f"{name} must be true or false, not {shown(value)}", param=param or name)
    return value


def _refused(name: str, what: str) -> ClientError:
    return ClientError("session_initialization_failed", f"{name} {what}", param=f"session.{name}")
