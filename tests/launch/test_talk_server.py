"""``vcpipe talk`` with real actors on the tiny checkpoint: through its own server, and through ``vcpipe serve``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import PATIENCE_S, is_alive

DATA = Path(__file__).parent.parent / "data"
MODEL = ("--model", str(DATA / "tiny" / "bf16"))
SPEAK = ("--audio", str(DATA / "golden" / "input.wav"), "-p", "be concise", "--extra-seconds", "0")
GOLDEN = json.loads((DATA / "golden" / "stream_bf16_seed0_prompt.json").read_text(encoding="utf-8"))

pytestmark = pytest.mark.process


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vcpipe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)


def pcm(path: Path) -> bytes:
    with wave.open(str(path)) as file:
        return file.readframes(file.getnframes())


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What ``vcpipe run`` says."""
    path = tmp_path_factory.mktemp("run") / "out.wav"
    done = run("run", *MODEL, *SPEAK, "--output-audio", str(path))
    assert done.returncode == 0, done.stderr
    return pcm(path)


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Address of a ``vcpipe serve`` that asks for the key K."""
    command = [sys.executable, "-m", "vcpipe", "serve", *MODEL, "--port", "0", "--api-key", "K"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = next(line for line in server.stderr if "listening on" in line)
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found, line
            yield found[0]
        finally:
            server.terminate()
            server.communicate(timeout=PATIENCE_S)


def test_talk_prints_transcript_and_answer_and_writes_what_run_writes(spoken: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    done = run("talk", *MODEL, *SPEAK, "--output-audio", str(out))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"   you: {GOLDEN['transcript']}", f"answer: {GOLDEN['text']}"]
    assert pcm(out) == spoken and len(spoken) == 31 * 1764 * 2
    assert "31 frames (2.48 s)" in done.stderr


def test_the_same_through_vcpipe_serve_and_again(served: str, spoken: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    for _ in range(2):
        done = run("talk", "--url", served, "--api-key", "K", *SPEAK, "--output-audio", str(out), "--json")
        assert done.returncode == 0, done.stderr
        *messages, summary = map(json.loads, done.stdout.splitlines())
        assert pcm(out) == spoken
        assert (summary["text"], summary["transcript"]) == (GOLDEN["text"], GOLDEN["transcript"])
        assert [m["frame_index"] for m in messages if m["type"] == "response.audio.delta"] == list(range(31))
        assert [m["type"] for m in messages][-1] == "response.done"


def test_a_wrong_key(served: str) -> None:
    done = run("talk", "--url", served, "--api-key", "L", *SPEAK)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ws://127.0.0.1:") and "answered HTTP 401" in done.stderr


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    done = run("talk", "--model", str(tmp_path), *SPEAK)
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1 and "config.json" in done.stderr


def test_ctrl_c_commits_leaves_a_whole_wav_and_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    arguments = (*MODEL, "--audio", SPEAK[1], "--pace", "real", "--extra-seconds", "60", "--output-audio", str(out))
    command = psutil.Popen(
        [sys.executable, "-m", "vcpipe", "talk", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with command:
        for _ in range(5):
            while "response.audio.delta" not in (line := command.stdout.readline()):
                assert line, "it ended"
        actors = command.children(recursive=True)
        os.killpg(command.pid, signal.SIGINT)
        rest, errors = command.communicate(timeout=PATIENCE_S)
    summary = json.loads(rest.splitlines()[-1])
    assert (command.returncode, errors) == (130, "")
    assert len(actors) == 4 and not any(map(is_alive, actors))
    assert summary["frames"] >= 5 and len(pcm(out)) == summary["frames"] * 1764 * 2
