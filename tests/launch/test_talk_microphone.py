"""``vcpipe talk --mic`` with devices that the test plays, against a server that follows a script."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from fake_sound import PATIENCE_S, FakeSound, device
from scripted_server import ANSWER, FRAME, Visitor, scripted_server

from vcpipe.launch.talk import microphone, talk
from vcpipe.launch.talk.devices import find_device, load_sound
from vcpipe.launch.talk.talk import TalkOptions
from vcpipe.schemas.errors import AudioInputError, ConfigError, RemoteError

RNG = np.random.default_rng(5)


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> FakeSound:
    fake = FakeSound()
    monkeypatch.setitem(sys.modules, "sounddevice", fake)
    # What is to be played out is not cut, however late the test comes to play it.
    monkeypatch.setattr(microphone, "_PATIENCE_S", PATIENCE_S)
    return fake


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    """Types of the messages that the loudspeaker's side has dealt with."""
    types: queue.Queue[str] = queue.Queue()
    take = microphone.Speaker.take

    def note(self: microphone.Speaker, message: Any) -> None:
        take(self, message)
        types.put(message["type"])

    monkeypatch.setattr(microphone.Speaker, "take", note)
    return types


def hold(script: Callable[[Visitor], None], **options: Any) -> None:
    with scripted_server(script) as url:
        talk.talk(TalkOptions(url=url, **options))


def play_out(sound: FakeSound, taken: queue.Queue[str]) -> np.ndarray:
    """What is heard from the server's last word until the loudspeaker is stopped, (n, channels)."""
    while taken.get(timeout=PATIENCE_S) != "response.done":
        pass
    heard = [np.zeros((0, sound.output.channels), np.float32)]
    while (block := sound.output.play_unless_ended(480)) is not None and len(heard) < 1000:
        heard.append(block)
    return np.concatenate(heard)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def tone(count: int, hz: float = 400.0, rate: float = 48000.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz / rate * np.arange(count))).astype(np.float32)


def resampled(samples: np.ndarray, rate: float, target: float = 16000.0) -> np.ndarray:
    return np.clip(np.rint(soxr.resample(samples, rate, target) * 32768.0), -32768, 32767)


def assert_same_sound(got: np.ndarray, wanted: np.ndarray) -> None:
    assert abs(len(got) - len(wanted)) <= 1
    count = min(len(got), len(wanted))
    assert np.abs(got[:count].astype(float) - wanted[:count]).max() <= 32


# ---------------------------------------------------------------------------------------------------------- capture
def test_w15_nothing_is_recorded_before_the_session_is_ready_and_all_after(
    sound: FakeSound, capsys: pytest.CaptureFixture[str]
) -> None:
    voice = tone(48000)
    got = []

    def script(visitor: Visitor) -> None:
        visitor.greet()
        visitor.receive()
        # The model loads; the device is open already, and still.
        assert sound.input.state == "open"
        visitor.ready()
        sound.input.wait_started()
        for block in np.array_split(voice, 77):
            sound.input.record(block)
        interrupt()
        got.append(visitor.all_audio(answer=False))
        visitor.done()

    hold(script)
    assert_same_sound(got[0], resampled(voice, 48000))
    assert "Speak now. Ctrl-C ends" in capsys.readouterr().err


def test_the_tail_is_sent_before_the_commit_in_appends_of_80_ms(sound: FakeSound) -> None:
    sizes: list[int] = []

    def script(visitor: Visitor) -> None:
        visitor.open()
        sound.input.wait_started()
        # 2.5 frames at 48 kHz.
        sound.input.record(tone(9600))
        interrupt()
        while (piece := visitor.audio()) is not None:
            sizes.append(len(piece))
        visitor.done()

    hold(script)
    assert sizes == [FRAME, FRAME, FRAME // 2]


@pytest.mark.parametrize("rate", [44100.0, 48000.0])
def test_w07_a_microphone_that_refuses_16_khz_is_resampled(sound: FakeSound, rate: float) -> None:
    sound.rows[0]["default_samplerate"] = 16000.0
    sound.accepts = lambda kind, hz, channels: hz == rate
    voice = tone(int(rate), rate=rate)
    got = []

    def script(visitor: Visitor) -> None:
        visitor.open()
        sound.input.wait_started()
        for block in np.array_split(voice, 100):
            sound.input.record(block)
        interrupt()
        got.append(visitor.all_audio(answer=False))
        visitor.done()

    hold(script)
    assert sound.input.form["samplerate"] == rate
    assert_same_sound(got[0], resampled(voice, rate))


def test_w07_a_device_that_takes_nothing_is_named(sound: FakeSound) -> None:
    sound.accepts = lambda kind, rate, channels: kind == "output"
    with pytest.raises(
        AudioInputError, match=r"microphone 'Headset' cannot be opened at 44100 or 48000 Hz with 1 chan.*-9997"
    ):
        talk.talk(TalkOptions(url="ws://127.0.0.1:1", input_device="headset"))


@pytest.mark.parametrize("channel", [0, 1])
def test_w09_a_device_without_a_mono_mode_is_opened_with_its_channels(sound: FakeSound, channel: int) -> None:
    sound.accepts = lambda kind, rate, channels: channels == 2
    voice = np.stack([tone(4800), 0.3 * tone(4800, hz=900.0)], axis=1)
    got = []

    def script(visitor: Visitor) -> None:
        visitor.open()
        sound.input.wait_started()
        sound.input.record(voice)
        interrupt()
        got.append(visitor.all_audio(answer=False))
        visitor.done()

    hold(script, channel=channel)
    assert sound.input.channels == sound.output.channels == 2
    assert_same_sound(got[0], resampled(voice[:, channel], 48000))


def test_a_channel_that_the_microphone_does_not_have(sound: FakeSound) -> None:
    with pytest.raises(AudioInputError, match="microphone 'Built-in' has 2 channels, so none of number 2"):
        talk.talk(TalkOptions(url="ws://127.0.0.1:1", channel=2))


# --------------------------------------------------------------------------------------------------------- playback
def test_the_answer_is_played_in_the_devices_form_and_to_its_end(
    sound: FakeSound, taken: queue.Queue[str], tmp_path: Path
) -> None:
    said = np.rint(20000 * np.sin(np.arange(5 * ANSWER) / 20))
    heard = []

    def script(visitor: Visitor) -> None:
        visitor.open()
        sound.input.wait_started()
        interrupt()
        assert visitor.audio() is None
        for frame in said.reshape(5, ANSWER):
            visitor.speak(frame)
        visitor.done()
        heard.append(play_out(sound, taken))

    hold(script, output_audio=tmp_path / "out.wav")
    assert sound.output.state == "closed"
    (played,) = heard
    wanted = resampled(said.astype(np.float32) / 32768, 22050, 48000)
    assert_same_sound(np.rint(played[: len(wanted), 0] * 32768), wanted)
    assert not played[len(wanted) + 1 :].any()
    with wave.open(str(tmp_path / "out.wav")) as file:
        assert np.array_equal(np.frombuffer(file.readframes(5 * ANSWER), "<i2"), said)


def test_p22_playback_is_emptied_on_cancel(sound: FakeSound, taken: queue.Queue[str]) -> None:
    heard = []

    def script(visitor: Visitor) -> None:
        visitor.open()
        sound.input.wait_started()
        for _ in range(25):
            visitor.speak(np.full(ANSWER, 9000))
        for _ in range(25):
            taken.get(timeout=PATIENCE_S)
        heard.append(sound.output.play(960).max())
        playback_of_cancelled.append(sound.output)
        visitor.send("response.cancelled", frame_index=25)
        taken.get(timeout=PATIENCE_S)

    playback_of_cancelled: list[Any] = []
    with pytest.raises(RemoteError, match="cancelled the session"):
        hold(script)
    assert heard[0] > 0.2
    (stream,) = playback_of_cancelled
    stream.state = "started"
    assert not stream.play(960).any()


def test_json_and_counts(sound: FakeSound, taken: queue.Queue[str], capsys: pytest.CaptureFixture[str]) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        sound.input.wait_started()
        visitor.speak(np.full(ANSWER, 9000))
        taken.get(timeout=PATIENCE_S)
        # One frame, and the device wants two.
        sound.output.play(8000)
        interrupt()
        visitor.all_audio(answer=False)
        visitor.done()
        play_out(sound, taken)

    hold(script, as_json=True, cushion=0)
    *_, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert summary.pop("wall_seconds") >= 0
    assert summary == {
        "type": "summary",
        "frames": 1,
        "transcript": "",
        "text": "",
        "underruns": 1,
        "left_out_frames": 0,
    }


# ------------------------------------------------------------------------------------------------------ half duplex
@pytest.mark.parametrize("half_duplex", [True, False])
def test_w16_half_duplex_sends_silence_while_the_loudspeaker_is_heard(
    sound: FakeSound, taken: queue.Queue[str], half_duplex: bool
) -> None:
    got: list[np.ndarray] = []

    def script(visitor: Visitor) -> None:
        visitor.open()
        sound.input.wait_started()

        def loopback(blocks: int) -> None:
            """The microphone hears what the loudspeaker plays, and a quiet voice besides."""
            for _ in range(blocks):
                sound.input.record(sound.output.play(480)[:, 0] + 0.01 * tone(480))

        loopback(16)  # 160 ms: before the answer
        for _ in range(5):
            visitor.speak(np.rint(12000 * np.sin(np.arange(ANSWER) / 3)))
            taken.get(timeout=PATIENCE_S)
        loopback(40)  # 400 ms: the answer
        loopback(40)  # 400 ms: 300 of echo, and then the voice again
        interrupt()
        got.append(visitor.all_audio(answer=False))
        visitor.done()
        play_out(sound, taken)

    hold(script, half_duplex=half_duplex)
    before, during, after = got[0][:2400], got[0][2720:12000], got[0][14600:]
    assert before.any() and after.any()
    assert during.any() != half_duplex
    assert half_duplex or np.abs(during).max() > 10000


# ---------------------------------------------------------------------------------------------------------- failures
def test_w17_a_device_that_fails_to_start_ends_the_client(sound: FakeSound) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        with pytest.raises(Exception, match="1000"):
            visitor.receive()

    sound.fails_to_start = True
    with pytest.raises(AudioInputError, match=r"loudspeaker 'Built-in' cannot be started: Unanticipated host error"):
        hold(script)


@pytest.mark.parametrize("kind", ["input", "output"])
def test_w17_a_device_that_is_unplugged_ends_the_client(sound: FakeSound, kind: str) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        sound.input.wait_started()
        getattr(sound, kind).unplug()
        with pytest.raises(Exception, match="1000"):
            visitor.receive()

    name = {"input": "microphone", "output": "loudspeaker"}[kind]
    with pytest.raises(AudioInputError, match=f"{name} 'Built-in' stopped by itself"):
        hold(script)


@pytest.mark.parametrize("kind", ["input", "output"])
def test_devices_are_let_go_of_when_the_server_fails(sound: FakeSound, kind: str) -> None:
    def script(visitor: Visitor) -> None:
        visitor.send("error", error={"code": "server_busy", "message": "busy"})
        visitor.socket.close(1013)

    with pytest.raises(RemoteError, match="busy"):
        hold(script)
    assert getattr(sound, kind).state == "closed"


def test_p24_second_ctrl_c_quits_while_the_answer_is_played(sound: FakeSound, taken: queue.Queue[str]) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        sound.input.wait_started()
        for _ in range(100):
            visitor.speak(np.full(ANSWER, 9000))
        interrupt()
        visitor.all_audio(answer=False)
        visitor.done()
        while taken.get(timeout=PATIENCE_S) != "response.done":
            pass
        interrupt()

    with pytest.raises(SystemExit) as left:
        hold(script)
    assert left.value.code == 130
    assert sound.output.state == "closed"


def test_p24_any_close_ends_it(sound: FakeSound) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.socket.close(1008, "idle")

    with pytest.raises(RemoteError, match=r"code 1008 \(idle\)"):
        hold(script)
    assert sound.input.state == sound.output.state == "closed"


# ----------------------------------------------------------------------------------------------------------- devices
def test_list_devices(sound: FakeSound, capsys: pytest.CaptureFixture[str]) -> None:
    talk.list_devices(as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        " input *   0  Built-in  (2 ch, 48000 Hz)",
        " input     1  Headset  (1 ch, 44100 Hz)",
        "output *   0  Built-in  (2 ch, 48000 Hz)",
        "output     1  Headset  (2 ch, 44100 Hz)",
    ]
    talk.list_devices(as_json=True)
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first == {
        "index": 0,
        "name": "Built-in",
        "kind": "input",
        "channels": 2,
        "rate": 48000.0,
        "is_default": True,
    }


def test_devices_are_found_by_number_and_by_part_of_a_name() -> None:
    sound = FakeSound([device("USB Mic", 1, 0), device("USB Mic 2", 1, 0), device("Hall", 0, 2)])
    assert find_device(sound, "input", None).name == "USB Mic"
    assert find_device(sound, "input", "1").name == "USB Mic 2"
    assert find_device(sound, "input", "mic 2").name == "USB Mic 2"
    assert find_device(sound, "input", "usb mic").name == "USB Mic"
    with pytest.raises(
        AudioInputError, match="'usb' may be several microphones: 0 'USB Mic', 1 'USB Mic 2'; give the n"
    ):
        find_device(sound, "input", "usb")
    with pytest.raises(AudioInputError, match="no loudspeaker '0'; there are: 2 'Hall'"):
        find_device(sound, "output", "0")
    with pytest.raises(AudioInputError, match="no default loudspeaker; there are: 2 'Hall'"):
        find_device(sound, "output", None)
    with pytest.raises(AudioInputError, match="no default microphone; there are: none"):
        find_device(FakeSound([]), "input", None)


def test_a_missing_library_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(ConfigError, match=r"need the package sounddevice: pip install 'vcpipe\[mic\]'"):
        load_sound()


def test_a_missing_portaudio_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    with pytest.raises(ConfigError, match="PortAudio library not found; install PortAudio"):
        load_sound()
