"""``vcpipe serve`` as a user meets it: real processes on the tiny checkpoint, real sockets."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from serving import FRAME, Client, kinds, pcm_of
from waiting import PATIENCE_S, assert_quick, wait_until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

TESTS = Path(__file__).parent.parent
CHECKPOINT = TESTS / "data" / "tiny" / "bf16"
QUESTION = TESTS.parent / "docs" / "question.wav"

pytestmark = pytest.mark.process


class Served:
    """A running ``vcpipe serve`` on a free port."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._err = folder / "err"
        with self._err.open("wb") as err:
            self.process = psutil.Popen(
                [sys.executable, "-m", "vcpipe", "serve", "--port", "0", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": str(folder)},
                start_new_session=True,
            )
        self.folder = folder
        wait_until(lambda: re.search(r":\d+, loading", self.stderr) or self.process.poll() is not None)
        found = re.search(r"http://127\.0\.0\.1:(\d+),", self.stderr)
        assert found, self.stderr
        self.port = int(found[1])

    @property
    def stderr(self) -> str:
        return self._err.read_text(encoding="utf-8")

    def connect(self) -> Client:
        url = f"ws://127.0.0.1:{self.port}/v1/realtime"
        patience = {"open_timeout": PATIENCE_S, "close_timeout": PATIENCE_S, "ping_interval": None}
        return Client(connect(url, max_size=None, max_queue=None, compression=None, **patience))

    def configured(self, **session: object) -> Client:
        client = self.connect()
        client.expect("session.created")
        client.send("session.update", session=session)
        assert client.receive(4 * PATIENCE_S)["type"] == "session.updated"
        return client

    def health(self) -> dict:
        command = ["curl", "-s", f"http://127.0.0.1:{self.port}/health"]
        return json.loads(subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True).stdout)

    def actor(self, stage: str) -> psutil.Process:
        for child in self.process.children():
            with contextlib.suppress(psutil.Error):
                if any(Path(c.laddr or "").name == f"{stage}.in" for c in child.net_connections("unix")):
                    return child
        raise AssertionError(f"no process of {stage}")

    def stop(self, number: int) -> float:
        """Send a signal; returns the seconds until the process and its children are gone."""
        children = self.process.children()
        started = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)
        assert psutil.wait_procs(children, PATIENCE_S)[1] == []
        return time.monotonic() - started


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """A server that leaves no process and no file behind."""
    with tempfile.TemporaryDirectory(prefix="vcs") as name:
        folder = Path(name)
        kernels = Path(tempfile.gettempdir()) / "mlx"
        kernels.mkdir(exist_ok=True)
        (folder / "mlx").symlink_to(kernels)
        served = Served(folder, *arguments)
        children: list[psutil.Process] = []
        try:
            yield served
            children = served.process.children() if served.process.is_running() else []
        finally:
            with contextlib.suppress(psutil.Error):
                if served.process.poll() is None:
                    served.stop(signal.SIGTERM)
            for process in children:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        assert [path.name for path in folder.iterdir() if path.name not in ("err", "mlx")] == []


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--model", str(CHECKPOINT)) as served:
        yield served


def question() -> np.ndarray:
    """The recording with the silence that ``vcpipe run`` adds, as PCM16 values."""
    with wave.open(str(QUESTION)) as wav:
        assert (wav.getframerate(), wav.getnchannels(), wav.getsampwidth()) == (16000, 1, 2)
        values = np.frombuffer(wav.readframes(wav.getnframes()), "<i2")
    return np.concatenate([values, np.zeros(3 * 16000, "<i2")])


def send_pcm(client: Client, values: np.ndarray, size: int) -> None:
    for start in range(0, len(values), size):
        audio = base64.b64encode(values[start : start + size].tobytes()).decode()
        client.send("input_audio_buffer.append", audio=audio)


def test_a_recording_through_the_socket_equals_run(served: Served, tmp_path: Path) -> None:
    """Byte for byte in the PCM, text by text, whatever the size of the appends."""
    output = tmp_path / "answer.wav"
    command = [sys.executable, "-m", "vcpipe", "run", "--audio", str(QUESTION), "--output-audio", str(output)]
    command += ["--model", str(CHECKPOINT), "--seed", "3", "-p", "Be brief.", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    with wave.open(str(output)) as wav:
        expected = wav.readframes(wav.getnframes())
    for size in (1280, 1000, 16000):
        with served.configured(seed=3, system_prompt="Be brief.") as client:
            send_pcm(client, question(), size)
            client.send("input_audio_buffer.commit")
            messages = client.rest()
            assert client.socket.close_code == 1000
        assert pcm_of(messages) == expected
        assert messages[-1]["type"] == "response.done" and messages[-1]["frame_index"] == summary["frames"]
        texts = [m["text"] for m in messages if m["type"] == "response.text.delta"]
        assert (texts or [""])[-1] == summary["text"]
        indices = [m["frame_index"] for m in messages if m["type"] == "response.audio.delta"]
        assert indices == list(range(summary["frames"]))


def test_busy_then_admitted(served: Served) -> None:
    with served.configured() as first:
        first.append(5 * FRAME)
        with served.connect() as second:
            second.expect_error("server_busy")
            assert second.close_code() == 1013
        first.send("input_audio_buffer.commit")
        assert first.rest()[-1]["type"] == "response.done"
    with served.configured() as second:
        second.append(FRAME)
        assert second.until("response.audio.delta")[-1]["frame_index"] == 0


def test_a_ping_while_forty_frames_wait(served: Served) -> None:
    def attempt() -> float:
        with served.configured() as client:
            client.append(40 * FRAME)
            sent = time.monotonic()
            client.send("session.ping")
            before = client.until("session.pong")
            seconds = time.monotonic() - sent
            client.send("session.cancel")
            assert client.rest()[-1]["type"] == "response.cancelled"
        return seconds if kinds(before).count("response.audio.delta") < 40 else math.inf

    assert_quick(attempt, 0.1)


def test_reconnects_start_fresh(served: Served) -> None:
    """Twenty in a row, half of them broken off: never refused, and always the same first frame."""
    first = set()
    for index in range(20):
        client = served.configured(seed=1)
        client.append(np.full(3 * FRAME, 0.25))
        first.add(client.until("response.audio.delta")[-1]["delta"])
        client.vanish() if index % 2 else client.close()
    assert len(first) == 1


def test_random_messages(served: Served) -> None:
    random = np.random.default_rng(0)
    with served.configured(max_streaming_seconds=1) as client:
        for _ in range(300):
            choice = random.integers(6)
            if choice == 0:
                client.socket.send(random.bytes(40))
            elif choice == 1:
                client.send(
                    "input_audio_buffer.append", audio=base64.b64encode(random.bytes(random.integers(600))).decode()
                )
            elif choice == 2:
                client.send(
                    "input_audio_buffer.append", audio=random.bytes(9).hex(), sample_rate=int(random.integers(9))
                )
            elif choice == 3:
                client.send_text(json.dumps(list(random.bytes(5))))
            else:
                client.send(["session.update", "nonsense", "input_audio_buffer.clear"][random.integers(3)], session=5)
        client.send("session.ping")
        client.until("session.pong")
        client.send("input_audio_buffer.commit")
        assert client.rest()[-1]["type"] == "response.done"
        assert client.socket.close_code == 1000


def test_a_stage_that_is_killed() -> None:
    """Told within a second by name; the session ends; the next one finds the stages started anew."""
    with serving("--model", str(CHECKPOINT)) as served:

        def attempt() -> float:
            with served.configured() as client:
                client.append(FRAME)
                client.until("response.audio.delta")
                codec = served.actor("codec")
                killed = time.monotonic()
                codec.kill()
                error = client.expect_error("inference_error")
                seconds = time.monotonic() - killed
                assert error["message"].startswith("codec ended") and "SIGKILL" in error["message"]
                assert client.close_code() == 1011
            return seconds

        assert_quick(attempt, 1.5)
        wait_until(lambda: served.health()["status"] == "failed")
        assert served.health()["dead_stages"] == ["codec"]
        with served.configured() as client:
            client.append(FRAME)
            assert client.until("response.audio.delta")[-1]["frame_index"] == 0
        assert served.health()["status"] == "ready"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda n: str(n)
)
def test_signals_end_it_with_a_word_to_the_client(number: int, code: int) -> None:
    def attempt() -> float:
        with serving("--model", str(CHECKPOINT)) as served:
            client = served.configured()
            assert len(served.process.children()) == 4
            seconds = served.stop(number)
            assert served.process.returncode == code
            with pytest.raises(ConnectionClosed):
                client.receive()
            assert client.socket.close_code == 1012
            assert "Traceback" not in served.stderr and "leaked" not in served.stderr
        return seconds

    assert_quick(attempt, 5.0)


def test_ctrl_c_while_it_loads() -> None:
    def attempt() -> float:
        with serving("--model", str(CHECKPOINT)) as served:
            wait_until(lambda: len(served.process.children()) == 4)
            seconds = served.stop(signal.SIGINT)
            assert "Traceback" not in served.stderr
        return seconds

    assert_quick(attempt, 5.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "{taken}"], "take another --port"),
        (["--allow-origin", "evil"], "--allow-origin"),
        (["--api-key", "a b"], "API key"),
        (["--max-sessions", "0"], "--max-sessions must be positive"),
        (["--host", "256.1.1.1"], "--host 256.1.1.1"),
        (["--port", "0", "--model", "no/such/folder"], "no/such/folder"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_the_user_can_mend(served: Served, arguments: list[str], words: str) -> None:
    filled = [argument.format(taken=served.port) for argument in arguments]
    command = [sys.executable, "-m", "vcpipe", "serve", *filled]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S)
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr


def test_others_can_reach_it_without_a_key() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "vcpipe", "serve", "--host", "0.0.0.0", "--port", "0", "--model", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S)
    assert "there is no --api-key" in done.stderr
    assert done.returncode == 2 and "config.json" in done.stderr
