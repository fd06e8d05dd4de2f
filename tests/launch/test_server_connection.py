"""Connections to a server whose pipeline is arithmetic: real sockets, no model."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serving import FRAME, MODEL, TIMEOUT_S, FakePipeline, RunningServer, kinds, pcm_of, running_server, until
from starlette.types import ASGIApp, Message
from websockets.exceptions import ConnectionClosed, InvalidStatus

from vcpipe.launch.server.app import ServerConfig, make_app
from vcpipe.launch.server.connection import Limits
from vcpipe.launch.server.engine import Hooks
from vcpipe.launch.server.security import Gate
from vcpipe.schemas.errors import ActorDiedError, ConfigError
from vcpipe.schemas.reports import Loading

PIPELINE = FakePipeline()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(PIPELINE.start, Limits(teardown_s=1.0)) as server:
        yield server


@pytest.fixture
def pipeline(server: RunningServer) -> Iterator[FakePipeline]:
    """The fake behind the shared server; afterwards no slot is held and every session is closed."""
    PIPELINE.reset()
    yield PIPELINE
    PIPELINE.close_may_end.set()
    until(lambda: server.server.reservations.taken == 0)
    until(lambda: len(PIPELINE.closed) == len(PIPELINE.opened))


# ---------------------------------------------------------------------------------------------------- the protocol, in order
def test_session_created_then_updated(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.connect() as client:
        created = client.expect("session.created")
        client.send("session.update", session={"system_prompt": "p", "seed": 7.0, "voice": "alloy"})
        updated = client.expect("session.updated")
    assert created["session"]["id"] == updated["session"]["id"]
    assert len(created["session"]["id"].removeprefix("sess_")) == 16
    assert (updated["session"]["model"], updated["session"]["seed"]) == (MODEL, 7)
    assert updated["session"]["ignored_fields"] == ["voice"] and "voice" not in updated["session"]
    assert updated["session"]["max_streaming_seconds"] == 600.0
    options = pipeline.opened[0].options
    assert (options.system_prompt, options.seed, options.max_streaming_seconds) == ("p", 7, 600.0)


def test_append_before_update_errors(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.connect() as client:
        client.expect("session.created")
        client.append(FRAME, event_id="c1")
        error = client.expect_error("invalid_request")
        client.send("session.ping")
        client.expect("session.pong")
    assert (error["message"], error["event_id"]) == ("send session.update before audio", "c1")


def test_append_streams_events_per_1280_sample_slice(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.frame_s = 0.05
    with server.configured() as client:
        client.append(np.repeat([0.1, 0.2, 0.3, 0.4], FRAME))
        first = client.until("response.audio.delta")
        assert pipeline.opened[0].frames_done < 3  # the append is still being worked on
        rest = [m for _ in range(3) for m in client.until("response.audio.delta")]
    frame = [
        "conversation.item.input_audio_transcription.delta",
        "response.text.delta",
        "response.function.delta",
        "response.audio.delta",
    ]
    assert kinds(first) + kinds(rest) == frame * 4
    assert [m["frame_index"] for m in first + rest] == [index for index in range(4) for _ in frame]
    assert [len(base64.b64decode(m["delta"])) for m in first + rest if m["type"] == frame[3]] == [3528] * 4
    assert rest[-1]["audio_codes"] == [3] * 31


def test_commit_emits_committed_then_done(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        client.append(2 * FRAME + 5)
        client.send("input_audio_buffer.commit")
        messages = client.rest()
        assert client.socket.close_code == 1000
    order = [m["type"] for m in messages if m["type"] in AUDIO_AND_ENDS]
    assert order == ["response.audio.delta"] * 2 + [
        "input_audio_buffer.committed",
        "response.audio.delta",
        "response.done",
    ]
    assert messages[-1]["frame_index"] == 3


AUDIO_AND_ENDS = (
    "response.audio.delta",
    "input_audio_buffer.committed",
    "response.done",
    "response.cancelled",
    "error",
)


def test_second_connection_gets_server_busy_1013(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as first:
        with server.connect() as second:
            error = second.expect_error("server_busy")
            assert second.close_code() == 1013
        assert "already active" in error["message"]
        first.send("session.ping")
        first.expect("session.pong")
    with server.configured():
        pass


def test_cancel_emits_cancelled_and_releases(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.frame_s = 0.02
    for kind in ("session.cancel", "response.cancel"):
        with server.configured() as client:
            client.append(20 * FRAME)
            client.until("response.audio.delta")
            client.send(kind)
            messages = client.rest()
            assert client.socket.close_code == 1000
            assert kinds(messages).count("response.cancelled") == 1
            assert messages[-1]["type"] == "response.cancelled"
            assert "response.done" not in kinds(messages)
            assert server.server.reservations.taken == 0  # before the client saw the close


def test_wrong_sample_rate_is_inference_error(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        client.append(FRAME, sample_rate=24000, event_id="c2")
        error = client.expect_error("inference_error")
        assert "16000 Hz" in error["message"] and error["event_id"] == "c2"
        client.append(FRAME)
        assert client.until("response.audio.delta")[-1]["frame_index"] == 0


def test_whole_float_sample_rate_is_accepted(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        for rate in (16000.0, "16000", 16000):
            client.append(FRAME, sample_rate=rate)
            assert client.until("response.audio.delta")


def test_abrupt_disconnect_releases(
    server: RunningServer, pipeline: FakePipeline, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of the old session reaches the new client, and nothing fills the log."""
    pipeline.frame_s = 0.02
    client = server.configured()
    client.append(30 * FRAME)
    client.until("response.audio.delta")
    client.vanish()
    with server.configured() as second:
        second.append(FRAME)
        messages = second.until("response.audio.delta")
    assert [m["frame_index"] for m in messages] == [0] * 4
    until(lambda: len(pipeline.closed) == 2)
    assert pipeline.opened[0].frames_done < 30
    assert [record for record in caplog.records if record.levelno >= logging.INFO and "vcpipe" in record.name] == []


def test_push_on_unopened_session_errors(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.refuse = "no"
    with server.connect() as client:
        client.expect("session.created")
        client.send("session.update")
        client.expect_error("session_initialization_failed")
        client.append(FRAME)
        assert client.expect_error("invalid_request")["message"] == "send session.update before audio"
    assert pipeline.opened == []


def test_close_cancels_unflushed_session(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        client.append(FRAME)
        client.until("response.audio.delta")
    until(lambda: len(pipeline.closed) == 1)
    assert pipeline.opened[0].aborted
    with server.configured() as client:
        client.send("input_audio_buffer.commit")
        client.rest()
    until(lambda: len(pipeline.closed) == 2)
    assert not pipeline.opened[1].aborted


def test_twenty_immediate_reconnects_are_never_refused(server: RunningServer, pipeline: FakePipeline) -> None:
    for index in range(20):
        client = server.configured()
        client.append(3 * FRAME)
        client.until("response.audio.delta")
        client.vanish() if index % 2 else client.close()
    until(lambda: len(pipeline.closed) == 20)


# ------------------------------------------------------------------------------------------------------------- what waits
def test_messages_from_the_first_byte_on_are_taken_in_order(server: RunningServer, pipeline: FakePipeline) -> None:
    """Nothing is lost, and nothing overtakes, while a session is being opened."""
    pipeline.open_s = 0.2
    with server.connect() as client:
        client.send("session.update", session={"seed": 1})
        for level in (0.125, 0.25):
            client.append(np.full(FRAME, level))
        client.send("input_audio_buffer.commit")
        client.append(np.full(FRAME, 0.5), event_id="late")
        client.send("session.ping")
        order = client.rest()
    assert kinds(order)[:3] == ["session.created", "session.pong", "session.updated"]
    assert [m["text"] for m in order if m["type"] == "response.text.delta"] == ["<0.125>", "<0.250>"]
    assert [m["error"]["event_id"] for m in order if m["type"] == "error"] == ["late"]
    assert kinds(order)[-2:] == ["input_audio_buffer.committed", "response.done"]


def test_a_ping_does_not_wait_for_forty_frames(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.frame_s = 0.05
    with server.configured() as client:
        client.append(40 * FRAME)
        client.until("response.audio.delta")
        for _ in range(3):
            sent = time.monotonic()
            client.send("session.ping")
            client.until("session.pong")
            assert time.monotonic() - sent < 0.1
        assert pipeline.opened[0].frames_done < 40


def test_a_cancel_does_not_wait_for_minutes_of_audio(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.frame_s = 0.05
    with server.configured() as client:
        for _ in range(8):
            client.append(20 * 16000)
        sent = time.monotonic()
        client.send("response.cancel")
        assert client.rest()[-1]["type"] == "response.cancelled"
        assert time.monotonic() - sent < 0.5
    assert pipeline.opened[0].frames_fed <= 40  # the rest never left the connection


def test_a_cancel_while_the_session_opens(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.open_s = 0.3
    with server.connect() as client:
        client.expect("session.created")
        client.send("session.update")
        client.send("session.cancel")
        messages = client.rest()
        assert (kinds(messages), client.socket.close_code) == (["response.cancelled"], 1000)
    assert pipeline.closed == [pipeline.opened[0].id]


def test_a_client_that_leaves_while_its_session_opens_strands_nothing(
    server: RunningServer, pipeline: FakePipeline
) -> None:
    pipeline.open_s = 0.3
    for _ in range(2):
        client = server.connect()
        client.send("session.update")
        client.expect("session.created")
        client.vanish()
    with server.configured():
        until(lambda: len(pipeline.closed) == 2)


def test_clear_forgets_what_the_model_was_not_given(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        client.append(np.full(FRAME - 1, 0.25))
        client.send("input_audio_buffer.clear")
        client.expect("input_audio_buffer.cleared")
        client.append(np.full(FRAME, 0.5))
        messages = client.until("response.audio.delta")
        client.send("input_audio_buffer.commit")
        assert client.rest()[-1]["frame_index"] == 1
    assert messages[1]["text"] == "<0.500>"


def test_clear_while_much_waits_and_an_error_is_due_after_it(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.frame_s = 0.01
    with server.configured(max_streaming_seconds=8) as client:
        client.append(120 * FRAME)
        client.send("input_audio_buffer.clear")
        client.send("input_audio_buffer.commit")
        messages = client.rest()
    assert "error" in kinds(messages)
    assert kinds(messages)[-2:] == ["input_audio_buffer.committed", "response.done"]
    assert messages[-1]["frame_index"] < 100


# ------------------------------------------------------------------------------------------------------- odd input, one by one
def test_half_a_sample_is_refused_and_the_next_are_aligned(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        for size in (2561, 2559):
            client.send("input_audio_buffer.append", audio=base64.b64encode(bytes(size)).decode())
            client.expect_error("inference_error")
        client.send("session.ping")
        client.expect("session.pong")
        client.append(np.full(FRAME, 0.5))
        messages = client.until("response.audio.delta")
        client.send("input_audio_buffer.commit")
        assert client.rest()[-1]["frame_index"] == 1
    assert np.frombuffer(pcm_of(messages), "<i2").tolist() == [16384] * 1764


@pytest.mark.parametrize("audio", ["AAA*A==", "", None, 5])
def test_audio_that_is_none(server: RunningServer, pipeline: FakePipeline, audio: Any) -> None:
    with server.configured() as client:
        client.send("input_audio_buffer.append", audio=audio)
        if audio != "":
            client.expect_error("inference_error")
        client.send("session.ping")
        client.expect("session.pong")


def test_commit_at_once(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        client.send("input_audio_buffer.commit")
        messages = client.rest()
        assert (kinds(messages), client.socket.close_code) == (["input_audio_buffer.committed", "response.done"], 1000)
    assert messages[-1]["frame_index"] == 0


@pytest.mark.parametrize("seconds", [0.3, 0.5, 1.0, 1.5, 2.0, 10.0])
def test_commit_always_ends(server: RunningServer, pipeline: FakePipeline, seconds: float) -> None:
    with server.configured() as client:
        client.append(round(seconds * 16000))
        client.send("input_audio_buffer.commit")
        assert client.rest()[-1]["frame_index"] == -(-round(seconds * 16000) // FRAME)


def test_commit_without_padding(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        client.append(FRAME + 100)
        client.send("input_audio_buffer.commit", pad_partial=False)
        assert client.rest()[-1]["frame_index"] == 1


def test_messages_of_openai_clients(server: RunningServer, pipeline: FakePipeline) -> None:
    session = {
        "instructions": "Be brief.",
        "turn_detection": None,
        "voice": "alloy",
        "tools": [],
        "temperature": 1,
        "foo": 1,
    }
    with server.connect() as client:
        client.expect("session.created")
        client.send("session.update", session=session)
        updated = client.expect("session.updated")["session"]
        assert updated["system_prompt"] == "Be brief."
        assert updated["ignored_fields"] == ["foo", "temperature", "tools", "turn_detection", "voice"]
        client.send("response.create")
        client.send("conversation.item.create", item={}, event_id="c9")
        assert client.expect_error("invalid_request")["event_id"] == "c9"
        client.send("input_audio_buffer.clear")
        client.expect("input_audio_buffer.cleared")
        client.append(FRAME)
        assert client.until("response.audio.delta")
    assert pipeline.opened[0].options.system_prompt == "Be brief."


def test_model_names(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.connect("?model=other") as client:
        client.expect("session.created")
        client.send("session.update")
        error = client.expect_error("invalid_request")
        assert MODEL in error["message"] and error["param"] == "session.model"
        client.send("session.update", session={"model": "../../etc/passwd"})
        assert MODEL in client.expect_error("invalid_request")["message"]
        client.send("session.update", session={"model": MODEL})
        client.expect("session.updated")
    with server.connect(f"?model={MODEL}") as client:
        client.expect("session.created")
        client.send("session.update")
        assert client.expect("session.updated")["session"]["model"] == MODEL


def test_a_second_update_is_refused(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        client.send("session.update", session={"seed": 3})
        assert "cannot be reconfigured" in client.expect_error("invalid_request")["message"]
        client.append(FRAME)
        assert client.until("response.audio.delta")


def test_a_refused_opening_may_be_tried_again(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.refuse = "no such prompt"
    with server.connect() as client:
        client.expect("session.created")
        client.send("session.update", session={"seed": -1})
        assert "seed" in client.expect_error("session_initialization_failed")["message"]
        client.send("session.update", event_id="u")
        client.append(FRAME, event_id="a")
        error = client.expect_error("session_initialization_failed")
        assert (error["message"], error["event_id"]) == ("no such prompt", "u")
        assert client.expect_error("invalid_request")["event_id"] == "a"
        pipeline.refuse = None
        client.send("session.update")
        client.expect("session.updated")
        client.append(FRAME)
        assert client.until("response.audio.delta")[-1]["frame_index"] == 0


def test_binary_messages_and_other_json(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        for message in (b"\0\1\2", "[1, 2]", "5", "null", "{", '"x"', "[" * 100_000):
            client.socket.send(message)
            client.expect_error("invalid_request")
        client.append(FRAME)
        assert client.until("response.audio.delta")


# --------------------------------------------------------------------------------------------------------------- the limits
def test_the_context_limit(server: RunningServer, pipeline: FakePipeline) -> None:
    """What fits is worked on, its events come before the error; every further frame fails; commit still ends well."""
    with server.configured(max_streaming_seconds=0.25) as client:
        client.append(5 * FRAME, event_id="a")
        client.append(FRAME - 1, event_id="b")
        client.append(1, event_id="c")
        client.send("input_audio_buffer.commit")
        messages = client.rest()
    shown = [m.get("error", {}).get("event_id") or m["type"] for m in messages if m["type"] in AUDIO_AND_ENDS]
    assert shown == ["response.audio.delta"] * 3 + ["a", "c", "input_audio_buffer.committed", "response.done"]
    assert messages[-1]["frame_index"] == 3


def test_a_tail_beyond_the_limit_is_told(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured(max_streaming_seconds=0.16) as client:
        client.append(2 * FRAME + 7)
        client.send("input_audio_buffer.commit")
        messages = client.rest()
    order = [m["type"] for m in messages if m["type"] in AUDIO_AND_ENDS]
    assert order == ["response.audio.delta"] * 2 + ["input_audio_buffer.committed", "error", "response.done"]


def test_wishes_beyond_the_servers_limit_are_clamped(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.connect() as client:
        client.expect("session.created")
        client.send("session.update", session={"max_streaming_seconds": 1e9})
        assert client.expect("session.updated")["session"]["max_streaming_seconds"] == 600.0


@pytest.mark.parametrize("size", [2**20 + 100_000, 2 * 2**20, 20 * 2**20])
def test_a_message_that_is_too_long_closes_with_1009(server: RunningServer, pipeline: FakePipeline, size: int) -> None:
    with server.configured() as client:
        with contextlib.suppress(ConnectionClosed):
            client.send_text("x" * size)
        assert client.close_code() == 1009
        reason = client.socket.close_reason
    assert reason and "1048576" in reason


def test_a_message_just_below_the_limit(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        client.append(24 * 16000)
        client.send("input_audio_buffer.commit")
        assert client.rest()[-1]["frame_index"] == 300


def test_much_audio_in_one_message_to_a_slow_model() -> None:
    """A minute is taken and waits; ten are too much, and the session goes on."""
    pipeline = FakePipeline()
    limits = Limits(session_s=1e5)
    with running_server(pipeline.start, limits, max_message_bytes=2**25) as server, server.configured() as client:
        pipeline.frame_s = 0.2
        client.append(60 * 16000)
        client.send("session.ping")
        client.expect("session.pong")
        client.append(545 * 16000, event_id="much")
        error = client.until("error")[-1]["error"]
        assert (error["code"], error["event_id"]) == ("inference_error", "much")
        pipeline.frame_s = 0.0
        client.send("input_audio_buffer.commit")
        assert client.rest()[-1]["frame_index"] == 750


def test_time_limits() -> None:
    pipeline = FakePipeline()
    with running_server(pipeline.start, Limits(configure_s=0.2, idle_s=0.3, send_s=0.5)) as server:
        with server.connect() as client:
            client.expect("session.created")
            client.send("session.ping")
            client.expect("session.pong")
            assert "no session.update within 0.2 s" in client.expect_error("invalid_request")["message"]
            assert client.close_code() == 1008
        pipeline.frame_s = 0.05
        with server.configured() as client:
            started = time.monotonic()
            client.append(12 * FRAME)
            messages = client.rest()  # 0.6 s of work are no idleness
            assert time.monotonic() - started > 0.8
            assert (kinds(messages).count("response.audio.delta"), messages[-1]["type"]) == (12, "error")
            assert client.socket.close_code == 1008
        with server.configured():
            pass


def test_a_client_that_reads_nothing_holds_only_itself_back() -> None:
    pipeline = FakePipeline()
    with running_server(pipeline.start, Limits(send_s=0.5, outbox=8)) as server:
        client = server.connect(max_queue=1)
        client.expect("session.created")
        client.send("session.update")
        client.expect("session.updated")
        for _ in range(12):
            client.append(20 * 16000)
        until(lambda: server.server.reservations.taken == 0)
        assert pipeline.opened[0].frames_done < 3000
        with server.configured():
            pass
        client.vanish()
        assert 'end="limit"' in server.get("/metrics")[2]


def test_a_stage_that_hangs_does_not_keep_the_slot(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.close_may_end.clear()
    client = server.configured()
    client.vanish()
    with server.configured():
        assert pipeline.closed == []
    pipeline.close_may_end.set()


# ------------------------------------------------------------------------------------------------------ stages that fail
def test_a_session_that_fails_ends_with_1011(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured() as client:
        pipeline.opened[0].fail(ActorDiedError("codec ended while it was needed (signal SIGKILL)\nTraceback"))
        error = client.expect_error("inference_error")
        assert error["message"] == "codec ended while it was needed (signal SIGKILL)"
        assert (client.close_code(), client.socket.close_reason) == (1011, error["message"])


def test_a_dead_stage_is_named_and_the_next_session_starts_anew() -> None:
    pipeline = FakePipeline()
    with running_server(pipeline.start) as server:
        with server.configured():
            pipeline.dead_stages = ["codec"]
            pipeline.failure = ActorDiedError("codec ended while it was needed (signal SIGKILL)")
            until(lambda: server.json("/health")["status"] == "failed")
        status, _, body = server.get("/health")
        health = json.loads(body)
        assert (status, health["dead_stages"]) == (503, ["codec"])
        assert health["stages"]["codec"] == {"state": "dead"}
        assert 'vcpipe_stage_up{stage="codec"} 0' in server.get("/metrics")[2]
        with server.configured() as client:
            client.append(FRAME)
            assert client.until("response.audio.delta")
        assert (pipeline.starts, server.json("/health")["status"]) == (2, "ready")
        assert "vcpipe_pipeline_restarts_total 1" in server.get("/metrics")[2]


def test_while_the_model_loads() -> None:
    pipeline = FakePipeline()
    may_load = threading.Event()

    def start(hooks: Hooks) -> FakePipeline:
        hooks.on_progress(Loading("tts", "weights", 0.5))
        may_load.wait()
        return pipeline.start(hooks)

    with running_server(start) as server:
        status, _, body = server.get("/health")
        health = json.loads(body)
        assert (status, health["status"]) == (503, "loading")
        assert health["stages"]["tts"] == {"state": "loading", "step": "weights", "fraction": 0.5}
        for _ in range(2):  # one drops while its opening waits, the next must get in
            gone = server.connect()
            gone.expect("session.created")
            gone.send("session.update")
            gone.vanish()
        with server.connect() as client:
            client.expect("session.created")
            client.send("session.update")
            client.append(np.full(FRAME, 0.5))
            client.send("session.ping")
            client.expect("session.pong")
            may_load.set()
            client.expect("session.updated")
            assert client.until("response.audio.delta")[1]["text"] == "<0.500>"
        assert len(pipeline.opened) == 1
        assert server.get("/health")[0] == 200


def test_a_model_that_cannot_be_loaded() -> None:
    def start(hooks: Hooks) -> FakePipeline:
        raise ConfigError("config.json is missing")

    with running_server(start) as server, server.connect() as client:
        client.expect("session.created")
        client.send("session.update")
        assert client.expect_error("session_initialization_failed")["message"] == "config.json is missing"
        health = server.json("/health")
        assert {"stages", "sessions", "transcriptions", "speech", "dead_stages"} <= health.keys()
        assert (health["status"], health["model"], health["error"]) == ("failed", MODEL, "config.json is missing")


def test_two_sessions_at_a_time() -> None:
    pipeline = FakePipeline()
    with (
        running_server(pipeline.start, max_sessions=2) as server,
        server.configured() as first,
        server.configured() as second,
    ):
        with server.connect() as third:
            third.expect_error("server_busy")
        for client, level in ((first, 0.25), (second, 0.5)):
            client.append(np.full(FRAME, level))
        assert first.until("response.audio.delta")[1]["text"] == "<0.250>"
        assert second.until("response.audio.delta")[1]["text"] == "<0.500>"


def test_a_server_that_stops_tells_its_clients() -> None:
    pipeline = FakePipeline()
    with running_server(pipeline.start) as server:
        client = server.configured()
        started = time.monotonic()
    assert time.monotonic() - started < 3
    with pytest.raises(ConnectionClosed):
        client.receive()
    assert client.socket.close_code == 1012
    assert len(pipeline.closed) == 1


# -------------------------------------------------------------------------------------------------------- who may connect
@pytest.mark.parametrize(("origin", "admitted"), [(None, True), ("http://localhost:3000", True), ("null", False)])
def test_origins(server: RunningServer, pipeline: FakePipeline, origin: Any, admitted: bool) -> None:
    if admitted:
        with server.connect(origin=origin) as client:
            client.expect("session.created")
        return
    with pytest.raises(InvalidStatus) as caught:
        server.connect(origin=origin)
    assert caught.value.response.status_code == 403
    assert server.server.reservations.taken == 0


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    with running_server(FakePipeline().start, gate=Gate("K1")) as server:
        yield server


def test_keys_on_the_upgrade(keyed: RunningServer) -> None:
    for headers in ({}, {"Authorization": "Bearer K2"}):
        with pytest.raises(InvalidStatus) as caught:
            keyed.connect(additional_headers=headers)
        assert caught.value.response.status_code == 401
        assert b"K1" not in (caught.value.response.body or b"")
    with keyed.connect(additional_headers={"Authorization": "Bearer K1"}) as client:
        client.expect("session.created")
    with keyed.connect(subprotocols=["realtime", "openai-insecure-api-key.K1"]) as client:
        client.expect("session.created")
        assert client.socket.subprotocol == "realtime"
    with pytest.raises(InvalidStatus):
        keyed.connect(subprotocols=["realtime", "openai-insecure-api-key.K2"])


def test_keys_on_plain_requests(keyed: RunningServer) -> None:
    for path in ("/v1/models", "/metrics", "/v1/responses"):
        status, headers, body = keyed.get(path)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert "K1" not in body
        assert keyed.get(path, Authorization="Bearer K1")[0] in (200, 501)
    assert keyed.get("/health")[0] == 200
    assert keyed.get("/")[0] in (200, 404)


# ----------------------------------------------------------------------------------------------------------- plain requests
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_routes_of_chat_models_point_to_realtime(server: RunningServer, path: str) -> None:
    for method in ("GET", "POST"):
        status, _, body = server.get(path, method)
        assert status == 501
        assert "/v1/realtime" in json.loads(body)["error"]["message"]


def test_other_routes(server: RunningServer, pipeline: FakePipeline) -> None:
    assert server.json("/v1/models")["data"][0]["id"] == MODEL
    assert server.get("/v1/realtime")[0] == 426
    assert server.json("/health")["status"] == "ready"
    assert server.get("/nothing/here")[0] == 404
    assert server.get("/../serve.py")[0] == 404
    for path in ("/nothing", "/", "/v1/models"):
        with pytest.raises(InvalidStatus):
            server.connect(path=path)


def test_the_page_may_load_and_reach_nothing_else(server: RunningServer) -> None:
    _, headers, _ = server.get("/")
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["worker-src"] == "'self'"
    assert policy["connect-src"] == f"'self' ws://127.0.0.1:{server.port} wss://127.0.0.1:{server.port}"
    assert headers["x-content-type-options"] == "nosniff"
    assert "evil" not in server.get("/", Host="evil.example; script-src *")[1]["content-security-policy"]


def test_timings_for_those_that_ask(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured(timings=True) as client:
        client.append(FRAME)
        timing = client.until("vcpipe.frame_timing")[-1]
        assert (timing["frame_index"], timing["end_to_end_ms"], timing["frame_ms"]) == (0, 1.0, 80.0)
    with server.configured() as client:
        client.append(FRAME)
        client.send("input_audio_buffer.commit")
        assert "vcpipe.frame_timing" not in kinds(client.rest())


# --------------------------------------------------------------------------------------------------------------------- fuzz
def test_ten_thousand_random_messages(caplog: pytest.LogCaptureFixture) -> None:
    """No connection is dropped but by an end that was asked for; every slot comes back; every error is one of the four."""
    pipeline = FakePipeline()
    app = make_app(pipeline.start, ServerConfig(MODEL))
    random_ = random.Random(4)

    async def run() -> int:
        sent = 0
        async with app.router.lifespan_context(app):
            for connection in range(100):
                texts = [fuzz_message(random_) for _ in range(105)]
                if connection % 4 == 0:
                    texts.insert(0, json.dumps({"type": "session.update", "session": {"max_streaming_seconds": 2}}))
                sent += await fuzz_connection(app, texts)
                assert app.state.server.reservations.taken == 0
        return sent

    assert asyncio.run(run()) > 9_500
    assert len(pipeline.opened) > 20
    assert len(pipeline.closed) == len(pipeline.opened)
    assert [record for record in caplog.records if record.name.startswith("vcpipe")] == []


async def fuzz_connection(app: ASGIApp, texts: list[str | bytes]) -> int:
    """One connection without a socket: all messages, a ping, and the client is gone. Returns how many messages were read."""
    incoming = deque(texts)
    ponged = asyncio.Event()
    closed: list[int] = []

    async def receive() -> Message:
        if len(incoming) == len(texts):
            await asyncio.sleep(0)
        if not incoming:
            await asyncio.wait_for(ponged.wait(), TIMEOUT_S)
            return {"type": "websocket.disconnect", "code": 1006}
        text = incoming.popleft()
        return {"type": "websocket.receive", "bytes" if isinstance(text, bytes) else "text": text}

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        if message["type"] == "websocket.close":
            closed.append(message["code"])
        elif message["type"] == "websocket.send":
            said = json.loads(message["text"])
            if said["type"] == "error":
                assert said["error"]["code"] in ("invalid_request", "session_initialization_failed", "inference_error")
            if said["type"] == "session.pong" and not incoming:
                ponged.set()

    connected = iter([{"type": "websocket.connect"}])

    async def receive_from_connect() -> Message:
        for message in connected:
            return message
        return await receive()

    incoming.append(json.dumps({"type": "session.ping"}))
    scope = {
        "type": "websocket",
        "path": "/v1/realtime",
        "headers": [],
        "query_string": b"",
        "scheme": "ws",
        "server": ("127.0.0.1", 80),
        "subprotocols": [],
    }
    await app(scope, receive_from_connect, send)
    assert closed in ([], [1000])
    assert closed or not incoming
    return len(texts) - len(incoming)


def test_random_messages_over_sockets(server: RunningServer, pipeline: FakePipeline) -> None:
    random_ = random.Random(5)
    for connection in range(10):
        client = server.connect()
        if connection % 2:
            client.send("session.update", session={"max_streaming_seconds": 2})
        try:
            for _ in range(30):
                client.socket.send(fuzz_message(random_))
            client.send("session.ping")
            client.until("session.pong")
        except ConnectionClosed:
            assert client.socket.close_code == 1000
        client.vanish() if connection % 3 else client.close()
    with server.configured():
        pass


VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    2**70,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    "\ud800",
    "日本",
    "AAAA",
    "16000",
    [],
    {},
    [[]],
    {"a": 1},
    base64.b64encode(bytes(600)).decode(),
]
TYPES: list[Any] = [
    *["input_audio_buffer.append"] * 6,
    "input_audio_buffer.clear",
    "session.update",
    "session.ping",
    "response.create",
    "conversation.item.create",
    "",
    None,
    5,
    [],
    {},
    "\ud800",
    "session.created",
    "response.done",
]
#: Ends, so that not every connection has one.
ENDS = ("input_audio_buffer.commit", "session.cancel", "response.cancel")
FIELDS = ("audio", "sample_rate", "session", "event_id", "pad_partial", "item", "response", "model")
SESSION_FIELDS = ("model", "system_prompt", "instructions", "seed", "max_streaming_seconds", "timings", "voice")


def fuzz_message(random_: random.Random) -> str | bytes:
    choice = random_.random()
    if choice < 0.05:
        return random_.randbytes(random_.randrange(50))
    if choice < 0.1:
        return random_.choice(["", "{", "[]", "nul", '{"type":', "\0", "[" * 2000, "1e999", "\u2028", '"\\ud800"'])
    kind = random_.choice(ENDS) if random_.random() < 0.003 else random_.choice(TYPES)
    message: dict[str, Any] = {"type": kind} if random_.random() < 0.97 else {}
    for name in random_.sample(FIELDS, random_.randrange(4)):
        message[name] = random_.choice(VALUES)
    if random_.random() < 0.3:
        names = random_.sample(SESSION_FIELDS, random_.randrange(4))
        message["session"] = {name: random_.choice(VALUES) for name in names}
    text = json.dumps(message)
    if random_.random() < 0.05:
        at = random_.randrange(len(text))
        text = text[:at] + random_.choice('"{}[]\\,:0') + text[at + 1 :]
    return text
