"""What a client may ask of the voice, in a request's body or in a ``session.update``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from vcpipe.launch.server.protocol import ClientError, JsonObject, is_unicode, shown, whole_number
from vcpipe.schemas.config import check_seed
from vcpipe.schemas.geometry import FrameGeometry
from vcpipe.schemas.speech import check_rejected

Format = Literal["wav", "pcm"]

#: Longest text of one request, in characters: OpenAI's limit. Longer texts go over the socket.
MAX_INPUT = 4096

#: Rate of "pcm" where none is asked for: what every client of OpenAI's API plays it at.
_OPENAI_HZ = 24_000

_NOT_1 = (
    "the model speaks at one speed, one text token or pause every 80 ms; stretched sound would be another voice. "
    "Leave speed out, or change it in your player"
)
_FIELDS = frozenset({"model", "input", "response_format", "stream_format", "speed", "seed", "sample_rate"})


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """The body of ``POST /v1/audio/speech``. ``ignored``: names of fields that mean nothing here."""

    text: str
    response_format: Format
    sample_rate: int
    server_sent_events: bool
    seed: int
    ignored: tuple[str, ...]

    @classmethod
    def parse(cls, body: JsonObject, served: str) -> SpeechRequest:
        """Checked. ClientError for the first field that is wrong."""
        check_model(body, served)
        check_voice(body)
        response_format = cast(Format, _one_of(body, "response_format", ("wav", "pcm")))
        stream_format = _one_of(body, "stream_format", ("audio", "sse"))
        native = FrameGeometry().output_sample_rate
        rate = body.get("sample_rate")
        rate = rate if rate is not None else _OPENAI_HZ if response_format == "pcm" else native
        hz = whole_number(rate)
        if hz is None or hz not in (native, _OPENAI_HZ):
            _refuse("sample_rate", f"must be {native} or {_OPENAI_HZ}, not {shown(rate)}")
        text, seed = _input(body), seed_of(body)
        return cls(text, response_format, hz, stream_format == "sse", seed, ignored_of(body, _FIELDS))


def check_model(fields: JsonObject, served: str) -> None:
    """None, or the served one's name."""
    model = fields.get("model")
    if model is not None and model != served:
        _refuse("model", f"must be {served!r}, the one model of this server, or left out; not {shown(model)}")


def check_voice(fields: JsonObject) -> None:
    """What the model cannot do is refused by name, with the reason. There is one voice, so ``voice`` is not looked at."""
    speed = fields.get("speed")
    if speed is not None and (isinstance(speed, bool) or speed != 1):
        _refuse("speed", f"must be 1.0, not {shown(speed)}: {_NOT_1}")
    for name in fields:
        try:
            check_rejected({name: None})
        except ValueError as error:
            raise ClientError("invalid_request", str(error), param=name) from None


def seed_of(fields: JsonObject, default: int = 0) -> int:
    """The seed, a whole number in any form."""
    value = fields.get("seed")
    seed = default if value is None else whole_number(value)
    if seed is None:
        _refuse("seed", f"must be a whole number, not {shown(value)}")
    try:
        check_seed(seed)
    except ValueError as error:
        raise ClientError("invalid_request", str(error), param="seed") from None
    return seed


def ignored_of(fields: JsonObject, known: frozenset[str]) -> tuple[str, ...]:
    """Names of the fields that mean nothing here, as they may be told."""
    return tuple(sorted(name[:80] for name in fields.keys() - known if is_unicode(name)))[:64]


def checked_text(value: Any, param: str) -> str:
    """A string that UTF-8 can carry."""
    if not isinstance(value, str):
        _refuse(param, f"must be a string, not {shown(value)}")
    if not is_unicode(value):
        _refuse(param, "must be valid Unicode; it holds half a surrogate pair")
    return value


def _input(body: JsonObject) -> str:
    text = checked_text(body.get("input"), "input")
    if not text.strip():
        _refuse("input", "must hold something to say")
    if len(text) > MAX_INPUT:
        _refuse("input", f"must have at most {MAX_INPUT} characters, not {len(text)}; send more in several requests")
    return text


def _one_of(body: JsonObject, name: str, accepted: tuple[str, ...]) -> str:
    """A field's value; where it is left out, the first one that is accepted."""
    value = body.get(name)
    if value is None:
        return accepted[0]
    if value not in accepted:
        _refuse(name, f"must be {' or '.join(map(repr, accepted))}, not {shown(value)}")
    return str(value)


def _refuse(name: str, what: str) -> NoReturn:
    raise ClientError("invalid_request", f"{name} {what}", param=name)
