"""Conversations with odd input, and the limits of each: real sockets, a pipeline of arithmetic."""

from __future__ import annotations

import base64
import contextlib
import math
import time
from typing import Any

import numpy as np
import pytest
from serving import (
    AUDIO_AND_ENDS,
    FRAME,
    MODEL,
    FakePipeline,
    RunningServer,
    changed,
    kinds,
    patient,
    pcm_of,
    running_server,
)
from waiting import PATIENCE_S, wait_until
from websockets.exceptions import ConnectionClosed

from vcpipe.launch.server import websocket_protocol


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
def test_a_message_that_is_too_long_closes_with_1009(
    server: RunningServer, pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    # A sender that nobody gives time in between is no sender that has come to its end.
    monkeypatch.setattr(websocket_protocol, "_QUIET_S", 1.0)
    monkeypatch.setattr(websocket_protocol, "_LINGER_S", PATIENCE_S)
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
    limits = patient(session_s=1e5)
    with running_server(pipeline.start, limits, max_message_bytes=2**25) as server, server.configured() as client:
        pipeline.allow(0)
        client.append(60 * 16000)
        client.send("session.ping")
        client.expect("session.pong")
        client.append(545 * 16000, event_id="much")
        error = client.until("error")[-1]["error"]
        assert (error["code"], error["event_id"]) == ("inference_error", "much")
        pipeline.allow(math.inf)
        client.send("input_audio_buffer.commit")
        assert client.rest()[-1]["frame_index"] == 750


def test_a_client_that_only_pings_is_given_up() -> None:
    with running_server(FakePipeline().start, patient(configure_s=0.2)) as server, server.connect() as client:
        client.expect("session.created")
        message = {"type": "session.pong"}
        while message["type"] == "session.pong":
            with contextlib.suppress(ConnectionClosed):  # the last word may be on its way
                client.send("session.ping")
            message = client.receive()
        assert "no session.update within 0.2 s" in message["error"]["message"]
        assert client.close_code() == 1008


def test_a_client_that_says_nothing_is_given_up() -> None:
    pipeline = FakePipeline()
    limits = patient()
    with running_server(pipeline.start, limits) as server:
        pipeline.frame_s = 0.05
        pipeline.allow(0)
        with server.configured() as client:
            client.append(12 * FRAME)
            wait_until(lambda: pipeline.opened[0].frames_fed == 12)
            with changed(limits, idle_s=0.3):
                started = time.monotonic()
                pipeline.allow(math.inf)
                messages = client.rest()  # 0.6 s of work are no idleness
                assert time.monotonic() - started >= 0.85
            assert (kinds(messages).count("response.audio.delta"), messages[-1]["type"]) == (12, "error")
            assert client.socket.close_code == 1008
        with server.configured():
            pass


def test_a_client_that_reads_nothing_holds_only_itself_back() -> None:
    pipeline = FakePipeline()
    with running_server(pipeline.start, patient(send_s=0.5, outbox=8)) as server:
        client = server.connect(max_queue=1)
        client.expect("session.created")
        client.send("session.update")
        client.expect("session.updated")
        pipeline.allow(0)  # a client that holds what it was sent sends nothing
        for _ in range(12):
            client.append(20 * 16000)
        pipeline.allow(math.inf)
        wait_until(lambda: server.server.reservations.taken == 0)
        assert pipeline.opened[0].frames_done < 3000
        with server.configured():
            pass
        client.vanish()
        assert 'end="limit"' in server.get("/metrics")[2]


def test_a_stage_that_hangs_does_not_keep_the_slot() -> None:
    pipeline = FakePipeline()
    with running_server(pipeline.start, patient(teardown_s=0.3)) as server:
        pipeline.close_may_end.clear()
        client = server.configured()
        client.vanish()
        with server.configured():
            assert pipeline.closed == []
        pipeline.close_may_end.set()
        wait_until(lambda: len(pipeline.closed) == 2)
