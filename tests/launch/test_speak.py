"""``vcpipe speak``: on stages of plain arithmetic, and as a process with the tiny checkpoint."""

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
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_sound import FakeSound
from fakes import FAKES
from waiting import PATIENCE_S, wait_until

from vcpipe.launch import sound as sound_module
from vcpipe.launch import speak as command
from vcpipe.launch.sound import Loudspeaker
from vcpipe.launch.speak import SpeakOptions, speak
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.errors import AudioInputError, ConfigError
from vcpipe.schemas.pcm import pcm16

pytestmark = pytest.mark.process

TESTS = Path(__file__).parent.parent
TINY = TESTS / "data" / "tiny" / "bf16"
FRAME = 1764


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's tts and codec are plain arithmetic."""

    def start_pipeline(model: str | None, *, stages: tuple[str, ...], on_progress: Any, **options: Any) -> Pipeline:
        assert stages == ("tts", "codec")
        return Pipeline(PipelineConfig(TINY, stages=stages), on_progress, modules=FAKES)

    monkeypatch.setattr(command, "start_pipeline", start_pipeline)


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> FakeSound:
    fake = FakeSound()
    fake.rows[0]["default_samplerate"] = 22050.0
    monkeypatch.setitem(sys.modules, "sounddevice", fake)
    # A device that nobody has time to play on is not broken.
    monkeypatch.setattr(sound_module, "_PATIENCE_S", PATIENCE_S)
    return fake


@pytest.fixture
def loudspeakers(monkeypatch: pytest.MonkeyPatch) -> list[Loudspeaker]:
    """Those that the command opens."""
    opened: list[Loudspeaker] = []

    def open_loudspeaker(*arguments: Any) -> Loudspeaker:
        opened.append(Loudspeaker(*arguments))
        return opened[-1]

    monkeypatch.setattr(command, "Loudspeaker", open_loudspeaker)
    return opened


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The writing end of standard input."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
        yield writer


def write_and_close(fd: int, data: bytes) -> None:
    os.write(fd, data)
    os.close(fd)


def vcpipe(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    process = [sys.executable, "-m", "vcpipe", "speak", *arguments]
    return subprocess.run(process, capture_output=True, timeout=4 * PATIENCE_S, check=False, **options)


def samples_of(file: Path | io.BytesIO) -> np.ndarray:
    with wave.open(str(file) if isinstance(file, Path) else file) as wav:
        assert (wav.getframerate(), wav.getsampwidth(), wav.getnchannels()) == (22050, 2, 1)
        return np.frombuffer(wav.readframes(wav.getnframes()), "<i2")


def ids_of(samples: np.ndarray) -> list[int]:
    """What the fakes were given: they say codes / 1000, and codes are text ids."""
    return np.rint(samples.reshape(-1, FRAME)[:, 0] / 32.768).astype(int).tolist()


def said(folder: Path, text: str) -> list[int]:
    path = folder / f"{len(text)}.wav"
    speak(SpeakOptions(text, output_audio=path))
    return ids_of(samples_of(path))


# ------------------------------------------------------------------------------------------------------------- texts
def test_a_file_says_what_the_text_says(fakes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "Well, go on.\n\nSay more."
    (tmp_path / "a.txt").write_bytes("\ufeff".encode() + text.encode())
    speak(SpeakOptions(text_file=tmp_path / "a.txt", output_audio=tmp_path / "a.wav"))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.search(r"real-time factor \d+\.\d{3}, first sound after \d+\.\d\d s$", shown.err.strip())
    ids = ids_of(samples_of(tmp_path / "a.wav"))
    assert ids == said(tmp_path, text)
    assert len(set(ids)) > 5 and 2 in ids


@pytest.mark.parametrize("text", [None, "-"])
def test_standard_input(fakes: None, stdin: int, tmp_path: Path, text: str | None) -> None:
    write_and_close(stdin, "Où est-il ?\n".encode())
    speak(SpeakOptions(text, output_audio=tmp_path / "a.wav"))
    assert ids_of(samples_of(tmp_path / "a.wav")) == said(tmp_path, "Où est-il ?\n")


def test_text_is_spoken_as_it_arrives(fakes: None, stdin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters in halves, and sound before the next word is there."""
    heard: list[str] = []
    monkeypatch.setattr(command, "_print_json", lambda value: heard.append(value["kind"]))

    def write() -> None:
        os.write(stdin, "The first sentence is here. \u00c9".encode()[:-1])
        deadline = time.monotonic() + PATIENCE_S
        while heard.count("audio") < 10 and time.monotonic() < deadline:
            time.sleep(0.005)
        at_once.append(heard.count("audio"))
        write_and_close(stdin, "\u00c9tienne.".encode()[1:])

    at_once: list[int] = []
    thread = threading.Thread(target=write)
    thread.start()
    speak(SpeakOptions(output_audio=tmp_path / "a.wav", as_json=True))
    thread.join()
    assert at_once[0] >= 10
    assert heard[-1] == "summary"
    assert ids_of(samples_of(tmp_path / "a.wav")) == said(tmp_path, "The first sentence is here. \u00c9tienne.")


def test_a_long_text_is_read_no_faster_than_it_is_spoken(fakes: None, sound: FakeSound, stdin: int) -> None:
    """A pipe holds 64 KiB and the command some words: more cannot be written while nothing is played."""
    os.set_blocking(stdin, False)
    written = 0
    words = b"word after word " * 256
    started = threading.Event()

    def listen() -> None:
        nonlocal written
        while not hasattr(sound, "output"):
            time.sleep(0.01)
        sound.output.wait_started()
        quiet = 0
        while quiet < 20:
            try:
                written += os.write(stdin, words)
                quiet = 0
            except BlockingIOError:
                quiet += 1
                time.sleep(0.01)
        started.set()
        os.kill(os.getpid(), signal.SIGINT)

    os.write(stdin, b"Begin. ")
    thread = threading.Thread(target=listen)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        speak(SpeakOptions())
    thread.join()
    os.close(stdin)
    assert started.is_set() and written < 65536 + 3 * 4096 + len(words)
    assert sound.output.state == "closed"


# -------------------------------------------------------------------------------------------------------- loudspeaker
def test_the_loudspeaker_plays_all_of_it(
    fakes: None,
    sound: FakeSound,
    loudspeakers: list[Loudspeaker],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard: list[np.ndarray] = []

    def has_a_block() -> bool:
        """The stages are as fast as the loudspeaker, however slow this machine is."""
        playback = loudspeakers[0]._playback
        return playback is not None and (playback.waiting >= 441 or playback._finished)

    def listen() -> None:
        while not hasattr(sound, "output"):
            time.sleep(0.01)
        sound.output.wait_started()
        while True:
            wait_until(has_a_block, "speech to play")
            if (block := sound.output.play_unless_ended(441)) is None:
                return
            heard.append(block[:, 0])

    thread = threading.Thread(target=listen)
    thread.start()
    speak(SpeakOptions("Well, go on.", as_json=True))
    thread.join()
    *lines, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    path = tmp_path / "a.wav"
    speak(SpeakOptions("Well, go on.", output_audio=path))
    spoken = samples_of(path)
    played = np.concatenate(heard)
    played = np.rint(played[played > 0] * 32767)
    assert np.allclose(played, spoken, atol=1)
    assert summary.items() >= {"kind": "summary", "frames": len(spoken) // FRAME, "underruns": 0}.items()
    assert [line["frame_index"] for line in lines] == list(range(summary["frames"]))
    assert set(lines[0]) == {"kind", "frame_index", "sample_rate", "audio_codes"}


def test_words_are_heard_to_their_end_while_the_text_pauses(fakes: None, sound: FakeSound, stdin: int) -> None:
    heard: list[np.ndarray] = []

    def listen() -> None:
        while not hasattr(sound, "output"):
            time.sleep(0.01)
        sound.output.wait_started()
        paused = False
        while (block := sound.output.play_unless_ended(FRAME)) is not None:
            heard.append(block[:, 0])
            time.sleep(0.01)
            # The library lets no clause go without its sign, and no word's sound to its end, unless it is told of a pause.
            is_over = bool(spoken(heard)) and not spoken(heard[-20:])
            if not paused and (is_over or len(heard) > 3000):
                paused = True
                before.extend(spoken(heard))
                write_and_close(stdin, b"after it.")

    def spoken(blocks: list[np.ndarray]) -> list[int]:
        ids = [int(np.rint(block[-1] * 1000)) for block in blocks]
        return [token for token in ids if token not in (0, 2, 12)]

    before: list[int] = []
    os.write(stdin, b"a pause ")
    thread = threading.Thread(target=listen)
    thread.start()
    speak(SpeakOptions())
    thread.join()
    assert before and spoken(heard)[: len(before)] == before
    assert len(spoken(heard)) > len(before)


def test_a_loudspeaker_that_is_unplugged_is_an_error(fakes: None, sound: FakeSound) -> None:
    def unplug() -> None:
        while not hasattr(sound, "output"):
            time.sleep(0.01)
        sound.output.wait_started()
        sound.output.play(441)
        sound.output.unplug()

    thread = threading.Thread(target=unplug)
    thread.start()
    with pytest.raises(AudioInputError, match="loudspeaker 'Built-in' stopped by itself"):
        speak(SpeakOptions("A text that takes its time to be spoken."))
    thread.join()


def test_without_the_sound_library_a_file_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(ConfigError, match=r"pip install 'vcpipe\[mic\]'; or write a file with --output-audio"):
        speak(SpeakOptions("Hello."))


# ----------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"text": " \n"}, "TEXT holds no text to speak"),
        ({"text": "a", "text_file": Path("a")}, "TEXT and --text-file exclude each other"),
        ({"text_file": Path("absent.txt")}, "absent.txt cannot be opened: No such file"),
        ({"text": "a", "output_device": "USB"}, "--output-device needs the loudspeaker"),
        ({"text": "a", "output_audio": Path("-"), "as_json": True}, "both want standard output"),
        ({"text": "a", "model": "./absent"}, "./absent"),
    ],
)
def test_a_users_mistake_is_one_clear_error(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        speak(SpeakOptions(**{"output_audio": tmp_path / "a.wav", **options}))
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "a.wav").exists()


def test_a_seed_that_is_none() -> None:
    with pytest.raises(ValueError, match="seed"):
        speak(SpeakOptions("a", seed=-1, output_audio=Path("a.wav")))


@pytest.mark.parametrize(("data", "message"), [(b" \n\t", "no text to speak"), (b"caf\xe9 au lait", "not UTF-8 text")])
def test_what_is_no_text(fakes: None, tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"a\.txt .*{message}"):
        speak(SpeakOptions(text_file=path, output_audio=tmp_path / "a.wav"))
    assert not (tmp_path / "a.wav").exists()


def test_output_that_cannot_be_written(fakes: None) -> None:
    with pytest.raises(ConfigError, match=r"/absent/a\.wav cannot be written"):
        speak(SpeakOptions("a", output_audio=Path("/absent/a.wav")))


def test_a_text_that_is_a_files_name_is_spoken_with_a_hint(
    fakes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("Quite another text.")
    speak(SpeakOptions("notes.txt", output_audio=Path("a.wav")))
    assert "--text-file notes.txt speaks what the file holds" in capsys.readouterr().err
    Path("notes.txt").unlink()
    assert ids_of(samples_of(Path("a.wav"))) == said(tmp_path, "notes.txt")


# ---------------------------------------------------------------------------------------------------------- a process
def test_standard_output_gets_what_the_library_says(tmp_path: Path) -> None:
    text = "Hello."
    piped = vcpipe("--model", str(TINY), "--seed", "3", "--output-audio", "-", input=text.encode())
    assert piped.returncode == 0, piped.stderr.decode()
    pipeline = Pipeline(PipelineConfig(TINY, stages=("tts", "codec")))
    with pipeline, pipeline.open_speech(seed=3) as speech:
        speech.reset_turn()
        expected = b"".join(pcm16(chunk.samples) for chunk in speech.speak([text]))
    assert piped.stdout[44:] == expected
    assert piped.stdout[40:44] == b"\xff\xff\xff\xff"


@pytest.mark.parametrize(("mode", "size"), [("wb", None), ("ab", 0xFFFFFFFF)])
def test_a_file_as_standard_output(fakes: None, tmp_path: Path, mode: str, size: int | None) -> None:
    """Sizes are right where they can be, and nothing is overwritten where not."""
    path = tmp_path / "a.wav"
    script = "import sys; from vcpipe.launch.audio_io import WavWriter\n"
    script += "with WavWriter(None) as writer: writer.write_pcm16(bytes(4410))"
    with path.open(mode) as file:
        subprocess.run([sys.executable, "-c", script], stdout=file, check=True, timeout=PATIENCE_S)
    data = path.read_bytes()
    assert len(data) == 44 + 4410
    assert int.from_bytes(data[40:44], "little") == (4410 if size is None else size)


@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ("vcpipe speak <&-", "standard input is closed; give TEXT or --text-file"),
        ("vcpipe speak --output-audio a.wav </dev/null", "standard input holds no text to speak"),
        (
            "vcpipe speak Hello --output-audio - >/dev/full",
            "standard output cannot be written: No space left on device",
        ),
        ("vcpipe speak Hello --output-audio - >&-", "standard output is closed"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(tmp_path: Path, shell: str, said: str) -> None:
    vcpipe_command = f'vcpipe() {{ {sys.executable} -m vcpipe "$@" --model {TINY}; }}; '
    done = subprocess.run(
        ["sh", "-c", vcpipe_command + shell], cwd=tmp_path, capture_output=True, timeout=4 * PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr.decode().strip()) == (2, f"error: {said}")
    assert not (tmp_path / "a.wav").exists()


def test_ctrl_c_leaves_a_valid_file_of_what_was_spoken(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    arguments = ["--model", str(TINY), "--json", "--output-audio", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "vcpipe", "speak", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"The first words are here, and others. ")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["kind"] == "audio"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    assert (process.returncode, errors.decode().strip()) in [(130, ""), (130, "Aborted!")]
    assert len(samples_of(path)) % FRAME == 0 and len(samples_of(path)) > 0
