"""Transcription over /v1/realtime: real sockets, real actors of plain arithmetic, and the tiny checkpoint."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
from serving import MODEL, RunningServer, kinds, until
from transcribing import (
    CHECKPOINT,
    COMPLETED,
    DELTA,
    FRAME,
    RATE,
    messages,
    said,
    transcribing,
    transcribing_server,
    turn_of,
)
from websockets.exceptions import InvalidStatus

from vcpipe.launch.server.connection import Limits
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
from vcpipe.launch.server.security import Gate
from vcpipe.launch.server.transcription_dialects import NativeTranscription, OpenAITranscription
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.config import PipelineConfig

COMMITTED = "input_audio_buffer.committed"
DONE = "conversation.item.done"
DIALECTS = [pytest.param("", id="native"), pytest.param("&dialect=openai", id="openai")]


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with transcribing_server(limits=Limits(teardown_s=5.0)) as server:
        until(lambda: server.server.engine.state == "ready", 60)
        yield server


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    """Afterwards no slot is held."""
    yield shared
    until(lambda: shared.server.transcriptions.taken == 0)


# ------------------------------------------------------------------------------------------------------------- the protocol
def test_the_first_event_and_the_type_match_the_route(server: RunningServer) -> None:
    for dialect in ("", "&dialect=openai"):
        for query, kind in ((f"?intent=transcription{dialect}", "transcription"), (f"?{dialect[1:]}", "realtime")):
            with server.connect(query) as client:
                created = client.expect("session.created")
                assert created["session"]["type"] == kind
                other = {"transcription": "realtime", "realtime": "transcription"}[kind]
                client.send("session.update", session={"type": other})
                error = client.expect_error("session_initialization_failed")
                assert f'type must be "{kind}"' in error["message"] and error["param"] == "session.type"
                client.send("session.update", session={"type": kind})
                assert client.expect("session.updated")["session"]["type"] == kind


def test_a_turn(server: RunningServer) -> None:
    with transcribing(server) as client:
        client.append(messages(4))
        added, first, second = (client.receive() for _ in range(3))
        item = added["item"]["id"]
        assert kinds([added, first, second]) == ["conversation.item.added", DELTA, DELTA]
        assert (first["item_id"], first["delta"], first["frame_index"]) == (item, "w0", 0)
        assert (second["delta"], second["start_s"], second["end_s"]) == (" w2", 0.08, 0.16)
        client.send(COMMITTED.replace("committed", "commit"))
        committed, *rest = client.until(DONE)
        assert committed["type"] == COMMITTED and committed["item_id"] == item and committed["previous_item_id"] is None
        assert turn_of([added, first, second, committed, *rest]) == said(4)
        completed = rest[-2]
        seconds = messages(4) / RATE
        assert (completed["frame_index"], completed["usage"]) == (5, {"type": "duration", "seconds": seconds})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_several_turns_on_one_connection_are_independent(server: RunningServer, dialect: str) -> None:
    rate = 16000
    declared = {"audio": {"input": {"format": {"type": "audio/pcm", "rate": rate}}}}
    with transcribing(server, f"?intent=transcription{dialect}", **declared) as client:
        previous = None
        for count in (4, 1, 8):
            client.append(messages(count))
            client.send("input_audio_buffer.commit")
            received = client.until(DONE)
            assert turn_of(received) == said(count)
            committed = next(message for message in received if message["type"] == COMMITTED)
            assert committed["previous_item_id"] == previous
            previous = committed["item_id"]


def test_turns_may_be_sent_ahead(server: RunningServer) -> None:
    with transcribing(server) as client:
        counts = [3, 6, 2, 5]
        for count in counts:
            client.append(messages(count))
            client.send("input_audio_buffer.commit")
        received = [message for _ in counts for message in client.until(DONE)]
    ids = [message["item"]["id"] for message in received if message["type"] == "conversation.item.added"]
    for item, count in zip(ids, counts, strict=True):
        turn = [m for m in received if (m.get("item_id") or m["item"]["id"]) == item]
        assert turn_of(turn) == said(count)


def test_a_commit_of_nothing_has_an_empty_turn(server: RunningServer) -> None:
    with transcribing(server) as client:
        for _ in range(2):
            client.send("input_audio_buffer.commit")
            received = client.until(DONE)
            assert kinds(received)[:2] == ["conversation.item.added", COMMITTED]
            assert received[-2]["usage"]["seconds"] == 0.0


def test_clear_drops_the_turn_and_the_next_is_whole(server: RunningServer) -> None:
    with transcribing(server) as client:
        client.send("input_audio_buffer.clear")
        client.expect("input_audio_buffer.cleared")
        client.append(messages(6))
        dropped = client.expect("conversation.item.added")["item"]["id"]
        client.send("input_audio_buffer.clear")
        client.until("input_audio_buffer.cleared")
        client.append(messages(4))
        client.send("input_audio_buffer.commit")
        received = [m for m in client.until(DONE) if m.get("item_id") != dropped]
        assert turn_of(received) == said(4)
        assert next(m for m in received if m["type"] == COMMITTED)["previous_item_id"] is None


def test_clear_leaves_the_committed_turn_alone(server: RunningServer) -> None:
    with transcribing(server) as client:
        client.append(messages(40))
        client.send("input_audio_buffer.commit")
        client.append(messages(2))
        client.send("input_audio_buffer.clear")
        received = client.until(DONE)
        item = received[0]["item"]["id"]
        assert turn_of([m for m in received if (m.get("item_id") or m.get("item", {}).get("id")) == item]) == said(40)


@pytest.mark.parametrize("seed", range(3))
def test_turns_in_any_order_of_appends_commits_and_clears(server: RunningServer, seed: int) -> None:
    random = np.random.default_rng(seed)
    expected, pending = [], 0
    with transcribing(server) as client:
        for _ in range(120):
            kind = random.choice(["append", "append", "commit", "clear"])
            if kind == "append":
                count = int(random.integers(1, 30))
                client.append(messages(count) if pending == 0 else count * FRAME)
                pending += count
            elif kind == "clear":
                client.send("input_audio_buffer.clear")
                pending = 0
            elif pending and len(expected) < 40:
                client.send("input_audio_buffer.commit")
                expected.append(said(pending))
                pending = 0
        received = [message for _ in expected for message in client.until(DONE)]
    assert "error" not in kinds(received)
    assert [message["transcript"] for message in received if message["type"] == COMPLETED] == expected
    for message in (m for m in received if m["type"] == COMPLETED):
        deltas = [m["delta"] for m in received if m["type"] == DELTA and m["item_id"] == message["item_id"]]
        assert "".join(deltas) == message["transcript"]


def test_cancel_ends_the_session_at_once(server: RunningServer) -> None:
    with transcribing(server) as client:
        client.append(messages(300))
        client.send("session.cancel")
        assert client.until("response.cancelled")[-1]["frame_index"] == 0
        assert client.close_code() == 1000
    with server.connect("?intent=transcription") as client:
        client.expect("session.created")
        client.send("session.cancel")
        assert "session.update before" in client.expect_error("invalid_request")["message"]


def test_messages_from_the_first_byte_on_are_taken_in_order(server: RunningServer) -> None:
    with server.connect("?intent=transcription") as client:
        client.send("session.update")
        client.append(messages(4))
        client.send("input_audio_buffer.commit")
        client.append(messages(2))
        client.send("input_audio_buffer.commit")
        client.send("session.ping")
        received = [*client.until(DONE), *client.until(DONE)]
    kept = [m for m in received if m["type"] not in ("session.created", "session.updated", "session.pong")]
    assert [m["transcript"] for m in kept if m["type"] == COMPLETED] == [said(4), said(2)]
    assert {"session.created", "session.updated", "session.pong"} <= set(kinds(received))


def test_any_chunking_gives_the_same_text(server: RunningServer) -> None:
    texts = set()
    for size in (159, 320, 1280, 8000):
        with transcribing(server) as client:
            for start in range(0, 8000, size):
                client.append(min(size, 8000 - start))
            client.send("input_audio_buffer.commit")
            texts.add(turn_of(client.until(DONE)))
    assert len(texts) == 1


@pytest.mark.parametrize("rate", [8000, 24000, 44100, 48000])
def test_a_declared_rate_is_resampled_statefully(server: RunningServer, rate: int) -> None:
    second = rate
    texts = set()
    for size in (rate // 50, second):
        with transcribing(server, input_audio_format={"type": "pcm16", "sample_rate": rate}) as client:
            for _ in range(2):  # the next turn begins anew
                for start in range(0, second, size):
                    client.append(min(size, second - start), sample_rate=rate)
                client.send("input_audio_buffer.commit")
                received = client.until(DONE)
                texts.add(turn_of(received))
                assert received[-2]["usage"]["seconds"] == pytest.approx(1.0, abs=0.002)
    assert len(texts) == 1


def test_bad_messages_are_told_and_the_session_goes_on(server: RunningServer) -> None:
    with server.connect("?intent=transcription") as client:
        client.expect("session.created")
        client.append(320)
        assert "session.update before" in client.expect_error("invalid_request")["message"]
        for session, param in (
            ({"language": "de"}, "session.language"),
            ({"audio": {"input": {"transcription": {"language": "fr"}}}}, "session.audio.input.transcription.language"),
            ({"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}, "session.audio.input.turn_detection"),
            ({"audio": {"input": {"format": {"type": "audio/pcmu"}}}}, "session.audio.input.format"),
            ({"input_audio_format": {"type": "pcm16", "sample_rate": 10}}, "session.input_audio_format"),
            ({"input_audio_format": {"type": "pcm16", "sample_rate": "x"}}, "session.input_audio_format"),
            ({"audio": 5}, "session.audio"),
            ({"max_streaming_seconds": -1}, "session.max_streaming_seconds"),
        ):
            client.send("session.update", session=session)
            assert client.expect_error("session_initialization_failed")["param"] == param
        client.send("session.update", session={"model": "whisper-1"})
        assert client.expect_error("invalid_request")["param"] == "session.model"
        client.send("session.update", session={"language": "en-US", "voice": "alloy", "model": MODEL})
        assert client.expect("session.updated")["session"]["ignored_fields"] == ["voice"]
        client.send("session.update", session={})
        client.expect_error("invalid_request")
        client.send("response.create")
        assert "unsupported event type 'response.create'" in client.expect_error("invalid_request")["message"]
        client.append(320, sample_rate=8000)
        assert client.expect_error("inference_error")["param"] == "sample_rate"
        for audio in ("AAA*A==", "AAAA", None, 5):
            client.send("input_audio_buffer.append", audio=audio, event_id="mine")
            assert client.expect_error("inference_error")["event_id"] == "mine"
        client.socket.send(b"\0\0")
        client.expect_error("invalid_request")
        client.append(messages(4))
        client.send("input_audio_buffer.commit")
        assert turn_of(client.until(DONE)) == said(4)


# ------------------------------------------------------------------------------------------------------------------- bounds
def test_a_turn_is_bounded_and_the_next_one_is_free(server: RunningServer) -> None:
    with transcribing(server, max_streaming_seconds=0.5) as client:
        client.append(RATE)
        error = [m for m in client.until("error") if m["type"] == "error"][0]["error"]
        assert "a turn is limited to 0.5 s" in error["message"]
        client.send("input_audio_buffer.commit")
        assert client.until(DONE)[-2]["usage"]["seconds"] == 0.5
        client.append(messages(4))
        client.send("input_audio_buffer.commit")
        assert turn_of(client.until(DONE)) == said(4)


def test_much_audio_at_once_waits_for_the_model_and_none_is_lost(server: RunningServer) -> None:
    with transcribing(server) as client:
        for _ in range(4):  # 80 s: more than the pipeline takes at a time
            client.append(20 * RATE)
        client.send("session.ping")
        client.send("input_audio_buffer.commit")
        received = client.until(DONE)
        assert received[-2]["usage"]["seconds"] == 80.0
        texts = [m["delta"] for m in received if m["type"] == DELTA]
        assert len(texts) == 502 and texts[-2:] == [" w1000", " end"]


def test_a_limit_of_sessions_of_its_own() -> None:
    with transcribing_server(max_transcriptions=2) as server:
        with transcribing(server) as first, transcribing(server) as second:
            with server.connect("?intent=transcription") as third:
                assert "active already" in third.expect_error("server_busy")["message"]
                assert third.close_code() == 1013
            with server.configured() as chat:  # the conversation's slot is another one
                health = server.json("/health")
                assert (health["transcriptions"], health["sessions"]) == (
                    {"active": 2, "max": 2},
                    {"active": 1, "max": 1},
                )
                for client in (first, second):
                    client.append(messages(4))
                chat.append(3 * FRAME)
                for client in (first, second):
                    client.send("input_audio_buffer.commit")
                    assert turn_of(client.until(DONE)) == said(4)
                chat.send("input_audio_buffer.commit")
                assert kinds(chat.until("response.done")).count("response.audio.delta") == 3
        until(lambda: server.server.transcriptions.taken == 0)
        metrics = server.get("/metrics")[2]
        assert 'vcpipe_transcription_sessions_total{end="disconnected"} 2' in metrics
        assert 'vcpipe_side_frames_total{task="transcription"} 8' in metrics
        assert "vcpipe_frames_total 3" in metrics and "vcpipe_transcriptions_max 2" in metrics


def test_time_limits_and_a_client_that_reads_nothing() -> None:
    limits = Limits(configure_s=0.2, idle_s=0.4, send_s=0.5, outbox=4)
    with transcribing_server(limits=limits) as server:
        until(lambda: server.server.engine.state == "ready", 60)
        with server.connect("?intent=transcription") as client:
            client.expect("session.created")
            assert "no session.update" in client.expect_error("invalid_request")["message"]
            assert client.close_code() == 1008
        with transcribing(server) as client:
            client.append(messages(2))
            assert "no message within 0.4 s" in client.until("error")[-1]["error"]["message"]
            assert client.close_code() == 1008
        deaf = server.connect("?intent=transcription", max_queue=1)
        deaf.send("session.update")
        for _ in range(4000):
            deaf.send("session.ping")
        with transcribing(server) as client:
            client.append(messages(4))
            client.send("input_audio_buffer.commit")
            assert turn_of(client.until(DONE)) == said(4)
        until(lambda: server.server.transcriptions.taken == 0)
        deaf.vanish()


def test_a_client_that_vanishes_frees_its_slot(server: RunningServer) -> None:
    client = transcribing(server)
    client.append(messages(200))
    client.vanish()
    until(lambda: server.server.transcriptions.taken == 0)


def test_a_dead_stage_is_told_and_the_next_session_starts_anew() -> None:
    with transcribing_server() as server:
        with transcribing(server) as client:
            client.append(messages(4))
            client.expect("conversation.item.added")
            pipeline = server.server.engine._pipeline
            os.kill(pipeline.pids["perception"], signal.SIGKILL)
            received = client.rest()
            failed, error = received[-2:]
            assert failed["type"] == "conversation.item.input_audio_transcription.failed"
            assert error["type"] == "error" and "perception" in error["error"]["message"]
            assert client.socket.close_code == 1011
        with transcribing(server) as client:
            client.append(messages(4))
            client.send("input_audio_buffer.commit")
            assert turn_of(client.until(DONE)) == said(4)


def test_a_server_that_stops_tells_its_transcriptions() -> None:
    codes: list[int | None] = []
    with transcribing_server() as server:
        client = transcribing(server)
        client.append(messages(3))
        client.until(DELTA)
        reader = threading.Thread(target=lambda: codes.append(client.close_code()))
        reader.start()
        started = time.monotonic()
    reader.join(10)
    assert codes == [1012] and time.monotonic() - started < 8
    client.close()


def test_keys_origins_and_unknown_intents() -> None:
    with transcribing_server(stages=("perception",), gate=Gate("secret")) as server:
        for query, headers, status in (
            ("?intent=transcription", {}, 401),
            ("?intent=transcription", {"Authorization": "Bearer secret", "Origin": "https://evil.example"}, 403),
            ("?intent=translation", {"Authorization": "Bearer secret"}, 400),
            ("?intent=transcription&dialect=klingon", {"Authorization": "Bearer secret"}, 400),
        ):
            with pytest.raises(InvalidStatus) as refused:
                server.connect(query, additional_headers=headers)
            assert refused.value.response.status_code == status
        with server.connect("?intent=transcription", additional_headers={"Authorization": "Bearer secret"}) as client:
            client.expect("session.created")


# ------------------------------------------------------------------------------------------------------------- other clients
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_published_client_of_mlx_audio(server: RunningServer, dialect: str) -> None:
    """Partial before commit, completion, second turn: 80 chunks of 20 ms, as its own test drives its server."""
    with server.connect(f"?intent=transcription&model={MODEL}{dialect}") as client:
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


def test_openais_own_client(server: RunningServer) -> None:
    from openai import AsyncOpenAI

    pcm = np.zeros(24000, "<i2").tobytes()

    async def talk() -> list[Any]:
        client = AsyncOpenAI(
            base_url=f"{server.http}/v1", websocket_base_url=server.http.replace("http", "ws") + "/v1", api_key="x"
        )
        query = {"intent": "transcription", "dialect": "openai"}
        events: list[Any] = []
        async with client.realtime.connect(extra_query=query) as connection:
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

    events = asyncio.run(asyncio.wait_for(talk(), 20))
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


def test_openais_session_is_there_without_an_update(server: RunningServer) -> None:
    with server.connect("?intent=transcription&dialect=openai") as client:
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


# -------------------------------------------------------------------------------------------------------- the tiny checkpoint
@pytest.fixture(scope="module")
def tiny() -> Iterator[Pipeline]:
    with Pipeline(PipelineConfig(CHECKPOINT, stages=("perception",), device="cpu")) as pipeline:
        yield pipeline


def question() -> np.ndarray:
    pcm, _ = soundfile.read(CHECKPOINT.parents[1] / "golden" / "input.wav", dtype="float32")
    return np.rint(pcm * 32767).astype(np.float32) / 32768


def test_over_the_socket_as_in_the_library_whatever_the_chunks(tiny: Pipeline) -> None:
    pcm = question()[:8000]
    with tiny.open_transcription() as session:
        session.feed(pcm)
        session.close()
        expected = [(delta.frame_index, delta.text) for delta in session.deltas()]
        frames = session.frames
    assert expected
    with transcribing_server(pipeline=tiny) as server:
        for size in (159, 1280, 8000):
            with transcribing(server) as client:
                for start in range(0, len(pcm), size):
                    client.append(pcm[start : start + size])
                client.send("input_audio_buffer.commit")
                received = client.until(DONE)
            assert [(m["frame_index"], m["delta"]) for m in received if m["type"] == DELTA] == expected, size
            assert received[-2]["frame_index"] == frames


def test_the_first_text_comes_before_the_commit_at_real_time_pace(tiny: Pipeline) -> None:
    pcm = question()
    with transcribing_server(pipeline=tiny) as server, transcribing(server) as client:
        times: dict[str, float] = {}

        def listen() -> None:
            while DONE not in times:
                times.setdefault(client.receive()["type"], time.monotonic())

        listener = threading.Thread(target=listen)
        listener.start()
        started = time.monotonic()
        for index, start in enumerate(range(0, len(pcm), 320)):
            threading.Event().wait(max(started + 0.02 * index - time.monotonic(), 0.0))
            client.append(pcm[start : start + 320])
        committed = time.monotonic()
        client.send("input_audio_buffer.commit")
        listener.join(20)
    assert times[DELTA] < committed - 1.0 and times[COMPLETED] - committed < 2.0
