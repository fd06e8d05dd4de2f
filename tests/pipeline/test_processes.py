"""Actors that start, fail, hang, die and leave. Every wait is bounded, and nothing stays behind."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from waiting import PATIENCE_S, assert_quick, wait_until

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.envelope import PROTOCOL
from vcpipe.schemas.errors import (
    ActorDiedError,
    ActorStartupError,
    ConfigError,
    PipelineClosedError,
    StageTimeoutError,
    VcpipeError,
)
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import STAGES
from vcpipe.schemas.reports import Loading

pytestmark = pytest.mark.process

Start = Callable[..., Pipeline]


def silence(frames: int) -> np.ndarray:
    return np.zeros(frames * 1280, np.float32)


@pytest.fixture
def nothing_left(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Afterwards no further child, no socket folder and no open file is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))

    def state() -> tuple[set[int], set[str], int]:
        children = {child.pid for child in psutil.Process().children(recursive=True)}
        return children, set(os.listdir(short_folder)), psutil.Process().num_fds()

    before = state()
    yield short_folder
    wait_until(lambda: state() == before, "everything is as it was")


# -- running


def test_every_actor_is_a_process_of_its_own_group(pipeline: Pipeline) -> None:
    """Ctrl-C goes to the parent's group: it must not reach them."""
    assert list(pipeline.pids) == list(STAGES)
    assert len({os.getpid(), *pipeline.pids.values()}) == 5
    for pid in pipeline.pids.values():
        assert os.getpgid(pid) == pid != os.getpgid(0)


def test_ready_tells_what_was_started(pipeline: Pipeline) -> None:
    for stage, ready in pipeline.ready.items():
        assert (ready.pid, ready.protocol, ready.stage) == (pipeline.pids[stage], PROTOCOL, stage)
        assert ready.device in ("cpu", "gpu")
    assert pipeline.ready["codec"].prompt_codes is not None
    assert pipeline.warnings == []


def test_only_the_speech_decoder_is_told_to_bound_its_history(start: Start) -> None:
    assert start(tts_history_frames=99).warnings == ["tts sees 99 frames"]


def test_progress_is_told_while_the_stages_load(start: Start) -> None:
    told: list[Loading] = []
    start("perception", "language", on_progress=told.append)
    for stage in ("perception", "language"):
        steps = [(loading.step, loading.fraction) for loading in told if loading.stage == stage]
        assert steps == [("starting", 0.0), ("loading", 0.5), ("warming up", 1.0)]


# -- starts that fail


@pytest.mark.parametrize(
    ("way", "kind", "complaint"),
    [
        ("config", ConfigError, "^language: hidden_size is missing in config.json; accepted: a positive integer$"),
        ("weights", VcpipeError, "^language: 3 tensors are missing, llm.layers.0.norm.weight among them$"),
        ("bug", ActorStartupError, r"language ended while it was starting \(exit code 1\): ZeroDivisionError: div"),
        ("exit", ActorStartupError, r"\(exit code 127\); its last words:\nlibmlx.so: cannot open shared object file"),
        ("protocol", ActorStartupError, f"language speaks protocol 99, this side {PROTOCOL}"),
    ],
)
def test_a_start_that_fails_says_why(
    start: Start, nothing_left: Path, monkeypatch: pytest.MonkeyPatch, way: str, kind: type, complaint: str
) -> None:
    monkeypatch.setenv("FAKE_START", way)
    with pytest.raises(kind, match=complaint) as caught:
        start("perception", "language", language="fakes_start")
    assert ("Traceback" in str(caught.value)) == (way == "bug")


def test_a_stage_without_a_module_says_so(start: Start, nothing_left: Path) -> None:
    with pytest.raises(ActorStartupError, match="ModuleNotFoundError: No module named 'no_such_stage'"):
        start("perception", perception="no_such_stage")


def test_a_start_is_bounded(start: Start, nothing_left: Path) -> None:
    def attempt() -> float:
        started = time.monotonic()
        with pytest.raises(ActorStartupError, match="^perception not ready after 0.7 s$"):
            start("perception", perception="fakes_slow", startup_timeout_s=0.7)
        return time.monotonic() - started

    assert_quick(attempt, 3.0)


def test_a_pipeline_that_is_closed_before_it_starts_starts_nothing(start: Start, nothing_left: Path) -> None:
    with pytest.raises(PipelineClosedError):
        start("perception", on_start=Pipeline.close)


def test_a_start_ends_where_another_thread_closes_the_pipeline(start: Start, nothing_left: Path) -> None:
    given: list[Pipeline] = []
    closing = threading.Thread(target=lambda: given[0].close(graceful_s=0.1))

    def close(loading: Loading) -> None:
        if loading.step == "loading":
            closing.start()

    with pytest.raises(PipelineClosedError):
        start("perception", perception="fakes_slow", on_start=given.append, on_progress=close)
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_without_a_checkpoint_nothing_is_started(nothing_left: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Pipeline(PipelineConfig(nothing_left / "nowhere"))


# -- actors that die


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("raise", r"language ended while it was needed \(exit code 1\): RuntimeError: a bug in the network\nTraceback"),
        ("exit", r"language ended while it was needed \(exit code 9\)"),
        ("abort", r"language ended while it was needed \(signal SIGABRT\); its last words:\nFatal Python error: Abort"),
    ],
)
def test_an_actor_that_dies_is_named_with_its_last_words(
    start: Start, nothing_left: Path, fault: str, complaint: str
) -> None:
    def attempt() -> float:
        pipeline = start("perception", "language")
        session = pipeline.open_session(system_prompt=f"language:{fault}@2")
        started = time.monotonic()
        with pytest.raises(ActorDiedError, match=complaint) as caught:
            session.push_audio(silence(5))
        noticed = time.monotonic()
        assert fault == "exit" or "fakes.py" in str(caught.value)
        with pytest.raises(ActorDiedError, match=complaint):
            pipeline.open_session()
        session.close()
        closing = time.monotonic()
        pipeline.close()
        return max(noticed - started, time.monotonic() - closing)

    assert_quick(attempt, 1.0)


def test_a_killed_actor_is_noticed_within_a_second_by_every_session(start: Start, nothing_left: Path) -> None:
    def attempt() -> float:
        pipeline = start("perception", "language")
        waiting = pipeline.open_session(clock="stepped")
        waiting.feed(silence(3))
        with pipeline.open_session() as session:
            session.push_audio(silence(3))
            os.kill(pipeline.pids["language"], signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(ActorDiedError, match=r"language ended while it was needed \(signal SIGKILL\)"):
                while True:
                    session.push_audio(silence(1))
            with pytest.raises(ActorDiedError, match="SIGKILL"):
                list(waiting.events())
            seconds = time.monotonic() - started
        pipeline.close()
        return seconds

    assert_quick(attempt, 1.0)


def test_a_session_opened_while_an_actor_dies_is_not_forgotten(start: Start, nothing_left: Path) -> None:
    """Every opening ends at once, whether it was asked for before, while or after the death was noticed."""

    def attempt() -> float:
        pipeline = start("perception")
        os.kill(pipeline.pids["perception"], signal.SIGKILL)
        started = time.monotonic()
        for _ in range(50):
            with pytest.raises(ActorDiedError, match="SIGKILL"):
                pipeline.open_session()
        seconds = time.monotonic() - started
        pipeline.close()
        return seconds

    assert_quick(attempt, 2.0)


def test_a_step_that_hangs_ends_within_its_bound(start: Start, nothing_left: Path) -> None:
    def attempt() -> float:
        pipeline = start("perception", "language", step_timeout_s=0.5)
        session = pipeline.open_session(system_prompt="language:hang@1")
        started = time.monotonic()
        with pytest.raises(StageTimeoutError) as caught:
            session.push_audio(silence(5))
        seconds = time.monotonic() - started
        # On a machine that stood still the bound may be over before the frame has come to its stage.
        if "language" not in str(caught.value):
            seconds = math.inf
        # The stuck step is seen in its stage's beats, and then nobody may start a session on it.
        wait_until(lambda: _refusal(pipeline) == "language has been in one step for more than 0.5 s")
        pipeline.close(graceful_s=0.2)
        return seconds

    assert_quick(attempt, 2.0)


def test_many_short_steps_are_no_long_one(start: Start, nothing_left: Path) -> None:
    """A beat in the middle of a step says nothing of the time until the next beat."""

    def all_come() -> bool:
        with contextlib.closing(start("perception", step_timeout_s=0.9)) as pipeline:
            try:
                with pipeline.open_session(system_prompt="perception:sleep=0.02") as session:
                    session.feed(silence(110))
                    session.end()
                    return list(session.events(PATIENCE_S))[-1] == Event("done", 110)
            except StageTimeoutError:
                return False

    # A machine that stood still may have made one of the steps a long one.
    assert any(all_come() for _ in range(5))


def _refusal(pipeline: Pipeline) -> str:
    try:
        pipeline._submit(lambda: None)
    except VcpipeError as error:
        return str(error)
    return ""


def test_close_walks_the_ladder_to_its_end(start: Start, nothing_left: Path) -> None:
    """A stopped process answers neither Shutdown nor SIGTERM; frames are queued for it."""

    def attempt() -> float:
        pipeline = start()
        pids = pipeline.pids
        session = pipeline.open_session()
        os.kill(pids["language"], signal.SIGSTOP)
        session.feed(silence(100))
        started = time.monotonic()
        pipeline.close(graceful_s=0.5)
        seconds = time.monotonic() - started
        assert seconds >= 1.5
        assert not any(psutil.pid_exists(pid) for pid in pids.values())
        return seconds

    assert_quick(attempt, 3.0)


def test_the_ladder_gives_a_busy_step_time_to_end(start: Start, nothing_left: Path) -> None:
    pipeline = start("perception")
    session = pipeline.open_session(system_prompt="perception:sleep=0.4")
    session.feed(silence(3))
    process = psutil.Process(pipeline.pids["perception"])
    pipeline.close(graceful_s=30.0)
    assert not process.is_running()
    assert [p.wait(0) for p in pipeline._processes] == [0]


def test_leaving_the_block_by_an_exception_stops_everything(start: Start, nothing_left: Path) -> None:
    with pytest.raises(ZeroDivisionError), start("perception", "language") as pipeline:
        pipeline.open_session().feed(silence(10))
        raise ZeroDivisionError


# -- nothing accumulates


def test_twenty_cancelled_sessions_leave_nothing(shared: Any, short_folder: Path) -> None:
    pipeline: Pipeline = shared.pipeline
    processes = [psutil.Process(pid) for pid in (os.getpid(), *pipeline.pids.values())]

    def state() -> list[Any]:
        files = sorted(str(path) for path in short_folder.rglob("*"))
        return [files, [(process.num_fds(), process.num_threads()) for process in processes]]

    def shared_memory() -> set[str]:
        return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    first = _a_cancelled_session(pipeline)
    wait_until_idle(pipeline)  # the control pipes, which a cancel is the first to use, are connected
    before, segments = state(), shared_memory()
    memory = [process.memory_info().rss for process in processes]
    for _ in range(20):
        assert _a_cancelled_session(pipeline) == first
    wait_until(lambda: state() == before, "everything is as it was")
    # Others may use it meanwhile, but hardly once for every session.
    assert len(shared_memory() - segments) < 20
    grown = [process.memory_info().rss - rss for process, rss in zip(processes, memory, strict=True)]
    assert max(grown) < 20 << 20  # 1 MiB a session and process
    wait_until_idle(pipeline)
    assert pipeline._coordinator.sessions == 0


def wait_until_idle(pipeline: Pipeline) -> None:
    """Until every stage has said anew that it does nothing and holds no session."""
    before = pipeline.beats

    def idle() -> bool:
        beats = pipeline.beats
        return all(
            beats[stage] is not before[stage] and beats[stage].sessions == beats[stage].busy_since_ns == 0
            for stage in STAGES
        )

    wait_until(idle, "idle stages")


def _a_cancelled_session(pipeline: Pipeline) -> list[str | None]:
    """The texts of the first frames of a session that is cancelled with frames in flight."""
    with pipeline.open_session(seed=1) as session:
        events = session.push_audio(silence(3))
        session.feed(silence(8))
        session.cancel()
    return [event.text for event in events]


# -- endpoints


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def test_pipes_may_be_tcp(start: Start, nothing_left: Path) -> None:
    pipeline = _start_on_free_ports(start)
    assert os.listdir(pipeline._folder) == []
    with pipeline.open_session() as session:
        events = session.push_audio(silence(20)) + session.flush()
    assert events[-1] == Event("done", 20)
    with pipeline.open_session() as session:
        session.feed(silence(20))
        assert [event.kind for event in session.cancel()] == ["cancelled"]
    pipeline.close()


def _start_on_free_ports(start: Start) -> Pipeline:
    names = ["reports", "perception.in", "perception.control", "language.in", "language.control"]
    for _ in range(10):
        endpoints = {name: f"tcp://127.0.0.1:{port}" for name, port in zip(names, free_ports(5), strict=True)}
        # Somebody else may have been faster to take one of them.
        with contextlib.suppress(ConfigError, ActorStartupError):
            return start("perception", "language", endpoints=endpoints)
    return start("perception", "language", endpoints=endpoints)


@pytest.fixture
def taken() -> Iterator[str]:
    """An endpoint that somebody else has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"tap": "TAKEN"},
            "the tap cannot bind 'TAKEN': Address already in use.*; give a free endpoint such as tcp://",
        ),
        ({"tap": "5599"}, "the tap cannot bind '5599': Invalid argument"),
        ({"endpoints": {"reports": "TAKEN"}}, "the pipeline cannot bind 'TAKEN': Address already in use"),
    ],
)
def test_an_endpoint_that_cannot_be_bound_is_named(
    start: Start, nothing_left: Path, taken: str, fields: dict[str, Any], complaint: str
) -> None:
    endpoints = dict.fromkeys(fields.get("endpoints", {}), taken)
    tap = fields.get("tap")
    with pytest.raises(ConfigError, match=complaint.replace("TAKEN", taken)):
        start("perception", endpoints=endpoints, tap=taken if tap == "TAKEN" else tap)


def test_a_stage_whose_endpoint_is_taken_says_so_in_one_line(start: Start, nothing_left: Path, taken: str) -> None:
    with pytest.raises(
        ActorStartupError, match=f"perception ended .*\nthe stage cannot bind '{taken}': Address"
    ) as caught:
        start("perception", endpoints={"perception.in": taken})
    assert "Traceback" not in str(caught.value)


def test_a_folder_too_long_for_sockets_is_named(
    start: Start, tmp_path: Path, nothing_left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="is longer than 103 bytes; set TMPDIR to a shorter folder"):
        start("perception")
    assert os.listdir(deep) == []
