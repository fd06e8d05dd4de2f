"""The ``vcpipe`` command as a user meets it: real processes, real exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from waiting import PATIENCE_S, is_alive, wait_until

TESTS = Path(__file__).parent.parent
TINY = TESTS / "data" / "tiny"
GOLDEN = TESTS / "data" / "golden"
STAGES = ("perception", "language", "tts", "codec")

pytestmark = pytest.mark.process


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A TMPDIR of its own, short enough for sockets; must be empty when a command has ended."""
    with tempfile.TemporaryDirectory(prefix="vct") as folder:
        # MLX keeps the kernels it has compiled for a CPU in the temporary folder; building them anew takes seconds.
        kernels = Path(tempfile.gettempdir()) / "mlx"
        kernels.mkdir(exist_ok=True)
        (Path(folder) / "mlx").symlink_to(kernels)
        yield Path(folder)


class Command:
    """A running ``vcpipe`` with its output in files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self._out = (folder / "out").open("w+b")
        self._err = (folder / "err").open("w+b")
        self.process = psutil.Popen(
            [sys.executable, "-m", "vcpipe", *arguments],
            stdout=self._out,
            stderr=self._err,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(folder)},
            start_new_session=True,
        )

    @property
    def stdout(self) -> str:
        return (self.folder / "out").read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return (self.folder / "err").read_text(encoding="utf-8")

    def actors(self) -> dict[str, psutil.Process]:
        """Child processes by stage; the sockets they bind tell which is which."""
        found = {}
        for child in self.process.children():
            with contextlib.suppress(psutil.Error):
                for connection in child.net_connections("unix"):
                    name = Path(connection.laddr or "").name
                    if name.endswith(".in"):
                        found[name.removesuffix(".in")] = child
        return found

    def close(self) -> None:
        self._out.close()
        self._err.close()
        with contextlib.suppress(psutil.Error):
            for process in [*self.process.children(), self.process]:
                process.kill()
        self.process.wait(PATIENCE_S)


@pytest.fixture
def start(socket_folder: Path) -> Iterator[Callable[..., Command]]:
    commands = []

    def begin(*arguments: str) -> Command:
        commands.append(Command(socket_folder, *arguments))
        return commands[-1]

    yield begin
    for command in commands:
        command.close()


def run(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "vcpipe", *arguments]
    return subprocess.run(command, capture_output=True, timeout=4 * PATIENCE_S, input=stdin, check=False)


#: A run at wall speed that would take minutes.
ENDLESS = (
    *("run", "--model", str(TINY / "bf16"), "--audio", str(GOLDEN / "input.wav")),
    *("--clock", "wall", "--extra-seconds", "200", "--json"),
)


def endless_run(start: Callable[..., Command], *more: str) -> Command:
    """After its first events."""
    command = start(*ENDLESS, *more)
    wait_until(lambda: '"audio"' in command.stdout, "first audio event")
    return command


def loading_run(start: Callable[..., Command]) -> tuple[Command, list[psutil.Process]]:
    """As soon as its actors are there, and these; endless, so that it cannot be over before anybody looks."""
    command = start(*ENDLESS)
    wait_until(lambda: len(command.process.children()) == 4, "four children")
    return command, command.process.children()


def assert_nothing_left(command: Command, actors: list[psutil.Process]) -> None:
    wait_until(lambda: not any(map(is_alive, actors)), "actors to leave")
    wait_until(lambda: not list(command.folder.glob("vcpipe-*")), "socket folder to go")


@pytest.mark.parametrize("variant", ["bf16", "q4"])
def test_json_events_equal_the_golden_session(variant: str) -> None:
    name = f"stream_{variant}_seed0_prompt"
    recording = str(GOLDEN / "input.wav")
    model = str(TINY / variant)
    done = run(
        *("run", "--model", model, "--audio", recording, "-p", "be concise"),
        *("--seed", "0", "--extra-seconds", "0", "--json"),
    )
    assert done.returncode == 0, done.stderr.decode()
    lines = [json.loads(line) for line in done.stdout.decode().splitlines()]
    *events, summary = lines
    info = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    codes = np.load(GOLDEN / f"{name}.npz")["codes"]
    assert [e["audio_codes"] for e in events if e["kind"] == "audio"] == codes.tolist()
    ours = [{k: v for k, v in e.items() if k not in ("sample_rate", "audio_codes")} for e in events]
    assert ours == info["events"]
    assert summary["kind"] == "summary"
    assert (summary["frames"], summary["text"], summary["transcript"]) == (31, info["text"], info["transcript"])
    assert summary["wall_seconds"] > 0 and summary["realtime_factor"] > 0


def test_offline_json_equals_the_golden_run() -> None:
    done = run(
        *("run", "--offline", "--model", str(TINY / "bf16"), "--audio", str(GOLDEN / "input.wav")),
        *("-p", "be concise", "--extra-seconds", "0", "--json"),
    )
    lines = [json.loads(line) for line in done.stdout.decode().splitlines()]
    golden = np.load(GOLDEN / "offline_bf16_seed0_prompt.npz")
    assert [e["audio_codes"] for e in lines if e["kind"] == "audio"] == golden["codes"].tolist()
    assert lines[-1]["frames"] == 32


def test_a_bounded_history_of_the_speech_decoder_changes_codes_once_it_is_full() -> None:
    """Voice and system prompt take 41 positions before the first frame; what is said is not the speech decoder's to change."""
    done = run(
        *("run", "--model", str(TINY / "bf16"), "--audio", str(GOLDEN / "input.wav"), "-p", "be concise"),
        *("--extra-seconds", "0", "--json", "--tts-history-frames", "50"),
    )
    assert done.returncode == 0, done.stderr.decode()
    *events, summary = [json.loads(line) for line in done.stdout.decode().splitlines()]
    codes = [event["audio_codes"] for event in events if event["kind"] == "audio"]
    golden = np.load(GOLDEN / "stream_bf16_seed0_prompt.npz")["codes"].tolist()
    assert codes[:9] == golden[:9] and codes[9:] != golden[9:]
    info = json.loads((GOLDEN / "stream_bf16_seed0_prompt.json").read_text(encoding="utf-8"))
    assert (summary["text"], summary["transcript"]) == (info["text"], info["transcript"])


def test_the_first_command_of_the_readme_answers_the_question(tmp_path: Path) -> None:
    answer, question = tmp_path / "answer.wav", TESTS.parent / "docs" / "question.wav"
    done = run("run", "--audio", str(question), "--output-audio", str(answer))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "The capital of France is Paris.\n"
    heard, summary = done.stderr.decode().splitlines()
    assert heard == "heard: what is the capital of france"
    with wave.open(str(answer)) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (22050, 2, 1)
        assert file.getnframes() == int(summary.split()[0]) * 1764


def test_random_weights_are_called_so(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY / "bf16", tmp_path / "random")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"vcpipe": {"random_weights": True}}), encoding="utf-8")
    done = run("run", "--model", str(folder), "--audio", str(GOLDEN / "input.wav"), "--extra-seconds", "0")
    assert done.returncode == 0
    assert "random weights: the output is noise" in done.stderr.decode()


def test_a_limit_ends_the_run_with_what_was_done() -> None:
    recording = str(GOLDEN / "input.wav")
    done = run("run", "--model", str(TINY / "bf16"), "--audio", recording, "--max-streaming-seconds", "0.8", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout.decode().splitlines()[-1])["frames"] == 10
    assert "limited to 0.8 s" in done.stderr.decode()


def test_audio_from_stdin() -> None:
    data = (GOLDEN / "input.wav").read_bytes()
    arguments = ("run", "--model", str(TINY / "bf16"), "--audio", "-", "--extra-seconds", "0", "--json")
    done = run(*arguments, stdin=data)
    assert json.loads(done.stdout.decode().splitlines()[-1])["frames"] == 31


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--audio", "absent.wav"), "absent.wav"),
        (("--audio", str(GOLDEN / "input.wav"), "--model", "./absent"), "./absent"),
        (("--audio", str(GOLDEN / "input.wav"), "--seed", "-1"), "seed"),
        (("--audio", str(GOLDEN / "input.wav"), "--extra-seconds", "-1"), "--extra-seconds"),
        (("--audio", str(GOLDEN / "input.wav"), "--channel", "1"), "channel"),
        (("--audio", str(GOLDEN / "input.wav"), "--output-audio", "/absent/out.wav"), "/absent/out.wav"),
        (("--audio", str(GOLDEN / "input.wav"), "--max-streaming-seconds", "0"), "max_streaming_seconds"),
        (("--audio", str(GOLDEN / "input.wav"), "--offline", "--clock", "wall"), "--clock wall"),
        (("--audio", str(GOLDEN / "input.wav"), "--tap", "tcp://256.0.0.1:1"), "tcp://256.0.0.1:1"),
        (("--audio", str(GOLDEN / "input.wav"), "--device", "tpu"), "tpu"),
        (("--audio", str(GOLDEN / "input.wav"), "--tts-history-frames", "0"), "an integer from 1 to 2147483647, not 0"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(arguments: tuple[str, ...], said: str) -> None:
    done = run("run", *arguments)
    assert done.returncode == 2
    *_, line = done.stderr.decode().strip().splitlines()
    assert line.startswith("error: ") and said in line
    assert "Traceback" not in done.stderr.decode()
    assert done.stdout == b""


def test_five_processes_and_no_mlx_in_the_parent(start: Callable[..., Command]) -> None:
    command = endless_run(start)
    children = command.process.children(recursive=True)
    assert len(children) == 4
    assert set(command.actors()) == set(STAGES)
    if Path("/proc/self/maps").exists():
        assert "libmlx" not in Path(f"/proc/{command.process.pid}/maps").read_text(encoding="utf-8")
        assert "libmlx" in Path(f"/proc/{children[0].pid}/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_actor_ends_the_run(start: Callable[..., Command], stage: str) -> None:
    command = endless_run(start)
    actors = command.actors()
    actors[stage].kill()
    assert command.process.wait(PATIENCE_S) == 1
    assert_nothing_left(command, list(actors.values()))
    assert re.search(rf"error: {stage} ended while it was needed \(signal SIGKILL\)", command.stderr)
    assert "Traceback" not in command.stderr


def test_a_killed_parent_leaves_nothing(start: Callable[..., Command]) -> None:
    command = endless_run(start)
    actors = command.process.children()
    command.process.kill()
    assert_nothing_left(command, actors)


def test_a_parent_killed_while_loading_leaves_nothing(start: Callable[..., Command]) -> None:
    command, actors = loading_run(start)
    command.process.kill()
    assert_nothing_left(command, actors)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["INT", "TERM", "HUP"]
)
def test_a_signal_ends_the_run_in_order(
    start: Callable[..., Command], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    answer = tmp_path / "answer.wav"
    command = endless_run(start, "--output-audio", str(answer))
    actors = command.process.children()
    os.killpg(command.process.pid, number)
    assert command.process.wait(PATIENCE_S) == code
    assert_nothing_left(command, actors)
    assert "Traceback" not in command.stderr and "leaked" not in command.stderr
    with wave.open(str(answer)) as file:
        assert file.getnframes() > 0 and file.getnframes() % 1764 == 0


def test_ctrl_c_while_loading(start: Callable[..., Command]) -> None:
    command, actors = loading_run(start)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.process.wait(PATIENCE_S) == 130
    assert_nothing_left(command, actors)
    assert "Traceback" not in command.stderr


def test_trace_shows_stages_of_different_frames_at_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    recording = str(GOLDEN / "input.wav")
    done = run("run", "--model", str(TINY / "bf16"), "--audio", recording, "--trace", str(trace), "--json")
    assert done.returncode == 0
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    slices = [(e["pid"], e["args"]["frame_index"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    overlapping = sum(
        a[0] != b[0] and a[1] != b[1] and a[2] < b[3] and b[2] < a[3] for i, a in enumerate(slices) for b in slices[:i]
    )
    assert overlapping > 50


def test_profile_is_in_the_summary_and_in_a_table() -> None:
    arguments = ("run", "--model", str(TINY / "bf16"), "--audio", str(GOLDEN / "input.wav"), "--profile")
    as_json = json.loads(run(*arguments, "--json").stdout.decode().splitlines()[-1])["profile"]
    assert set(as_json["stages"]) == {"perception", "rnnt", "language", "tts", "codec"}
    assert as_json["dropped_cold_frames"] == 5
    table = run(*arguments).stderr.decode()
    assert "perception" in table and "one frame every" in table


def test_tap_follows_a_run(start: Callable[..., Command], socket_folder: Path) -> None:
    endpoint = f"ipc://{socket_folder}/tap"
    command = endless_run(start, "--tap", endpoint)
    listener = subprocess.Popen(
        [sys.executable, "-m", "vcpipe", "tap", "--endpoint", endpoint, "--json", "--timeout", str(PATIENCE_S)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert listener.stdout is not None
        lines = [json.loads(listener.stdout.readline()) for _ in range(6)]
    finally:
        listener.kill()
        listener.communicate()
    assert {line["topic"] for line in lines} >= {"timing", "event.audio"}
    assert [line["seq"] for line in lines] == list(range(lines[0]["seq"], lines[0]["seq"] + 6))
    assert command.process.poll() is None


def test_doctor_speaks_json() -> None:
    facts = json.loads(run("doctor", "--json").stdout)
    assert facts["device"] in ("cpu", "gpu") and facts["mlx"]
    assert isinstance(facts["slow"], list)


def test_version() -> None:
    import vcpipe

    assert run("--version").stdout.decode().strip() == vcpipe.__version__
