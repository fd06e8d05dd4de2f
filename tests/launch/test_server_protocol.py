"""The native dialect: every message, its fields, and what is wrong with those that are refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from vcpipe.launch.server.native import MAX_PROMPT_CHARS, NativeDialect
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
    Ping,
    Pong,
    ResponseRequested,
    Updated,
    audio_to_base64,
    event_id_of,
    parse_message,
    pcm16_from_base64,
)
from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry
from vcpipe.schemas.reports import StageTiming

SILENCE = base64.b64encode(bytes(2560)).decode()


def read(kind: Any, phase: Any = "open", **fields: Any) -> Command:
    (command,) = NativeDialect().read({"type": kind, **fields}, phase)
    return command


def refused(kind: Any, phase: Any = "open", **fields: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        read(kind, phase, **fields)
    return caught.value


def update(**session: Any) -> Configure:
    command = read("session.update", "configuring", session=session)
    assert isinstance(command, Configure)
    return command


def update_refused(**session: Any) -> ClientError:
    return refused("session.update", "configuring", session=session)


def write(notice: Any) -> dict[str, Any]:
    (message,) = NativeDialect().write(notice)
    assert message.pop("event_id").startswith("event_")
    json.dumps(message)
    return message


# -------------------------------------------------------------------------------------------------------------------- PCM
def test_pcm16_round_trip() -> None:
    values = np.array([0, 1, -1, 255, -32768, 32767], "<i2")
    samples = pcm16_from_base64(base64.b64encode(values.tobytes()).decode())
    assert samples.dtype == np.float32
    np.testing.assert_array_equal(samples, values / np.float32(32768))
    encoded = base64.b64decode(audio_to_base64(np.array([0.5, -0.5, 1.5, -1.5, 0.0], np.float32)))
    assert np.frombuffer(encoded, "<i2").tolist() == [16384, -16384, 32767, -32767, 0]


@pytest.mark.parametrize("size", [1, 2559, 2561])
def test_odd_byte_count_rejected(size: int) -> None:
    error = refused("input_audio_buffer.append", audio=base64.b64encode(bytes(size)).decode())
    assert (error.code, error.param) == ("inference_error", "audio")
    assert str(size) in error.message


@pytest.mark.parametrize("audio", ["AAA*A==", "AAA", "A A=", "AA==\n", "ÄÄÄÄ", None, 5, [], {}, True])
def test_base64_is_strict(audio: Any) -> None:
    error = refused("input_audio_buffer.append", audio=audio)
    assert (error.code, error.message) == ("inference_error", "audio must be valid base64 PCM16")


def test_audio_that_is_missing_and_audio_that_is_empty() -> None:
    assert refused("input_audio_buffer.append").message == "audio must be valid base64 PCM16"
    command = read("input_audio_buffer.append", audio="")
    assert isinstance(command, Append) and len(command.pcm) == 0


@pytest.mark.parametrize("rate", [16000, 16000.0, "16000"])
def test_sample_rate_in_whole_numbers(rate: Any) -> None:
    command = read("input_audio_buffer.append", audio=SILENCE, sample_rate=rate)
    assert isinstance(command, Append) and len(command.pcm) == 1280


@pytest.mark.parametrize("rate", [24000, 8000, -1, 0, None, 16000.5, "24000", "16 kHz", True, [], float("nan")])
def test_other_sample_rates_are_refused(rate: Any) -> None:
    error = refused("input_audio_buffer.append", audio=SILENCE, sample_rate=rate)
    assert (error.code, error.param) == ("inference_error", "sample_rate")
    assert "16000 Hz" in error.message


# --------------------------------------------------------------------------------------------------------------- messages
def test_every_message_of_a_client() -> None:
    assert read("session.ping") == Ping()
    assert read("input_audio_buffer.commit") == Commit(pad_partial=True)
    assert read("input_audio_buffer.commit", pad_partial=False) == Commit(pad_partial=False)
    assert read("input_audio_buffer.clear") == Clear()
    assert read("session.cancel") == read("response.cancel") == Cancel()
    assert read("response.create", response={"anything": 1}) == CreateResponse()


@pytest.mark.parametrize(
    "kind", ["input_audio_buffer.append", "input_audio_buffer.commit", "session.cancel", "nonsense", None, 5, ["a"]]
)
def test_all_but_update_and_ping_need_a_session(kind: Any) -> None:
    error = refused(kind, "configuring")
    assert (error.code, error.message) == ("invalid_request", "send session.update before audio")
    assert read("session.ping", "configuring") == Ping()


@pytest.mark.parametrize("kind", ["conversation.item.create", "nonsense", None, 5, ["a"], "x" * 1000])
def test_unknown_types_are_named(kind: Any) -> None:
    error = refused(kind)
    assert error.code == "invalid_request"
    assert error.message.startswith("unsupported event type ") and len(error.message) < 250


@pytest.mark.parametrize("phase", ["opening", "open", "committed"])
def test_a_session_is_configured_once(phase: Any) -> None:
    error = refused("session.update", phase, session={})
    assert (error.code, error.message) == ("invalid_request", "the active session cannot be reconfigured")


@pytest.mark.parametrize("flag", [0, 1, "true", None])
def test_flags_are_booleans(flag: Any) -> None:
    assert refused("input_audio_buffer.commit", pad_partial=flag).param == "pad_partial"
    assert update_refused(timings=flag).param == "session.timings"


@pytest.mark.parametrize("text", ["", "no", "[1]", "5", '"a"', "null", "{", "[" * 100_000, '{"a":' * 50_000])
def test_messages_that_are_no_objects(text: str) -> None:
    with pytest.raises(ClientError, match="message must be a JSON object") as caught:
        parse_message(text)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("event_id", "echoed"), [("c1", "c1"), (None, None), (5, None), ("x" * 201, None), ("\ud800", None)]
)
def test_event_ids_that_can_be_given_back(event_id: Any, echoed: str | None) -> None:
    assert event_id_of({"event_id": event_id}) == echoed


# ---------------------------------------------------------------------------------------------------------- session.update
def test_update_defaults() -> None:
    assert update() == read("session.update", "configuring") == Configure()


@pytest.mark.parametrize(("given", "seed"), [(7, 7), (7.0, 7), ("7", 7), (2**64 - 1, 2**64 - 1), (0, 0)])
def test_seeds(given: Any, seed: int) -> None:
    assert update(seed=given).seed == seed


@pytest.mark.parametrize("seed", [-1, -1.0, 2**64, 0.5, "x", "7.0", None, True, [], float("inf"), float("nan"), 1e300])
def test_seeds_that_are_none(seed: Any) -> None:
    error = update_refused(seed=seed)
    assert (error.code, error.param) == ("session_initialization_failed", "session.seed")
    assert "0 to 2**64 - 1" in error.message


@pytest.mark.parametrize(("given", "limit"), [(2, 2.0), (2.5, 2.5), ("2.5", 2.5), (None, None)])
def test_limits(given: Any, limit: float | None) -> None:
    assert update(max_streaming_seconds=given).max_streaming_seconds == limit


@pytest.mark.parametrize("limit", [0, -1, "x", True, [], float("inf"), float("nan"), 10**400])
def test_limits_that_are_none(limit: Any) -> None:
    error = update_refused(max_streaming_seconds=limit)
    assert (error.code, error.param) == ("session_initialization_failed", "session.max_streaming_seconds")


def test_instructions_is_another_name_of_the_system_prompt() -> None:
    assert update(instructions="Be brief.").system_prompt == "Be brief."
    assert update(instructions="a", system_prompt="a").system_prompt == "a"
    assert update(system_prompt=None, instructions=None).system_prompt is None
    assert update_refused(instructions="a", system_prompt="b").param == "session.instructions"


@pytest.mark.parametrize("prompt", [5, ["a"], {}, "\ud800", "x" * (MAX_PROMPT_CHARS + 1)])
def test_prompts_that_are_none(prompt: Any) -> None:
    error = update_refused(system_prompt=prompt)
    assert (error.code, error.param) == ("session_initialization_failed", "session.system_prompt")
    assert len(error.message) < 300


def test_unknown_fields_are_reported() -> None:
    ignored = update(turn_detection=None, voice="alloy", tools=[], temperature=0.8, foo=1, seed=3).ignored
    assert ignored == ("foo", "temperature", "tools", "turn_detection", "voice")
    assert len(update(**{f"f{n}": 1 for n in range(1000)}).ignored) == 64
    assert update(**{"\ud800": 1}).ignored == ()


@pytest.mark.parametrize("session", [None, [], "x", 5])
def test_a_session_that_is_no_object(session: Any) -> None:
    error = refused("session.update", "configuring", session=session)
    assert (error.code, error.param) == ("invalid_request", "session")


def test_a_model_that_is_no_name() -> None:
    assert update(model="m").model == "m"
    assert update_refused(model=5).code == "invalid_request"


# ----------------------------------------------------------------------------------------------------------------- notices
AUDIO = Event("audio", 4, samples=np.full(1764, 0.5, np.float32), sample_rate=22050, audio_codes=np.arange(31))
MAPPING = [
    (
        Event("assistant_text_delta", 1, token_id=5, delta=" a", text="b a"),
        {"type": "response.text.delta", "frame_index": 1, "token_id": 5, "delta": " a", "text": "b a"},
    ),
    (
        Event("function_delta", 2, token_id=6, delta="f", text="ff"),
        {"type": "response.function.delta", "frame_index": 2, "token_id": 6, "delta": "f", "text": "ff"},
    ),
    (
        Event("user_transcript_delta", 3, delta=" hi", text="oh hi"),
        {
            "type": "conversation.item.input_audio_transcription.delta",
            "frame_index": 3,
            "delta": " hi",
            "transcript": "oh hi",
        },
    ),
    (
        AUDIO,
        {
            "type": "response.audio.delta",
            "frame_index": 4,
            "delta": base64.b64encode(np.full(1764, 16384, "<i2").tobytes()).decode(),
            "format": "pcm16",
            "sample_rate": 22050,
            "channels": 1,
            "audio_codes": list(range(31)),
        },
    ),
    (Event("done", 5), {"type": "response.done", "frame_index": 5}),
    (Event("cancelled", 6), {"type": "response.cancelled", "frame_index": 6}),
    (Committed(), {"type": "input_audio_buffer.committed"}),
    (Cleared(), {"type": "input_audio_buffer.cleared"}),
    (Pong(), {"type": "session.pong"}),
]


@pytest.mark.parametrize(("notice", "message"), MAPPING, ids=lambda value: getattr(value, "kind", None))
def test_event_mapping_names_and_fields(notice: Any, message: dict[str, Any]) -> None:
    assert write(notice) == message


def test_a_response_that_was_asked_for_needs_no_word() -> None:
    assert NativeDialect().write(ResponseRequested()) == []


FORMATS = {
    "input_audio_format": {"type": "pcm16", "sample_rate": 16000},
    "output_audio_format": {"type": "pcm16", "sample_rate": 22050},
}


def test_session_created_and_updated() -> None:
    created = {
        "type": "session.created",
        "session": {"id": "sess_1", "type": "realtime", "state": "configuring", **FORMATS},
    }
    assert write(Created("sess_1", "m")) == created
    updated = write(Updated("sess_1", "m", "p", 7, 600.0, False, FrameGeometry(), ("voice",)))
    assert updated["session"] == {
        "id": "sess_1",
        "type": "realtime",
        "state": "ready",
        "model": "m",
        "frame_samples": 1280,
        **FORMATS,
        "system_prompt": "p",
        "seed": 7,
        "max_streaming_seconds": 600.0,
        "timings": False,
        "ignored_fields": ["voice"],
    }


def test_errors_say_what_is_known() -> None:
    assert write(ClientError("invalid_request", "no"))["error"] == {
        "type": "invalid_request_error",
        "code": "invalid_request",
        "message": "no",
    }
    error = write(ClientError("inference_error", "no", param="audio", event_id="c1"))["error"]
    assert (error["param"], error["event_id"], error["type"]) == ("audio", "c1", "invalid_request_error")
    assert write(ClientError("server_busy", "no"))["error"]["type"] == "server_error"
    assert write(ClientError("inference_error", "no", close=CLOSE_FAULT))["error"]["type"] == "server_error"


def test_frame_timing() -> None:
    stages = {"tts": StageTiming("tts", 0, 2_000_000, 5_500_000, [])}
    message = write(FrameTiming("s", 3, due_ns=0, sent_ns=1_000_000, released_ns=90_000_000, stages=stages))
    assert message == {
        "type": "vcpipe.frame_timing",
        "frame_index": 3,
        "stages": {"tts": 3.5},
        "end_to_end_ms": 89.0,
        "lateness_ms": 10.0,
        "frame_ms": 80.0,
    }
