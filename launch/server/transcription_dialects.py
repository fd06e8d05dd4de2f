"""Transcription on the wire: one set of messages, with the session as the native dialect or as OpenAI's API describes it.

The messages of turns are those of OpenAI's Realtime API, with the frame and the times of a text beside it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vcpipe.launch.audio_io import RATES
from vcpipe.launch.language import SPOKEN, check_language
from vcpipe.launch.server.native import check_type, error_fields, error_message, limit_field, model_field
from vcpipe.launch.server.protocol import (
    Append,
    Cancel,
    Clear,
    Cleared,
    ClientError,
    Command,
    Commit,
    Configure,
    Created,
    JsonObject,
    Notice,
    Phase,
    Ping,
    Pong,
    TranscriptionReady,
    TurnBegan,
    TurnCommitted,
    TurnDone,
    TurnFailed,
    TurnText,
    is_unicode,
    pcm16_from_base64,
    shown,
    stamped,
    whole_number,
)
from vcpipe.launch.talk.resample import Resampler
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry

_SESSION_FIELDS = frozenset({"type", "model", "language", "max_streaming_seconds", "input_audio_format", "audio"})
_INPUT_FIELDS = frozenset({"format", "transcription", "turn_detection"})
_TRANSCRIPTION_FIELDS = frozenset({"model", "language"})
#: What opens the session with every default, where it may.
_OPENING = frozenset({"input_audio_buffer.append", "input_audio_buffer.commit"})
_OF_TRANSCRIPTION = "conversation.item.input_audio_transcription"


class TranscriptionDialect:
    """One connection's translator: reads both ways of describing a session, and resamples each turn from the declared rate."""

    #: Rate of the client's PCM in Hz where it declares none.
    default_rate: ClassVar[int]
    #: Whether audio without a session.update opens the session.
    opens_by_audio: ClassVar[bool]

    def __init__(self) -> None:
        self._rate = self.default_rate
        self._ear = self._resampler()
        self._update_asked = True

    def _resampler(self) -> Resampler:
        return Resampler(self._rate, FrameGeometry().input_sample_rate)

    # -- client -> commands

    def read(self, message: JsonObject, phase: Phase) -> list[Command]:
        """Commands of one client message. Raises ClientError."""
        kind = message.get("type")
        if kind == "session.ping":
            return [Ping()]
        if kind == "session.update":
            return [self._configure(message, phase)]
        if phase == "configuring":
            if not self.opens_by_audio or kind not in _OPENING:
                raise ClientError("invalid_request", "send session.update before audio", param="type")
            self._update_asked = False
            return [Configure(), *self.read(message, "opening")]
        if kind == "input_audio_buffer.append":
            self._check_append(message)
            return [Append(self._ear.push(pcm16_from_base64(message.get("audio"))))]
        if kind == "input_audio_buffer.commit":
            return [Append(self._ear.finish()), Commit()]
        if kind == "input_audio_buffer.clear":
            self._ear.clear()
            return [Clear()]
        if kind in ("session.cancel", "response.cancel"):
            return [Cancel()]
        raise ClientError("invalid_request", f"unsupported event type {shown(kind)} in a transcription", param="type")

    def _check_append(self, message: JsonObject) -> None:
        rate = message.get("sample_rate", self._rate)
        if whole_number(rate) != self._rate:
            text = f"sample_rate must be the session's, {self._rate} Hz, not {shown(rate)}; session.update declares it"
            raise ClientError("inference_error", text, param="sample_rate")

    def _configure(self, message: JsonObject, phase: Phase) -> Configure:
        if phase != "configuring":
            raise ClientError("invalid_request", "the active session cannot be reconfigured")
        session = message.get("session", {})
        if not isinstance(session, dict):
            raise ClientError("invalid_request", "session must be an object", param="session")
        check_type(session, "transcription")
        audio = _object(session, "audio")
        heard = _object(audio, "input", "audio.input")
        transcription = _object(heard, "transcription", "audio.input.transcription")
        for fields, name in ((session, "language"), (transcription, "audio.input.transcription.language")):
            _check_language(fields.get("language"), name)
        if heard.get("turn_detection") is not None:
            raise _refused(
                "audio.input.turn_detection",
                "must be null: turns end by input_audio_buffer.commit",
                heard["turn_detection"],
            )
        rate = self._declared_rate(session.get("input_audio_format"), heard.get("format"))
        configure = Configure(
            max_streaming_seconds=limit_field(session.get("max_streaming_seconds")),
            model=model_field(session.get("model") or transcription.get("model")),
            ignored=_ignored(session, audio, heard, transcription),
        )
        if rate != self._rate:
            self._rate = rate
            self._ear = self._resampler()
        self._update_asked = True
        return configure

    def _declared_rate(self, native: Any, openai: Any) -> int:
        """``{"type": "pcm16", "sample_rate": n}``, or OpenAI's ``{"type": "audio/pcm", "rate": n}``."""
        rates = []
        for name, given, kind, key in (
            ("input_audio_format", native, "pcm16", "sample_rate"),
            ("audio.input.format", openai, "audio/pcm", "rate"),
        ):
            if given is None:
                continue
            fields = given if isinstance(given, dict) else {"type": given}
            rate = whole_number(fields.get(key, self.default_rate))
            if fields.get("type", kind) != kind or rate is None or not RATES[0] <= rate <= RATES[1]:
                wanted = f'must be {{"type": "{kind}", "{key}": Hz from {RATES[0]} to {RATES[1]}}}'
                raise _refused(name, wanted, given)
            rates.append(rate)
        if len(set(rates)) > 1:
            raise _refused("audio.input.format", "must agree with input_audio_format", openai)
        return rates[0] if rates else self.default_rate

    # -- notices -> messages

    def write(self, notice: Notice) -> list[JsonObject]:
        """Messages of a notice."""
        if isinstance(notice, TurnText):
            return [self._text(notice)]
        if isinstance(notice, ClientError):
            return [error_message(notice)]
        if isinstance(notice, Created):
            return [stamped("session.created", session=self._session(notice.session_id, notice.model, "configuring"))]
        if isinstance(notice, TranscriptionReady):
            return [stamped("session.updated", session=self._updated(notice))] if self._update_asked else []
        if isinstance(notice, TurnBegan):
            item = _item(notice.item_id, "in_progress", None)
            return [stamped("conversation.item.added", previous_item_id=notice.previous_id, item=item)]
        if isinstance(notice, TurnCommitted):
            ids = {"item_id": notice.item_id, "previous_item_id": notice.previous_id}
            return [stamped("input_audio_buffer.committed", **ids)]
        if isinstance(notice, TurnDone):
            return self._done(notice)
        if isinstance(notice, TurnFailed):
            error = error_fields(notice.error)
            return [stamped(f"{_OF_TRANSCRIPTION}.failed", item_id=notice.item_id, content_index=0, error=error)]
        if isinstance(notice, Cleared):
            return [stamped("input_audio_buffer.cleared")]
        if isinstance(notice, Pong):
            return [stamped("session.pong")]
        if isinstance(notice, Event) and notice.kind == "cancelled":
            return [stamped("response.cancelled", frame_index=notice.frame_index)]
        return []

    def _session(self, session_id: str, model: str, state: str) -> JsonObject:
        raise NotImplementedError

    def _updated(self, ready: TranscriptionReady) -> JsonObject:
        return {
            **self._session(ready.session_id, ready.model, "ready"),
            "max_streaming_seconds": ready.max_turn_seconds,
            "ignored_fields": list(ready.ignored),
        }

    def _text(self, said: TurnText) -> JsonObject:
        delta = said.delta
        times = {"start_s": round(delta.start_s, 3), "end_s": round(delta.end_s, 3)}
        fields = {"item_id": said.item_id, "content_index": 0, "delta": delta.text, "frame_index": delta.frame_index}
        return stamped(f"{_OF_TRANSCRIPTION}.delta", **fields, **times)

    def _done(self, done: TurnDone) -> list[JsonObject]:
        completed = stamped(
            f"{_OF_TRANSCRIPTION}.completed",
            item_id=done.item_id,
            content_index=0,
            transcript=done.transcript,
            frame_index=done.frames,
            usage={"type": "duration", "seconds": round(done.seconds, 3)},
        )
        item = _item(done.item_id, "completed", done.transcript)
        return [completed, stamped("conversation.item.done", previous_item_id=done.previous_id, item=item)]


class NativeTranscription(TranscriptionDialect):
    """16 kHz unless another rate is declared; a session.update comes first."""

    default_rate = 16000
    opens_by_audio = False

    def _session(self, session_id: str, model: str, state: str) -> JsonObject:
        return {
            "id": session_id,
            "type": "transcription",
            "state": state,
            "model": model,
            "language": SPOKEN,
            "input_audio_format": {"type": "pcm16", "sample_rate": self._rate},
        }


class OpenAITranscription(TranscriptionDialect):
    """24 kHz unless another rate is declared; the session is there from the first moment on."""

    default_rate = 24000
    opens_by_audio = True

    def _session(self, session_id: str, model: str, state: str) -> JsonObject:
        heard = {
            "format": {"type": "audio/pcm", "rate": self._rate},
            "transcription": {"model": model, "language": SPOKEN},
            "noise_reduction": None,
            "turn_detection": None,
        }
        return {
            "id": session_id,
            "type": "transcription",
            "object": "realtime.transcription_session",
            "audio": {"input": heard},
        }


def _item(item_id: str, status: str, transcript: str | None) -> JsonObject:
    return {
        "object": "realtime.item",
        "type": "message",
        "id": item_id,
        "role": "user",
        "status": status,
        "content": [{"type": "input_audio", "transcript": transcript}],
    }


def _object(fields: JsonObject, name: str, path: str | None = None) -> JsonObject:
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise _refused(path or name, "must be an object", value)
    return value or {}


def _check_language(value: Any, name: str) -> None:
    try:
        check_language(value)
    except ValueError as error:
        raise ClientError("session_initialization_failed", str(error), param=f"session.{name}") from None


def _ignored(session: JsonObject, audio: JsonObject, heard: JsonObject, transcription: JsonObject) -> tuple[str, ...]:
    """Names of fields that mean nothing here."""
    known = (
        ("", session, _SESSION_FIELDS),
        ("audio.", audio, frozenset({"input"})),
        ("audio.input.", heard, _INPUT_FIELDS),
        ("audio.input.transcription.", transcription, _TRANSCRIPTION_FIELDS),
    )
    names = [
        path + name[:80]
        for path, fields, read in known
        for name in sorted(fields.keys() - read)
        if is_unicode(name) and fields[name] is not None
    ]
    return tuple(names)[:64]


def _refused(name: str, what: str, value: Any) -> ClientError:
    return ClientError("session_initialization_failed", f"{name} {what}, not {shown(value)}", param=f"session.{name}")
