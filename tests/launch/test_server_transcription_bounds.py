"""Transcription over /v1/realtime: what is bounded, and what is told of an end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time

import pytest
from serving import Client, RunningServer, changed, kinds, patient
from transcribing import (
    DELTA,
    DONE,
    FRAME,
    RATE,
    TAIL,
    messages,
    said,
    transcribing,
    transcribing_server,
    turn_of,
)
from waiting import PATIENCE_S, assert_quick, wait_until
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode

from vcpipe.launch.server.security import Gate


def test_a_turn_is_bounded_and_the_next_one_is_free(transcriber: RunningServer) -> None:
    with transcribing(transcriber, max_streaming_seconds=0.5) as client:
        client.append(RATE)
        error = [m for m in client.until("error") if m["type"] == "error"][0]["error"]
        assert "a turn is limited to 0.5 s" in error["message"]
        client.send("input_audio_buffer.commit")
        assert client.until(DONE)[-2]["usage"]["seconds"] == 0.5
        client.append(messages(4))
        client.send("input_audio_buffer.commit")
        assert turn_of(client.until(DONE)) == said(4)


def test_much_audio_at_once_waits_for_the_model_and_none_is_lost(transcriber: RunningServer) -> None:
    with transcribing(transcriber) as client:
        for _ in range(4):  # 80 s: more than the pipeline takes at a time
            client.append(20 * RATE)
        client.send("session.ping")
        client.send("input_audio_buffer.commit")
        received = client.until(DONE)
        assert received[-2]["usage"]["seconds"] == 80.0
        texts = [m["delta"] for m in received if m["type"] == DELTA]
        assert len(texts) == 506 and texts[-2:] == [" w1008", " end"]


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
        wait_until(lambda: server.server.transcriptions.taken == 0)
        for line in (
            'vcpipe_transcription_sessions_total{end="disconnected"} 2',
            f'vcpipe_side_frames_total{{task="transcription"}} {2 * (4 + TAIL)}',
            "vcpipe_frames_total 3",
            "vcpipe_transcriptions_max 2",
        ):
            wait_until(lambda line=line: line in server.get("/metrics")[2], line)


def test_time_limits_and_a_client_that_reads_nothing() -> None:
    limits = patient(send_s=0.5, outbox=4)
    with transcribing_server(limits=limits) as server:
        with changed(limits, configure_s=0.2), server.connect("?intent=transcription") as client:
            client.expect("session.created")
            assert "no session.update" in client.expect_error("invalid_request")["message"]
            assert client.close_code() == 1008
        with transcribing(server) as client:
            client.append(messages(2))
            with changed(limits, idle_s=0.4):
                assert "no message within 0.4 s" in client.until("error")[-1]["error"]["message"]
            assert client.close_code() == 1008
        deaf = server.connect("?intent=transcription", max_queue=1)
        deaf.send("session.update")
        deaf.socket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        talking = threading.Thread(target=talk, args=[deaf], daemon=True)
        talking.start()
        with transcribing(server) as client:
            client.append(messages(4))
            client.send("input_audio_buffer.commit")
            assert turn_of(client.until(DONE)) == said(4)
        wait_until(lambda: server.server.transcriptions.taken == 0)
        deaf.vanish()
        talking.join(PATIENCE_S)


def talk(deaf: Client) -> None:
    """Ask for more answers than anything on the way can hold, until the connection is broken off.

    Past the client, which sends nothing while it holds what it was sent.
    """
    asked = json.dumps({"type": "nonsense", "event_id": "e" * 200}).encode()
    with contextlib.suppress(OSError):
        while True:
            deaf.socket.socket.sendall(100 * Frame(Opcode.TEXT, asked).serialize(mask=True))


def test_a_client_that_vanishes_frees_its_slot(transcriber: RunningServer) -> None:
    client = transcribing(transcriber)
    client.append(messages(200))
    client.vanish()
    wait_until(lambda: transcriber.server.transcriptions.taken == 0)


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
    def attempt() -> float:
        codes: list[int | None] = []
        with transcribing_server() as server:
            client = transcribing(server)
            client.append(messages(3))
            client.until(DELTA)
            reader = threading.Thread(target=lambda: codes.append(client.close_code()))
            reader.start()
            started = time.monotonic()
        reader.join(PATIENCE_S)
        seconds = time.monotonic() - started
        assert codes == [1012]
        client.close()
        return seconds

    assert_quick(attempt, 8.0)


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
