"""``vcpipe transcribe``: with a perception that follows a script, and as a process with the tiny checkpoint."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fake_sound import FakeSound
from rich.console import Console
from waiting import PATIENCE_S, assert_quick, wait_until

from vcpipe.launch import transcribe as command
from vcpipe.launch.feeding import Feeder
from vcpipe.launch.transcribe import TranscribeOptions, transcribe
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.transcription import TAIL_SILENCE_S
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.errors import ActorDiedError, AudioInputError, ConfigError, SessionClosedError

pytestmark = pytest.mark.process

TESTS = Path(__file__).parent.parent
TINY = TESTS / "data" / "tiny" / "bf16"
SPEECH = TESTS / "data" / "golden" / "input.wav"

FRAME = 1280
#: Two lines of two words, 1.2 s apart; of the second one a letter that subtitles must escape.
WORDS = {2: "Good", 4: " mor", 5: "ning.", 20: " A<B", 22: " is true"}

Script = Callable[[dict[int, str]], None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Let the command's perception say these texts in these frames."""

    def begin(words: dict[int, str]) -> None:
        monkeypatch.setenv("FAKE_WORDS", json.dumps(words))

    def start_pipeline(model: str | None, *, stages: tuple[str, ...], device: str | None, on_progress: Any) -> Pipeline:
        assert stages == ("perception",)
        return Pipeline(PipelineConfig(TINY, stages=stages), on_progress, modules={"perception": "fakes_words"})

    monkeypatch.setattr(command, "start_pipeline", start_pipeline)
    begin(WORDS)
    return begin


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> FakeSound:
    fake = FakeSound()
    monkeypatch.setitem(sys.modules, "sounddevice", fake)
    return fake


def silence(path: Path, frames: int = 30, rate: int = 16000) -> str:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(bytes(2 * FRAME * frames * rate // 16000))
    return str(path)


@pytest.fixture
def recording(tmp_path: Path) -> str:
    """Thirty frames."""
    return silence(tmp_path / "in.wav")


def vcpipe(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    process = [sys.executable, "-m", "vcpipe", "transcribe", *arguments]
    return subprocess.run(process, capture_output=True, timeout=4 * PATIENCE_S, check=False, **options)


# ------------------------------------------------------------------------------------------------------- what is told
def test_a_line_is_a_cue_and_the_figures_are_told(
    script: Script, recording: str, capsys: pytest.CaptureFixture[str]
) -> None:
    transcribe(TranscribeOptions(recording, language="en-US"))
    shown = capsys.readouterr()
    assert shown.out == "Good morning.\nA<B is true\n"
    number = r"\d+\.\d\d"
    assert re.search(
        rf"^2\.40 s of audio in {number} s, real-time factor {number}\d, first text after {number} s, final {number} s after",
        shown.err,
        re.MULTILINE,
    )


def test_subtitles_have_the_times_of_the_frames(script: Script, recording: str, tmp_path: Path) -> None:
    transcribe(TranscribeOptions(recording, srt=tmp_path / "a.srt", vtt=tmp_path / "a.vtt"))
    assert (tmp_path / "a.srt").read_text() == (
        "1\n00:00:00,080 --> 00:00:01,080\nGood morning.\n\n2\n00:00:01,520 --> 00:00:02,520\nA<B is true\n\n"
    )
    assert (tmp_path / "a.vtt").read_text() == (
        "WEBVTT\n\n00:00:00.080 --> 00:00:01.080\nGood morning.\n\n00:00:01.520 --> 00:00:02.520\nA&lt;B is true\n\n"
    )


def test_json_lines(script: Script, recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    transcribe(TranscribeOptions(recording, as_json=True))
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    deltas = [line for line in lines if line["kind"] == "delta"]
    assert [(line["frame_index"], line["text"]) for line in deltas] == list(WORDS.items())
    assert deltas[1] == {"kind": "delta", "frame_index": 4, "start": 0.24, "end": 0.32, "text": " mor"}
    cues = [line for line in lines if line["kind"] == "cue"]
    assert cues[0] == {"kind": "cue", "index": 1, "start": 0.08, "end": 1.08, "text": "Good morning."}
    assert [cue["index"] for cue in cues] == [1, 2]
    summary = lines[-1]
    assert summary["kind"] == "summary"
    assert (summary["audio_seconds"], summary["text"]) == (2.4, "Good morning. A<B is true")
    assert 0 < summary["first_text_seconds"] <= summary["wall_seconds"]
    assert 0 <= summary["close_to_final_seconds"] <= summary["wall_seconds"]
    assert summary["realtime_factor"] == pytest.approx(summary["wall_seconds"] / 2.4, abs=1e-3)
    assert shown.err == ""


def test_silence_has_no_text(script: Script, recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    script({})
    transcribe(TranscribeOptions(recording, as_json=True))
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line).items() >= {"kind": "summary", "text": "", "first_text_seconds": None}.items()
    transcribe(TranscribeOptions(recording))
    shown = capsys.readouterr()
    assert shown.out == "" and "no text" in shown.err


def test_a_terminal_shows_the_line_that_grows(script: Script, recording: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def times_shown() -> int:
        terminal = io.StringIO()
        monkeypatch.setattr(command, "Console", lambda **_: Console(file=terminal, force_terminal=True, width=40))
        transcribe(TranscribeOptions(recording, clock="wall"))
        shown = terminal.getvalue()
        assert "Ctrl-C ends" in shown
        return shown.count("Good morning.")

    # Ten times a second, from its last word until it is a cue; a machine that stood still meanwhile may have shown it once.
    assert any(times_shown() >= 2 for _ in range(5))


@pytest.mark.parametrize(("coding", "kind"), [("s16le", "<i2"), ("f32le", "<f4")])
def test_samples_without_a_header(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str], coding: Any, kind: str
) -> None:
    path = tmp_path / "a.raw"
    np.zeros(8000, kind).tofile(path)
    transcribe(TranscribeOptions(str(path), coding=coding, rate=8000, as_json=True))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["audio_seconds"] == 1.0


def test_on_the_wall_clock_text_comes_before_the_end(
    script: Script, recording: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def attempt() -> float:
        transcribe(TranscribeOptions(recording, clock="wall", as_json=True))
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert summary["wall_seconds"] >= 2.3
        return max(summary["first_text_seconds"] - 0.5, summary["close_to_final_seconds"])

    assert_quick(attempt, 1.0)


# -------------------------------------------------------------------------------------------------------- the microphone
def talk_into(sound: FakeSound, frames: int, then: Callable[[], None]) -> threading.Thread:
    def record() -> None:
        while not hasattr(sound, "input"):
            time.sleep(0.01)
        for _ in range(frames):
            sound.input.record(np.zeros(3840))  # 80 ms at 48 kHz
        then()

    thread = threading.Thread(target=record)
    thread.start()
    return thread


def test_ctrl_c_ends_the_microphone_with_all_that_was_said(
    script: Script, sound: FakeSound, capsys: pytest.CaptureFixture[str]
) -> None:
    script({**WORDS, 29: " now"})
    thread = talk_into(sound, 30, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    transcribe(TranscribeOptions(microphone=True))
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    shown = capsys.readouterr()
    assert shown.out == "Good morning.\nA<B is true now\n"
    assert "Speak now" in shown.err and "2.40 s of audio" in shown.err
    assert sound.input.state == "closed"


def test_a_microphone_that_is_unplugged_is_an_error_after_what_was_said(
    script: Script, sound: FakeSound, capsys: pytest.CaptureFixture[str]
) -> None:
    thread = talk_into(sound, 12, lambda: sound.input.unplug())
    with pytest.raises(AudioInputError, match="microphone 'Built-in' stopped by itself"):
        transcribe(TranscribeOptions(microphone=True))
    thread.join()
    # The script goes on in the silence that is heard at the end.
    assert capsys.readouterr().out.startswith("Good morning.")


# ----------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "nothing to transcribe; give a file, - for standard input, or --mic"),
        ({"source": "a.wav", "microphone": True}, "exclude each other"),
        ({"source": "a.wav", "channel": -1}, "--channel counts from 0"),
        ({"source": "a.wav", "input_device": "USB"}, "--input-device needs --mic"),
        ({"microphone": True, "clock": "wall"}, "--clock wall needs a recording, not --mic"),
        ({"microphone": True, "coding": "s16le"}, "--format needs a recording"),
        ({"source": "a.wav", "rate": 8000}, "--rate needs --format"),
        ({"source": "a.raw", "coding": "s16le", "rate": 10}, "--rate must be 4000 to 384000 Hz, got 10"),
        ({"source": "a.wav", "srt": Path("a"), "vtt": Path("a")}, "both name a"),
        ({"source": "absent.wav"}, "absent.wav cannot be opened: No such file"),
        ({"source": str(Path(__file__))}, "is not audio that can be read"),
        ({"source": str(SPEECH), "model": "./absent"}, "./absent"),
        ({"source": str(SPEECH), "language": "de"}, 'language must be "en"'),
    ],
)
def test_a_users_mistake_is_one_clear_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError)) as raised:
        transcribe(TranscribeOptions(**options))
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_subtitles_that_cannot_be_written(script: Script, recording: str) -> None:
    with pytest.raises(ConfigError, match=r"/absent/a\.srt cannot be written"):
        transcribe(TranscribeOptions(recording, srt=Path("/absent/a.srt")))


def test_a_stage_that_dies_is_told_after_what_was_heard(
    script: Script, recording: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script({**WORDS, 20: "!"})
    with pytest.raises(ActorDiedError, match="perception"):
        transcribe(TranscribeOptions(recording, clock="wall"))
    assert capsys.readouterr().out == "Good morning.\n"


# ------------------------------------------------------------------------------------------------------------- feeding
class Session:
    """Takes everything, hears what the test says."""

    input_sample_rate = 16000

    def __init__(self, most: float = np.inf) -> None:
        self.fed = 0
        self.closed = threading.Event()
        self._most = most

    def feed(self, samples: np.ndarray) -> None:
        if self.fed >= self._most:
            raise SessionClosedError("closed")
        self.fed += len(samples)

    def close(self) -> None:
        self.closed.set()

    def step(self, *, max_decode_tokens: int = 4) -> list[str]:
        return []

    @property
    def done(self) -> bool:
        return self.closed.is_set()


class Endless:
    """Half a second after the other."""

    given = 0
    stopped = False

    def chunks(self) -> Iterator[np.ndarray]:
        while not self.stopped:
            self.given += 8000
            yield np.zeros(8000, np.float32)

    def stop(self) -> None:
        self.stopped = True


def test_no_more_is_read_than_a_little_ahead() -> None:
    source, session = Endless(), Session()
    with Feeder(source, session, can_wait=True) as feeder:
        for heard in range(0, 60, 10):
            feeder.heard(float(heard))
            wait_until(lambda heard=heard: session.fed >= (heard + 1.9) * 16000)  # type: ignore[misc]
            time.sleep(0.02)
            assert session.fed <= (heard + 2.1) * 16000 and source.given <= session.fed + 8000
    assert session.closed.is_set() and source.stopped and feeder.error is None


def test_a_session_that_ended_ends_the_feeder() -> None:
    session = Session(most=16000)
    with Feeder(Endless(), session, can_wait=True) as feeder:
        assert session.closed.wait(PATIENCE_S)
    assert feeder.error is None


def test_ctrl_c_may_come_at_any_moment_of_what_is_told_to_the_feeder() -> None:
    """Its handler stops the feeder between any two lines, on the same thread."""
    source = Endless()
    feeder = Feeder(source, Session(), can_wait=True)

    def interrupt(*line: Any) -> Callable[..., Any]:
        feeder.stop()
        return interrupt

    def tell() -> None:
        sys.settrace(interrupt)
        feeder.heard(1.0)
        feeder.stop()
        sys.settrace(None)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    telling.join(PATIENCE_S)
    assert not telling.is_alive() and source.stopped


# ---------------------------------------------------------------------------------------------------------- a process
def test_the_text_is_that_of_the_library(tmp_path: Path) -> None:
    done = vcpipe(str(SPEECH), "--model", str(TINY), "--json", "--srt", str(tmp_path / "a.srt"))
    assert done.returncode == 0, done.stderr.decode()
    summary = json.loads(done.stdout.decode().splitlines()[-1])
    with wave.open(str(SPEECH)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    pipeline = Pipeline(PipelineConfig(TINY, stages=("perception",)))
    with pipeline, pipeline.open_transcription(tail_s=TAIL_SILENCE_S) as session:
        session.feed(samples)
        session.close()
        text = "".join(delta.text for delta in session.deltas())
    assert summary["text"] == text.strip() and text
    assert (summary["frames"], summary["audio_seconds"]) == (session.frames, round(len(samples) / 16000, 3))
    assert (tmp_path / "a.srt").read_text().startswith("1\n00:00:0")


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (("absent.wav",), None, "absent.wav cannot be opened"),
        (("-",), b"", "standard input"),
        (("-",), b"not audio at all", "standard input holds no WAV"),
        (("-", "--format", "s16le"), b"", "standard input holds no samples"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments: tuple[str, ...], stdin: bytes | None, said: str) -> None:
    done = vcpipe(*arguments, "--model", str(TINY), input=stdin)
    assert done.returncode == 2
    assert done.stdout == b""
    *_, line = done.stderr.decode().strip().splitlines()
    assert line.startswith("error: ") and said in line
    assert "Traceback" not in done.stderr.decode()


def test_a_closed_standard_input() -> None:
    shell = f"exec {sys.executable} -m vcpipe transcribe - <&-"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr.decode()) == (2, "error: standard input is closed\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_a_pipe_is_heard_before_its_end_and_a_signal_keeps_what_was_heard(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with wave.open(str(SPEECH)) as file:
        data = file.readframes(file.getnframes())
    subtitles = tmp_path / "a.vtt"
    arguments = ["-", "--format", "s16le", "--model", str(TINY), "--json", "--vtt", str(subtitles)]
    process = subprocess.Popen(
        [sys.executable, "-m", "vcpipe", "transcribe", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(data)
        process.stdin.flush()
        first = json.loads(process.stdout.readline())
        assert first["kind"] == "delta"
        (actor,) = psutil.Process(process.pid).children()
        os.killpg(process.pid, number)
        rest, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    assert process.returncode == code, errors.decode()
    assert errors == b"" and not actor.is_running()
    lines = [first, *map(json.loads, rest.decode().splitlines())]
    cues = [line["text"] for line in lines if line["kind"] == "cue"]
    assert cues and subtitles.read_text().count(" --> ") == len(cues)
    if number == signal.SIGINT:
        assert lines[-1]["kind"] == "summary" and lines[-1]["text"].startswith(first["text"].strip())
