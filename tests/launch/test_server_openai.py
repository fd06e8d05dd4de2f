"""The OpenAI dialect: by itself, and as OpenAI's own client sees it on a real server."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import MODEL, FakePipeline, RunningServer, kinds, running_server
from waiting import PATIENCE_S

from vcpipe.launch.server.openai import GrowingText, OpenAIDialect
from vcpipe.launch.server.protocol import (
    CLOSE_FAULT,
    Append,
    ClientError,
    Commit,
    Committed,
    Configure,
    Created,
    CreateResponse,
    JsonObject,
    Updated,
)
from vcpipe.launch.talk.resample import Resampler
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry

CHECKPOINT = Path(__file__).parent.parent / "data" / "tiny" / "bf16"
FORMAT = {"type": "audio/pcm", "rate": 24000}

BEGIN = ["response.created", "response.output_item.added", "conversation.item.added", "response.content_part.added"]
END_USER = ["conversation.item.input_audio_transcription.completed", "conversation.item.done"]
END = [
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
]
AUDIO = "response.output_audio.delta"
TEXT = "response.output_audio_transcript.delta"
HEARD = "conversation.item.input_audio_transcription.delta"


def base64_of(pcm: np.ndarray) -> str:
    return base64.b64encode(np.rint(pcm * 32768).astype("<i2").tobytes()).decode()


def tone(rate: int, seconds: float, hz: float = 440.0) -> np.ndarray:
    return np.float32(0.4) * np.sin(2 * np.pi * hz * np.arange(int(rate * seconds)) / rate, dtype=np.float32)


def pcm_of(messages: list[JsonObject]) -> np.ndarray:
    data = b"".join(base64.b64decode(m["delta"]) for m in messages if m["type"] == AUDIO)
    return np.frombuffer(data, "<i2").astype(np.float32) / 32767


def audio_event(index: int, samples: np.ndarray) -> Event:
    return Event("audio", index, samples=samples, sample_rate=22050, audio_codes=np.zeros(31, np.int32))


def write_all(dialect: OpenAIDialect, *notices: Any) -> list[JsonObject]:
    return [message for notice in notices for message in dialect.write(notice)]


def updated(**fields: Any) -> Updated:
    return Updated("sess_1", MODEL, "p", 0, 600.0, False, FrameGeometry(), **fields)


# ------------------------------------------------------------------------------------------------------------------- input
def test_any_chunking_of_the_input_resamples_the_same() -> None:
    pcm = tone(24000, 1.0)
    heard = []
    for size in (1920, 1, 777, 24000):
        dialect, pieces = OpenAIDialect(), []
        cuts = range(0, 2400, size) if size == 1 else range(0, len(pcm), size)
        spans = [(start, start + size) for start in cuts]
        if size == 1:
            spans.append((2400, len(pcm)))
        for start, stop in spans:
            (command,) = dialect.read(
                {"type": "input_audio_buffer.append", "audio": base64_of(pcm[start:stop])}, "open"
            )
            assert isinstance(command, Append)
            pieces.append(command.pcm)
        rest, commit = dialect.read({"type": "input_audio_buffer.commit"}, "open")
        assert isinstance(rest, Append) and commit == Commit()
        heard.append(np.concatenate([*pieces, rest.pcm]))
    assert [len(samples) for samples in heard] == [16000] * 4
    for samples in heard[1:]:
        np.testing.assert_array_equal(samples, heard[0])
    np.testing.assert_allclose(heard[0][1000:-1000], tone(16000, 1.0)[1000:-1000], atol=1e-3)


def test_clear_forgets_what_the_resampler_holds() -> None:
    dialect = OpenAIDialect()
    dialect.read({"type": "input_audio_buffer.append", "audio": base64_of(np.full(960, 0.5))}, "open")
    dialect.read({"type": "input_audio_buffer.clear"}, "open")
    first, rest = (
        dialect.read({"type": "input_audio_buffer.append", "audio": base64_of(np.zeros(4800))}, "open"),
        dialect.read({"type": "input_audio_buffer.commit"}, "open"),
    )
    assert isinstance(first[0], Append) and isinstance(rest[0], Append)
    assert not np.concatenate([first[0].pcm, rest[0].pcm]).any()


def test_half_a_sample_is_refused_and_the_stream_goes_on() -> None:
    dialect = OpenAIDialect()
    with pytest.raises(ClientError, match="whole 16-bit samples"):
        dialect.read({"type": "input_audio_buffer.append", "audio": "AAAA"}, "open")
    assert dialect.read({"type": "input_audio_buffer.append", "audio": base64_of(np.zeros(4800))}, "open")


# ----------------------------------------------------------------------------------------------------------------- session
def test_session_update_takes_instructions_and_tells_what_it_ignores() -> None:
    session = {
        "type": "realtime",
        "instructions": "Be brief.",
        "output_modalities": ["audio"],
        "audio": {"input": {"format": FORMAT, "turn_detection": {"type": "server_vad"}}, "output": {"voice": "marin"}},
        "tools": [],
    }
    dialect = OpenAIDialect()
    (command,) = dialect.read({"type": "session.update", "session": session}, "configuring")
    ignored = ("tools", "audio.input.turn_detection", "audio.output.voice")
    assert command == Configure(system_prompt="Be brief.", ignored=ignored)
    (message,) = dialect.write(updated(ignored=ignored))
    told = message["session"]
    assert (message["type"], told["type"], told["instructions"]) == ("session.updated", "realtime", "p")
    assert told["audio"]["input"]["format"] == told["audio"]["output"]["format"] == FORMAT
    assert told["ignored_fields"] == list(ignored)


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"type": "transcription"}, "session.type"),
        ({"output_modalities": ["text"]}, "session.output_modalities"),
        ({"audio": 3}, "session.audio"),
        ({"audio": {"input": []}}, "session.audio.input"),
        ({"audio": {"input": {"format": "pcm16"}}}, "session.audio.input.format"),
        ({"audio": {"output": {"format": {"type": "audio/pcmu"}}}}, "session.audio.output.format"),
        ({"audio": {"output": {"format": {"type": "audio/pcm", "rate": 16000}}}}, "session.audio.output.format"),
    ],
)
def test_what_would_sound_wrong_is_refused(session: JsonObject, param: str) -> None:
    with pytest.raises(ClientError) as caught:
        OpenAIDialect().read({"type": "session.update", "session": session}, "configuring")
    assert (caught.value.code, caught.value.param) == ("session_initialization_failed", param)


def test_audio_or_a_wish_for_a_response_opens_the_session_with_its_defaults() -> None:
    dialect = OpenAIDialect()
    commands = dialect.read({"type": "input_audio_buffer.append", "audio": base64_of(np.zeros(1920))}, "configuring")
    assert commands[0] == Configure() and isinstance(commands[1], Append)
    assert dialect.write(updated()) == []  # nobody asked
    assert OpenAIDialect().read({"type": "response.create"}, "configuring") == [Configure(), CreateResponse()]


# ---------------------------------------------------------------------------------------------------------------- response
def test_deltas_never_end_inside_a_character() -> None:
    text = GrowingText()
    shown = ["a", "a\ufffd", "a\ufffd", "a😀", "a😀\ufffd\ufffd", "a😀\ufffd\ufffdb", "a😀\ufffd\ufffdb\ufffd"]
    assert [text.push(t) for t in shown] == ["a", "", "", "😀", "", "\ufffd\ufffdb", ""]
    assert text.finish() == "\ufffd" and text.said == shown[-1]


def test_one_response_from_the_first_frame_to_the_end() -> None:
    dialect = OpenAIDialect()
    assert kinds(dialect.write(Created("sess_1", MODEL))) == ["session.created"]
    frames = np.split(tone(22050, 0.8), 10)
    first = write_all(
        dialect,
        Event("user_transcript_delta", 0, delta="hi", text="hi"),
        Event("assistant_text_delta", 0, 5, delta="\ufffd", text="\ufffd"),
        Event("function_delta", 0, 6, delta="f", text="f"),
        audio_event(0, frames[0]),
    )
    assert kinds(first) == ["conversation.item.added", HEARD, *BEGIN, AUDIO]
    middle = write_all(
        dialect,
        Event("assistant_text_delta", 1, 7, delta="\ufffd", text="é"),
        *(audio_event(index, frames[index]) for index in range(1, 9)),
        Committed(),
        audio_event(9, frames[9]),
    )
    assert kinds(middle)[0] == TEXT and "input_audio_buffer.committed" in kinds(middle)
    last = dialect.write(Event("done", 10))
    assert kinds(last) == [AUDIO, *END_USER, *END]

    messages = first + middle + last
    response = last[-1]["response"]
    assert (response["status"], response["status_details"]) == ("completed", None)
    assert response["output"][0]["content"] == [{"type": "output_audio", "transcript": "é"}]
    parts = [m for m in messages if m["type"].startswith("response.output_audio")]
    ids = {(m["response_id"], m["item_id"], m["output_index"], m["content_index"]) for m in parts}
    assert ids == {(response["id"], response["output"][0]["id"], 0, 0)}
    users = {m["item_id"] for m in messages if m["type"] in (HEARD, END_USER[0], "input_audio_buffer.committed")}
    assert users == {first[0]["item"]["id"]}
    assert len({m["event_id"] for m in messages}) == len(messages)
    (completed,) = (m for m in last if m["type"] == END_USER[0])
    assert (completed["transcript"], completed["usage"]["seconds"]) == ("hi", 0.8)

    voice = Resampler(22050, 24000)
    whole = np.concatenate([voice.push(np.concatenate(frames)), voice.finish()])
    assert len(pcm_of(messages)) == len(whole) == 19200
    np.testing.assert_allclose(pcm_of(messages), whole, atol=1e-4)


def test_cancel_needs_a_response_and_ends_it() -> None:
    dialect = OpenAIDialect()
    for phase in ("configuring", "open"):
        with pytest.raises(ClientError, match="no response in progress"):
            dialect.read({"type": "response.cancel"}, phase)  # type: ignore[arg-type]
    dialect.write(audio_event(0, np.zeros(1764, np.float32)))
    with pytest.raises(ClientError, match="'resp_x' is not in progress"):
        dialect.read({"type": "response.cancel", "response_id": "resp_x"}, "open")
    assert len(dialect.read({"type": "response.cancel"}, "open")) == 1
    messages = dialect.write(Event("cancelled", 1))
    assert kinds(messages) == [*END_USER, *END]
    response = messages[-1]["response"]
    assert response["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
    assert (response["status"], response["output"][0]["status"]) == ("cancelled", "incomplete")


def test_a_lost_session_ends_its_response_as_failed() -> None:
    dialect = OpenAIDialect()
    lost = ClientError("inference_error", "codec died", close=CLOSE_FAULT)
    assert kinds(OpenAIDialect().write(lost)) == ["error"]
    dialect.write(audio_event(0, np.zeros(1764, np.float32)))
    messages = dialect.write(lost)
    assert kinds(messages) == ["error", *END_USER, *END]
    assert messages[-1]["response"]["status"] == "failed"


def test_a_cancel_drops_deltas_and_nothing_else() -> None:
    pipeline = FakePipeline()
    pipeline.frame_s = 0.01
    with running_server(pipeline.start) as server, server.connect("?dialect=openai") as client:
        client.expect("session.created")
        client.append(24000)
        client.until("response.created")
        client.send("response.cancel")
        messages = client.rest()
        assert client.socket.close_code == 1000
    assert kinds(messages)[-len(END) :] == END
    assert [kind for kind in kinds(messages) if not kind.endswith(".delta")] == [*BEGIN[1:], *END_USER, *END]


# ------------------------------------------------------------------------------------------------------- the official client
@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    pytest.importorskip("openai", reason="the package openai is not installed")
    from vcpipe.launch.serve import ServeOptions, starter

    with running_server(starter(ServeOptions(model=str(CHECKPOINT)))) as server:
        yield server


def checked(event: Any) -> JsonObject:
    """An event as JSON, after the client's own types have checked every field of it."""
    type(event).model_validate(event.model_dump(), strict=True)
    return event.model_dump()


async def talk(server: RunningServer, model: str, *, cancel: bool = False) -> list[JsonObject]:
    from openai import AsyncOpenAI

    url = f"127.0.0.1:{server.port}/v1"
    events: list[JsonObject] = []
    async with (
        AsyncOpenAI(base_url=f"http://{url}", websocket_base_url=f"ws://{url}", api_key="none") as client,
        client.realtime.connect(
            model=model,
            extra_query={"dialect": "openai"},
            websocket_connection_options={"open_timeout": PATIENCE_S, "ping_interval": None},
        ) as connection,
    ):
        events.append(checked(await connection.recv()))
        audio: Any = {"input": {"format": FORMAT}, "output": {"format": FORMAT}}
        await connection.session.update(session={"type": "realtime", "instructions": "Be brief.", "audio": audio})
        events.append(checked(await connection.recv()))
        if events[-1]["type"] == "error":
            return events
        pcm = tone(24000, 0.8)
        for start in range(0, len(pcm), 1500):
            await connection.input_audio_buffer.append(audio=base64_of(pcm[start : start + 1500]))
        await connection.send({"type": "response.cancel", "response_id": "resp_other", "event_id": "mine"})
        await connection.response.create()
        if not cancel:
            await connection.input_audio_buffer.commit()
        async for event in connection:
            events.append(checked(event))
            if cancel and event.type == AUDIO:
                cancel = False  # once
                await connection.response.cancel()
    return events


@pytest.mark.process
def test_official_client_talks(server: RunningServer) -> None:
    events = asyncio.run(asyncio.wait_for(talk(server, MODEL), 4 * PATIENCE_S))
    errors = [event["error"] for event in events if event["type"] == "error"]
    assert [error["event_id"] for error in errors] == ["mine"]
    said = [kind for kind in kinds(events) if not kind.endswith(".delta") and kind != "error"]
    before, after = said.index("response.created"), said.index("input_audio_buffer.committed")
    assert said[:before] == ["session.created", "session.updated", "conversation.item.added"]
    assert said[before:after] == BEGIN
    assert said[after + 1 :] == [*END_USER, *END]
    assert events[1]["session"]["instructions"] == "Be brief."
    done = events[-1]["response"]
    assert done["status"] == "completed"
    assert done["output"][0]["content"][0]["transcript"] == "".join(e["delta"] for e in events if e["type"] == TEXT)
    assert len(pcm_of(events)) == 10 * 1920  # 24 kHz, for as many frames as were sent
    assert pcm_of(events).any()


@pytest.mark.process
def test_official_client_cancels(server: RunningServer) -> None:
    events = asyncio.run(asyncio.wait_for(talk(server, MODEL, cancel=True), 4 * PATIENCE_S))
    assert events[-1]["type"] == "response.done" and events[-1]["response"]["status"] == "cancelled"


@pytest.mark.process
def test_official_client_with_another_model_is_told_so(server: RunningServer) -> None:
    events = asyncio.run(asyncio.wait_for(talk(server, "gpt-realtime"), 4 * PATIENCE_S))
    assert kinds(events) == ["session.created", "error"]
    assert repr(MODEL) in events[-1]["error"]["message"]
