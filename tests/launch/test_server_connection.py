"""A conversation's messages, in order: real sockets, a pipeline of arithmetic."""

from __future__ import annotations

import base64
import logging
import math

import numpy as np
import pytest
from serving import AUDIO_AND_ENDS, FRAME, MODEL, FakePipeline, RunningServer, kinds
from waiting import wait_until


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
    pipeline.allow(1)
    with server.configured() as client:
        client.append(np.repeat([0.1, 0.2, 0.3, 0.4], FRAME))
        first = client.until("response.audio.delta")
        pipeline.allow(math.inf)  # till then the append was still being worked on
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
    pipeline.allow(1)
    client = server.configured()
    client.append(30 * FRAME)
    client.until("response.audio.delta")
    client.vanish()
    with server.configured() as second:
        pipeline.allow(math.inf)
        second.append(FRAME)
        messages = second.until("response.audio.delta")
    assert [m["frame_index"] for m in messages] == [0] * 4
    wait_until(lambda: len(pipeline.closed) == 2)
    assert pipeline.opened[0].frames_done == 1
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
    wait_until(lambda: len(pipeline.closed) == 1)
    assert pipeline.opened[0].aborted
    with server.configured() as client:
        client.send("input_audio_buffer.commit")
        client.rest()
    wait_until(lambda: len(pipeline.closed) == 2)
    assert not pipeline.opened[1].aborted


def test_twenty_immediate_reconnects_are_never_refused(server: RunningServer, pipeline: FakePipeline) -> None:
    for index in range(20):
        client = server.configured()
        client.append(3 * FRAME)
        client.until("response.audio.delta")
        client.vanish() if index % 2 else client.close()
    wait_until(lambda: len(pipeline.closed) == 20)


# ------------------------------------------------------------------------------------------------------------- what waits
def test_messages_from_the_first_byte_on_are_taken_in_order(server: RunningServer, pipeline: FakePipeline) -> None:
    """Nothing is lost, and nothing overtakes, while a session is being opened."""
    pipeline.open_may_end.clear()
    with server.connect() as client:
        client.send("session.update", session={"seed": 1})
        for level in (0.125, 0.25):
            client.append(np.full(FRAME, level))
        client.send("input_audio_buffer.commit")
        client.append(np.full(FRAME, 0.5), event_id="late")
        client.send("session.ping")
        order = client.until("session.pong")
        pipeline.open_may_end.set()
        order += client.rest()
    assert kinds(order)[:3] == ["session.created", "session.pong", "session.updated"]
    assert [m["text"] for m in order if m["type"] == "response.text.delta"] == ["<0.125>", "<0.250>"]
    assert [m["error"]["event_id"] for m in order if m["type"] == "error"] == ["late"]
    assert kinds(order)[-2:] == ["input_audio_buffer.committed", "response.done"]


def test_a_ping_does_not_wait_for_forty_frames(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.allow(1)
    with server.configured() as client:
        client.append(40 * FRAME)
        client.until("response.audio.delta")
        for _ in range(3):
            client.send("session.ping")
            client.expect("session.pong")


def test_a_cancel_does_not_wait_for_minutes_of_audio(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.allow(0)
    with server.configured() as client:
        for _ in range(8):
            client.append(20 * 16000)
        client.send("response.cancel")
        assert kinds(client.rest()) == ["response.cancelled"]
    assert pipeline.opened[0].frames_fed <= 40  # the rest never left the connection


def test_a_cancel_while_the_session_opens(server: RunningServer, pipeline: FakePipeline) -> None:
    pipeline.open_may_end.clear()
    with server.connect() as client:
        client.expect("session.created")
        client.send("session.update")
        wait_until(lambda: pipeline.openings == 1)
        client.send("session.cancel")
        client.expect("response.cancelled")
        pipeline.open_may_end.set()
        assert (client.rest(), client.socket.close_code) == ([], 1000)
    assert pipeline.closed == [pipeline.opened[0].id]


def test_a_client_that_leaves_while_its_session_opens_strands_nothing(
    server: RunningServer, pipeline: FakePipeline
) -> None:
    for count in (1, 2):
        pipeline.open_may_end.clear()
        client = server.connect()
        client.send("session.update")
        client.expect("session.created")
        wait_until(lambda count=count: pipeline.openings == count)  # type: ignore[misc]
        client.vanish()
        wait_until(lambda: server.server.reservations._leaving == 1)
        pipeline.open_may_end.set()
        wait_until(lambda count=count: len(pipeline.opened) == count)  # type: ignore[misc]
    with server.configured():
        wait_until(lambda: len(pipeline.closed) == 2)


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
    pipeline.allow(0)
    with server.configured(max_streaming_seconds=8) as client:
        client.append(120 * FRAME)
        client.send("input_audio_buffer.clear")
        client.send("input_audio_buffer.commit")
        client.send("session.ping")
        messages = client.until("session.pong")
        pipeline.allow(math.inf)
        messages += client.rest()
    assert "error" in kinds(messages)
    assert kinds(messages)[-2:] == ["input_audio_buffer.committed", "response.done"]
    assert messages[-1]["frame_index"] < 100


def test_timings_for_those_that_ask(server: RunningServer, pipeline: FakePipeline) -> None:
    with server.configured(timings=True) as client:
        client.append(FRAME)
        timing = client.until("vcpipe.frame_timing")[-1]
        assert (timing["frame_index"], timing["end_to_end_ms"], timing["frame_ms"]) == (0, 1.0, 80.0)
    with server.configured() as client:
        client.append(FRAME)
        client.send("input_audio_buffer.commit")
        assert "vcpipe.frame_timing" not in kinds(client.rest())
