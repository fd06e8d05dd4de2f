"""Stages that fail, models that do not load, a server that stops: what the clients of conversations are told."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
from serving import FRAME, MODEL, FakePipeline, RunningServer, running_server
from waiting import assert_quick, wait_until
from websockets.exceptions import ConnectionClosed

from vcpipe.launch.server.engine import Hooks
from vcpipe.schemas.errors import ActorDiedError, ConfigError
from vcpipe.schemas.reports import Loading


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
            wait_until(lambda: server.json("/health")["status"] == "failed")
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
        wait_until(lambda: "step" in server.json("/health")["stages"]["tts"])
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
    def attempt() -> float:
        pipeline = FakePipeline()
        with running_server(pipeline.start) as server:
            client = server.configured()
            started = time.monotonic()
        seconds = time.monotonic() - started
        with pytest.raises(ConnectionClosed):
            client.receive()
        assert client.socket.close_code == 1012
        assert len(pipeline.closed) == 1
        return seconds

    assert_quick(attempt, 3.0)
