"""The dialect of OpenAI's Realtime API, for its clients: 24 kHz PCM16 both ways, its names, and one response without end.

The model listens and speaks at once, so a session holds one user item, which is all that was heard, and one response with one
assistant item, which is all that was said. The response begins with the first frame that comes out and ends with the session.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from vcpipe.launch.server.native import NativeDialect, error_message
from vcpipe.launch.server.protocol import (
    Append,
    ClientError,
    Command,
    Committed,
    Configure,
    Created,
    JsonObject,
    Notice,
    Phase,
    Updated,
    audio_to_base64,
    pcm16_from_base64,
    shown,
    stamped,
    whole_number,
)
from vcpipe.launch.talk.resample import Resampler
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry

#: Sample rate of OpenAI's PCM in Hz, both ways.
RATE_HZ = 24000

_FORMAT = {"type": "audio/pcm", "rate": RATE_HZ}
#: Fields that this dialect reads beside those of the native one.
_READ_HERE = frozenset({"audio", "output_modalities"})
#: Fields of ``audio.input`` and ``audio.output`` that mean nothing here.
_IGNORED = ("noise_reduction", "transcription", "turn_detection", "speed", "voice")
#: What opens the session with every default: OpenAI's is there from the first moment on.
_OPENING = frozenset({"input_audio_buffer.append", "response.create"})

Status = Literal["completed", "cancelled", "failed"]


class OpenAIDialect:
    """One connection's translator. What both dialects share it leaves to the native one."""

    def __init__(self) -> None:
        self._native = NativeDialect()
        self._ear = Resampler(RATE_HZ, FrameGeometry().input_sample_rate)
        self._conversation = _Conversation()
        self._update_asked = False

    # -- client -> commands

    def read(self, message: JsonObject, phase: Phase) -> list[Command]:
        """Commands of one client message. Raises ClientError."""
        kind = message.get("type")
        if kind == "session.update":
            return [self._configure(message, phase)]
        if kind == "response.cancel":
            self._conversation.check_cancel(message.get("response_id"))
        if phase == "configuring" and kind in _OPENING:
            self._update_asked = False
            return [Configure(), *self.read(message, "opening")]
        if kind == "input_audio_buffer.append":
            return [Append(self._ear.push(pcm16_from_base64(message.get("audio"))))]
        commands = self._native.read(message, phase)
        if kind == "input_audio_buffer.clear":
            self._ear.clear()
        elif kind == "input_audio_buffer.commit":
            commands = self._with_rest(commands)
        return commands

    def _configure(self, message: JsonObject, phase: Phase) -> Configure:
        (command,) = self._native.read(message, phase)
        assert isinstance(command, Configure)
        session = message.get("session", {})
        _check(session)
        self._update_asked = True
        ignored = [name for name in command.ignored if name not in _READ_HERE]
        return replace(command, ignored=(*ignored, *_ignored_audio(session)))

    def _with_rest(self, commands: list[Command]) -> list[Command]:
        """What the resampler still holds goes before the commit."""
        rest = self._ear.finish()
        return [Append(rest), *commands] if len(rest) else commands

    # -- notices -> messages

    def write(self, notice: Notice) -> list[JsonObject]:
        """Messages of a notice, in the order of OpenAI's."""
        if isinstance(notice, Event):
            return self._conversation.take(notice)
        if isinstance(notice, ClientError):
            lost = self._conversation.fail(notice) if notice.close is not None else []
            return [error_message(notice), *lost]
        if isinstance(notice, Created):
            return [stamped("session.created", session=_session(notice.session_id, notice.model))]
        if isinstance(notice, Updated):
            return [stamped("session.updated", session=_updated(notice))] if self._update_asked else []
        if isinstance(notice, Committed):
            return self._conversation.commit()
        # Cleared and Pong are the same words here; timings and requests have none.
        return [message for message in self._native.write(notice) if not message["type"].startswith("vcpipe.")]


# ------------------------------------------------------------------------------------------------------------- the session
def _session(session_id: str, model: str) -> JsonObject:
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": session_id,
        "model": model,
        "output_modalities": ["audio"],
        "audio": {"input": {"format": _FORMAT, "turn_detection": None}, "output": {"format": _FORMAT}},
    }


def _updated(updated: Updated) -> JsonObject:
    return {
        **_session(updated.session_id, updated.model),
        "instructions": updated.system_prompt,
        "seed": updated.seed,
        "max_streaming_seconds": updated.max_streaming_seconds,
        "ignored_fields": list(updated.ignored),
    }


def _check(session: JsonObject) -> None:
    """Refuse what would make a client play or send something else than it believes."""
    modalities = session.get("output_modalities")
    if modalities not in (None, ["audio"]):
        raise _refused("output_modalities", 'must be ["audio"], which has its transcript with it', modalities)
    for way, fields in _audio(session).items():
        given = fields.get("format")
        if given is None:
            continue
        of_pcm = isinstance(given, dict) and given.get("type") == _FORMAT["type"]
        if not of_pcm or whole_number(given.get("rate", RATE_HZ)) != RATE_HZ:
            raise _refused(f"audio.{way}.format", f'must be {{"type": "audio/pcm", "rate": {RATE_HZ}}}', given)


def _audio(session: JsonObject) -> dict[str, JsonObject]:
    """``session.audio``'s input and output."""
    audio = session.get("audio")
    if audio is None:
        return {}
    if not isinstance(audio, dict):
        raise _refused("audio", "must be an object", audio)
    ways: dict[str, JsonObject] = {}
    for way in ("input", "output"):
        fields = audio.get(way)
        if fields is not None and not isinstance(fields, dict):
            raise _refused(f"audio.{way}", "must be an object", fields)
        ways[way] = fields or {}
    return ways


def _ignored_audio(session: JsonObject) -> list[str]:
    ways = _audio(session).items()
    return [f"audio.{way}.{name}" for way, fields in ways for name in _IGNORED if fields.get(name) is not None]


def _refused(name: str, what: str, value: Any) -> ClientError:
    text = f"{name} {what}, not {shown(value)}"
    return ClientError("session_initialization_failed", text, param=f"session.{name}")


# -------------------------------------------------------------------------------------------------- the user and the response
class GrowingText:
    """Deltas of a text that comes as a whole each time, cut between characters.

    A text ends in U+FFFD while its last character is unfinished; that is held back until it is known what it becomes.
    """

    def __init__(self) -> None:
        self.said = ""
        self._text = ""

    def push(self, text: str) -> str:
        """What to append to all deltas so far, perhaps nothing."""
        self._text = text
        return self._say(text.rstrip("\ufffd"))

    def finish(self) -> str:
        """What was held back: nothing completes it any more."""
        return self._say(self._text)

    def _say(self, text: str) -> str:
        delta = text[len(self.said) :]
        self.said += delta
        return delta


class _Conversation:
    """The user's item and the response, and the messages of their lives."""

    def __init__(self) -> None:
        self._response_id = _new_id("resp")
        self._user_id = _new_id("item")
        self._assistant_id = _new_id("item")
        self._state: Literal["none", "in_progress", "ended"] = "none"
        self._user_is_there = False
        self._heard = GrowingText()
        self._spoken = GrowingText()
        self._voice: Resampler | None = None
        self._seconds_heard = 0.0

    def take(self, event: Event) -> list[JsonObject]:
        """A session's event. The function channel has no word: it names no function to call."""
        if event.kind == "user_transcript_delta":
            return [*self._add_user(), *self._hear(self._heard.push(event.text or ""))]
        if event.kind == "assistant_text_delta":
            return [*self._begin(), *self._tell(self._spoken.push(event.text or ""))]
        if event.kind == "audio":
            return [*self._begin(), *self._speak(event)]
        if event.kind == "done":
            return self._end("completed", None)
        if event.kind == "cancelled":
            return self._end("cancelled", {"type": "cancelled", "reason": "client_cancelled"})
        return []

    def commit(self) -> list[JsonObject]:
        """The input was closed."""
        added = self._add_user()
        return [stamped("input_audio_buffer.committed", item_id=self._user_id, previous_item_id=None), *added]

    def fail(self, error: ClientError) -> list[JsonObject]:
        """The session was lost; a response that was begun is always ended."""
        if self._state != "in_progress":
            return []
        kind = error_message(error)["error"]["type"]
        return self._end("failed", {"type": "failed", "error": {"type": kind, "code": error.code}})

    def check_cancel(self, response_id: Any) -> None:
        """Raises ClientError where there is no such response to cancel."""
        if self._state != "in_progress":
            raise ClientError("invalid_request", "there is no response in progress to cancel")
        if response_id not in (None, self._response_id):
            text = f"response {shown(response_id)} is not in progress; {self._response_id} is"
            raise ClientError("invalid_request", text, param="response_id")

    # -- the user

    def _add_user(self) -> list[JsonObject]:
        if self._user_is_there:
            return []
        self._user_is_there = True
        item = self._user("in_progress", None)
        return [stamped("conversation.item.added", previous_item_id=None, item=item)]

    def _user(self, status: str, transcript: str | None) -> JsonObject:
        content = [{"type": "input_audio", "transcript": transcript}]
        return _item(self._user_id, "user", status, content)

    def _hear(self, delta: str) -> list[JsonObject]:
        if not delta:
            return []
        kind = "conversation.item.input_audio_transcription.delta"
        return [stamped(kind, item_id=self._user_id, content_index=0, delta=delta)]

    def _end_user(self) -> list[JsonObject]:
        rest = self._hear(self._heard.finish())
        heard = self._heard.said.strip()
        completed = stamped(
            "conversation.item.input_audio_transcription.completed",
            item_id=self._user_id,
            content_index=0,
            transcript=heard,
            usage={"type": "duration", "seconds": round(self._seconds_heard, 3)},
        )
        item = self._user("completed", heard)
        return [*rest, completed, stamped("conversation.item.done", previous_item_id=None, item=item)]

    # -- the response

    def _begin(self) -> list[JsonObject]:
        if self._state != "none":
            return []
        self._state = "in_progress"
        item = self._assistant("in_progress", [])
        return [
            *self._add_user(),
            stamped("response.created", response=self._response("in_progress", [], None)),
            self._of_item("response.output_item.added", item),
            stamped("conversation.item.added", previous_item_id=self._user_id, item=item),
            self._of_part("response.content_part.added", part={"type": "audio", "transcript": ""}),
        ]

    def _tell(self, delta: str) -> list[JsonObject]:
        return [self._of_part("response.output_audio_transcript.delta", delta=delta)] if delta else []

    def _speak(self, event: Event) -> list[JsonObject]:
        assert event.samples is not None and event.sample_rate is not None
        if self._voice is None:
            self._voice = Resampler(event.sample_rate, RATE_HZ)
        self._seconds_heard += len(event.samples) / event.sample_rate
        return self._sound(self._voice.push(event.samples))

    def _sound(self, samples: np.ndarray) -> list[JsonObject]:
        return [self._of_part("response.output_audio.delta", delta=audio_to_base64(samples))] if len(samples) else []

    def _end(self, status: Status, details: JsonObject | None) -> list[JsonObject]:
        messages = self._begin()
        self._state = "ended"
        if status == "completed":
            messages += self._tell(self._spoken.finish())
            if self._voice is not None:
                messages += self._sound(self._voice.finish())
        said = self._spoken.said
        content = [{"type": "output_audio", "transcript": said}]
        item = self._assistant("completed" if status == "completed" else "incomplete", content)
        return [
            *messages,
            *self._end_user(),
            self._of_part("response.output_audio.done"),
            self._of_part("response.output_audio_transcript.done", transcript=said),
            self._of_part("response.content_part.done", part={"type": "audio", "transcript": said}),
            stamped("conversation.item.done", previous_item_id=self._user_id, item=item),
            self._of_item("response.output_item.done", item),
            stamped("response.done", response=self._response(status, [item], details)),
        ]

    def _response(self, status: str, output: list[JsonObject], details: JsonObject | None) -> JsonObject:
        return {
            "object": "realtime.response",
            "id": self._response_id,
            "status": status,
            "status_details": details,
            "output": output,
            "output_modalities": ["audio"],
            "audio": {"output": {"format": _FORMAT}},
        }

    def _assistant(self, status: str, content: list[JsonObject]) -> JsonObject:
        return _item(self._assistant_id, "assistant", status, content)

    def _of_item(self, kind: str, item: JsonObject) -> JsonObject:
        return stamped(kind, response_id=self._response_id, output_index=0, item=item)

    def _of_part(self, kind: str, **fields: Any) -> JsonObject:
        ids = {"response_id": self._response_id, "item_id": self._assistant_id, "output_index": 0, "content_index": 0}
        return stamped(kind, **ids, **fields)


def _item(item_id: str, role: str, status: str, content: list[JsonObject]) -> JsonObject:
    return {
        "object": "realtime.item",
        "type": "message",
        "id": item_id,
        "role": role,
        "status": status,
        "content": content,
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(8)}"
