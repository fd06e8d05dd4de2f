"""Transcription over /v1/realtime: other clients, and the dialects by themselves."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest
from serving import MODEL, RunningServer, kinds
from transcribing import (
    COMMITTED,
    COMPLETED,
    DELTA,
    DIALECTS,
    DONE,
)
from waiting import PATIENCE_S

from vcpipe.launch.server.protocol import (
    Append,
    Cancel,
    Clear,
    ClientError,
    Commit,
    Configure,
    Created,
    TranscriptionReady,
    TurnFailed,
)
from vcpipe.launch.server.transcription_dialects import NativeTranscription, OpenAITranscription


# ------------------------------------------------------------------------------------------------------------- other clients
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_published_client_of_mlx_audio(transcriber: RunningServer, dialect: str) -> None:
    """Partial before commit, completion, second turn: 80 chunks of 20 ms, as its own test drives its server."""
    with transcriber.connect(f"?intent=transcription&model={MODEL}{dialect}") as client:
        client.expect("session.created")
        client.send("session.update", session={"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}})
        client.expect("session.updated")
        for _ in range(2):
            for _ in range(80):
                client.append(320)
            client.expect("conversation.item.added")
            assert client.expect(DELTA)["delta"]
            client.send("input_audio_buffer.commit")
            received = client.until(COMPLETED)
            assert COMMITTED in kinds(received) and received[-1]["transcript"]
            client.expect(DONE)


def test_openais_own_client(transcriber: RunningServer) -> None:
    from openai import AsyncOpenAI

    pcm = np.zeros(24000, "<i2").tobytes()

    async def talk() -> list[Any]:
        client = AsyncOpenAI(
            base_url=f"{transcriber.http}/v1",
            websocket_base_url=transcriber.http.replace("http", "ws") + "/v1",
            api_key="x",
        )
        query = {"intent": "transcription", "dialect": "openai"}
        events: list[Any] = []
        patience: Any = {"open_timeout": PATIENCE_S, "ping_interval": None}
        async with client.realtime.connect(extra_query=query, websocket_connection_options=patience) as connection:
            events.append(await connection.recv())
            await connection.session.update(
                session={
                    "type": "transcription",
                    "audio": {
                        "input": {
                            "format": {"type": "audio/pcm", "rate": 24000},
                            "transcription": {"model": MODEL, "language": "en"},
                            "turn_detection": None,
                        }
                    },
                }
            )
            for _ in range(2):
                for start in range(0, len(pcm), 960):
                    await connection.input_audio_buffer.append(
                        audio=base64.b64encode(pcm[start : start + 960]).decode()
                    )
                while not events[-1].type.endswith(".delta"):  # before the commit
                    events.append(await connection.recv())
                await connection.input_audio_buffer.commit()
                while events[-1].type != DONE:
                    events.append(await connection.recv())
        await client.close()
        return events

    events = asyncio.run(asyncio.wait_for(talk(), 4 * PATIENCE_S))
    created, updated = events[:2]
    assert (created.type, created.session.type) == ("session.created", "transcription")
    assert type(created.session).__name__ == "RealtimeTranscriptionSessionCreateRequest"
    assert updated.session.audio.input.transcription.model == MODEL
    assert updated.session.audio.input.format.rate == 24000
    turns = [event for event in events if event.type == COMPLETED]
    assert len(turns) == 2 and turns[0].transcript == turns[1].transcript and turns[0].item_id != turns[1].item_id
    assert turns[0].usage.type == "duration" and turns[0].usage.seconds == pytest.approx(1.0, abs=0.002)
    committed = [event for event in events if event.type == COMMITTED]
    assert [event.previous_item_id for event in committed] == [None, turns[0].item_id]
    for turn in turns:
        deltas = [e.delta for e in events if e.type == DELTA and e.item_id == turn.item_id]
        assert "".join(deltas) == turn.transcript


def test_openais_session_is_there_without_an_update(transcriber: RunningServer) -> None:
    with transcriber.connect("?intent=transcription&dialect=openai") as client:
        client.expect("session.created")
        client.append(24000)
        client.expect("conversation.item.added")
        client.send("input_audio_buffer.commit")
        assert client.until(DONE)[-2]["usage"]["seconds"] == pytest.approx(1.0, abs=0.002)


# ------------------------------------------------------------------------------------------------- the dialects by themselves
def test_commands_of_the_native_dialect() -> None:
    dialect = NativeTranscription()
    assert dialect.read({"type": "session.update", "session": {"model": "m"}}, "configuring") == [Configure(model="m")]
    kind = "input_audio_buffer."
    (append,) = dialect.read({"type": kind + "append", "audio": base64.b64encode(b"\0\x40").decode()}, "open")
    assert isinstance(append, Append) and append.pcm.tolist() == [0.5]
    assert dialect.read({"type": kind + "commit"}, "open")[-1] == Commit()
    assert dialect.read({"type": kind + "clear"}, "open") == [Clear()]
    assert dialect.read({"type": "response.cancel"}, "open") == [Cancel()]
    with pytest.raises(ClientError, match="must agree with input_audio_format"):
        session = {"input_audio_format": "pcm16", "audio": {"input": {"format": {"rate": 48000}}}}
        NativeTranscription().read({"type": "session.update", "session": session}, "configuring")


def test_a_clear_forgets_what_the_resampler_holds() -> None:
    dialect = OpenAITranscription()
    loud = base64.b64encode(np.full(960, 16384, "<i2").tobytes()).decode()
    quiet = base64.b64encode(np.zeros(4800, "<i2").tobytes()).decode()
    dialect.read({"type": "input_audio_buffer.append", "audio": loud}, "open")
    dialect.read({"type": "input_audio_buffer.clear"}, "open")
    commands = [
        *dialect.read({"type": "input_audio_buffer.append", "audio": quiet}, "open"),
        *dialect.read({"type": "input_audio_buffer.commit"}, "open"),
    ]
    heard = np.concatenate([command.pcm for command in commands if isinstance(command, Append)])
    assert len(heard) == 3200 and not heard.any()


def test_sessions_as_each_dialect_describes_them() -> None:
    (native,) = NativeTranscription().write(Created("sess_1", "m"))
    assert native["session"] == {
        "id": "sess_1",
        "type": "transcription",
        "state": "configuring",
        "model": "m",
        "language": "en",
        "input_audio_format": {"type": "pcm16", "sample_rate": 16000},
    }
    openai = OpenAITranscription()
    (message,) = openai.write(TranscriptionReady("sess_1", "m", 600.0, ("voice",)))
    session = message["session"]
    assert (session["object"], session["max_streaming_seconds"]) == ("realtime.transcription_session", 600.0)
    assert session["ignored_fields"] == ["voice"] and session["audio"]["input"]["turn_detection"] is None
    (failed,) = openai.write(TurnFailed("item_1", ClientError("inference_error", "no", close=1011)))
    assert failed["error"] == {"type": "server_error", "code": "inference_error", "message": "no"}
