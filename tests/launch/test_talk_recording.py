"""``vcpipe talk --audio`` against a server that follows a script."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_server import ANSWER, FRAME, PATIENCE_S, Visitor, scripted_server

from vcpipe.launch.talk.client import MOST_AHEAD
from vcpipe.launch.talk.connection import realtime_url
from vcpipe.launch.talk.talk import TalkOptions, talk
from vcpipe.schemas.errors import AudioInputError, ConfigError, RemoteError

RNG = np.random.default_rng(4)


def wav(path: Path, samples: np.ndarray, hz: int = 16000) -> str:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, hz, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return str(path)


def samples_of(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels()) == (22050, 1)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


@pytest.fixture
def recording(tmp_path: Path) -> str:
    """Three frames and a half."""
    return wav(tmp_path / "in.wav", noise(3 * FRAME + 640))


def noise(count: int) -> np.ndarray:
    return RNG.integers(-32768, 32768, count).astype("<i2")


def hold(script: Callable[[Visitor], None], **options: Any) -> None:
    with scripted_server(script) as url:
        talk(TalkOptions(url=url, **options))


# -------------------------------------------------------------------------------------------------------- good ends
def test_a_16_bit_recording_arrives_unchanged_and_the_answer_is_written_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent, said, got = noise(3 * FRAME + 640), noise(4 * ANSWER), []

    def script(visitor: Visitor) -> None:
        visitor.open()
        got.append(visitor.request)
        got.append(visitor.all_audio(answer=False))
        visitor.send("conversation.item.input_audio_transcription.delta", frame_index=0, delta="Hi", transcript="Hi")
        for frame in said.reshape(4, ANSWER):
            visitor.speak(frame)
        visitor.send("response.text.delta", frame_index=1, token_id=7, delta="Hello", text="Hello")
        visitor.done()

    path = wav(tmp_path / "in.wav", sent)
    out = tmp_path / "out.wav"
    options = {"system_prompt": "be brief", "seed": 7, "max_streaming_seconds": 9.0, "model": "m"}
    hold(script, audio=path, output_audio=out, extra_seconds=0.0, **options)
    assert got[0] == options
    assert np.array_equal(got[1], sent)
    assert np.array_equal(samples_of(out), said)
    shown = capsys.readouterr()
    assert shown.out == "   you: Hi\nanswer: Hello\n"
    assert "4 frames (0.32 s)" in shown.err and "may be cut" in shown.err


def test_silence_is_appended_and_pieces_are_frames(recording: str) -> None:
    sizes: list[int] = []

    def script(visitor: Visitor) -> None:
        visitor.open()
        while (piece := visitor.audio()) is not None:
            sizes.append(len(piece))
        visitor.done()

    hold(script, audio=recording)
    # 3.5 frames and 3 s.
    assert sizes == [FRAME] * 41


def test_json_gives_every_message_and_a_summary(recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.all_audio()
        visitor.send("response.text.delta", frame_index=3, token_id=7, delta="é", text="é")
        visitor.done()

    hold(script, audio=recording, extra_seconds=0.0, as_json=True)
    *lines, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["type"] for line in lines] == [
        *["response.audio.delta"] * 4,
        "response.text.delta",
        "input_audio_buffer.committed",
        "response.done",
    ]
    assert lines[0]["audio_codes"] == [0] * 31 and "delta" not in lines[0] and lines[4]["delta"] == "é"
    assert summary.pop("wall_seconds") > 0
    assert summary == {"type": "summary", "frames": 4, "transcript": "", "text": "é"}


def test_fast_pace_never_has_more_than_a_window_unanswered(tmp_path: Path) -> None:
    counts = []

    def script(visitor: Visitor) -> None:
        visitor.open()
        for _ in range(MOST_AHEAD):
            visitor.audio()
        # Nothing more may be on its way: the next append is the answer to the next frame of speech.
        with pytest.raises(TimeoutError):
            visitor.socket.recv(0.1)
        for _ in range(100 - MOST_AHEAD):
            visitor.speak(np.zeros(ANSWER))
            assert visitor.audio() is not None
        counts.append(visitor.frames)
        for _ in range(MOST_AHEAD):
            visitor.speak(np.zeros(ANSWER))
        assert visitor.audio() is None
        visitor.done()

    hold(script, audio=wav(tmp_path / "in.wav", noise(100 * FRAME)), extra_seconds=0.0, pace="fast")
    assert counts == [100 - MOST_AHEAD]


def test_real_pace_sends_a_frame_every_80_ms(recording: str) -> None:
    times = []

    def script(visitor: Visitor) -> None:
        visitor.greet()
        visitor.receive()
        times.append(time.monotonic())
        visitor.ready()
        while visitor.audio() is not None:
            times.append(time.monotonic())
        visitor.done()

    hold(script, audio=recording, extra_seconds=0.2, pace="real")
    ready, *arrivals = times
    assert len(arrivals) == 6
    # Each is due at a multiple of 80 ms from the start, which comes after the server is ready: none early.
    assert all(arrival - ready > index * 0.08 - 0.005 for index, arrival in enumerate(arrivals))


def test_the_recording_ends_where_the_session_takes_no_more(recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = []

    def script(visitor: Visitor) -> None:
        visitor.open(max_streaming_seconds=0.16)
        got.append(visitor.all_audio())
        visitor.done()

    hold(script, audio=recording)
    assert len(got[0]) == 2 * FRAME
    assert "takes 0.16 s of audio: the rest was not sent" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- bad ends
def test_busy_server(recording: str, tmp_path: Path) -> None:
    def script(visitor: Visitor) -> None:
        visitor.send("error", error={"code": "server_busy", "message": "another session is active"})
        visitor.socket.close(1013)

    out = tmp_path / "out.wav"
    out.write_bytes(b"before")
    with pytest.raises(RemoteError, match="server_busy: another session is active"):
        hold(script, audio=recording, output_audio=out)
    assert out.read_bytes() == b"before"


def test_session_that_cannot_be_opened(recording: str) -> None:
    def script(visitor: Visitor) -> None:
        visitor.greet()
        visitor.receive()
        visitor.send("error", error={"code": "session_initialization_failed", "message": "no such luck"})

    with pytest.raises(RemoteError, match="session_initialization_failed: no such luck"):
        hold(script, audio=recording)


def test_an_error_closes_the_input_and_keeps_what_was_said(recording: str, tmp_path: Path) -> None:
    commits = []

    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.audio()
        visitor.speak(np.ones(ANSWER))
        visitor.send("error", error={"code": "inference_error", "message": "frame 1 broke"})
        while (message := visitor.receive())["type"] != "input_audio_buffer.commit":
            pass
        commits.append(message["pad_partial"])
        visitor.done()

    out = tmp_path / "out.wav"
    with pytest.raises(RemoteError, match="inference_error: frame 1 broke"):
        hold(script, audio=recording, output_audio=out, extra_seconds=600.0, pace="real")
    assert commits == [False]
    assert len(samples_of(out)) == ANSWER


def test_p24_an_error_after_the_commit_ends_it(recording: str) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.all_audio()
        visitor.send("error", error={"code": "inference_error", "message": "at the end"})
        with pytest.raises(Exception, match="1000"):
            visitor.receive()

    with pytest.raises(RemoteError, match="at the end"):
        hold(script, audio=recording)


def test_p24_cancelled_instead_of_done_ends_it(recording: str) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.all_audio()
        visitor.send("response.cancelled", frame_index=0)

    with pytest.raises(RemoteError, match="the server cancelled the session"):
        hold(script, audio=recording)


def test_p24_done_before_the_commit_ends_it(recording: str) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.audio()
        visitor.send("response.done", frame_index=0)

    hold(script, audio=recording, extra_seconds=600.0, pace="real")


@pytest.mark.parametrize(("code", "reason"), [(1000, ""), (1008, "idle"), (1009, "message too big"), (1011, "broken")])
def test_p24_any_close_ends_it_and_says_why(recording: str, code: int, reason: str) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.audio()
        visitor.socket.close(code, reason)

    with pytest.raises(RemoteError, match=f"closed the connection, code {code}.*{reason}"):
        hold(script, audio=recording, extra_seconds=600.0, pace="real")


def test_a_connection_that_is_lost(recording: str) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.audio()
        visitor.socket.socket.close()

    with pytest.raises(RemoteError, match="connection to the server was lost"):
        hold(script, audio=recording, extra_seconds=600.0, pace="real")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "not a message of the realtime protocol"),
        ("[1]", "not a message of the realtime protocol"),
        ('{"type": "response.audio.delta", "delta": "AAA*"}', "not base64"),
        ('{"type": "response.audio.delta"}', "not base64"),
        ('{"type": "response.audio.delta", "delta": "AAAA"}', "3 bytes"),
    ],
)
def test_nonsense_from_the_server(recording: str, tmp_path: Path, text: str, message: str) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.socket.send(text)
        visitor.socket.close_timeout = 1

    with pytest.raises(RemoteError, match=message):
        hold(script, audio=recording, output_audio=tmp_path / "out.wav")


# ----------------------------------------------------------------------------------------------------------- Ctrl-C
def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_o01_ctrl_c_commits_and_the_wav_is_whole(recording: str, tmp_path: Path) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        for _ in range(5):
            visitor.audio()
            visitor.speak(np.ones(ANSWER))
        interrupt()
        visitor.all_audio(answer=False)
        visitor.done()

    out = tmp_path / "out.wav"
    with pytest.raises(SystemExit) as left:
        hold(script, audio=recording, output_audio=out, extra_seconds=600.0, pace="real")
    assert left.value.code == 130
    assert len(samples_of(out)) == 5 * ANSWER


def test_p24_second_ctrl_c_quits_a_server_that_never_answers(recording: str) -> None:
    waiting = threading.Event()

    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.audio()
        interrupt()
        visitor.all_audio(answer=False)
        interrupt()
        waiting.wait(PATIENCE_S)

    with scripted_server(script) as url:
        with pytest.raises(SystemExit) as left:
            talk(TalkOptions(url=url, audio=recording, extra_seconds=600.0, pace="real"))
        assert not waiting.is_set()
        waiting.set()
    assert left.value.code == 130


def test_ctrl_c_before_the_session_is_open_quits(recording: str) -> None:
    def script(visitor: Visitor) -> None:
        visitor.greet()
        visitor.receive()
        interrupt()
        with pytest.raises(Exception, match="1000"):
            visitor.receive()

    with pytest.raises(SystemExit) as left:
        hold(script, audio=recording)
    assert left.value.code == 130


# ------------------------------------------------------------------------------------------------------ connecting
def test_the_key_goes_into_the_handshake_and_a_refusal_is_one_line(recording: str) -> None:
    keys = []

    def check(connection: Any, request: Any) -> Any:
        keys.append(request.headers.get("Authorization"))
        return None if keys[-1] == "Bearer K" else connection.respond(401, "no\n")

    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.all_audio()
        visitor.done()

    with scripted_server(script, process_request=check) as url:
        talk(TalkOptions(url=url, audio=recording, api_key="K"))
        with pytest.raises(ConfigError, match=r"answered HTTP 401: it wants a key: give --api-key"):
            talk(TalkOptions(url=url, audio=recording))
    assert keys == ["Bearer K", None]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("ws://h:1", "ws://h:1/v1/realtime"),
        ("http://h", "ws://h/v1/realtime"),
        ("https://h/", "wss://h/v1/realtime"),
        ("wss://h/x/y?model=m", "wss://h/x/y?model=m"),
        ("ws://[::1]:8080", "ws://[::1]:8080/v1/realtime"),
    ],
)
def test_addresses(given: str, used: str) -> None:
    assert realtime_url(given) == used


@pytest.mark.parametrize("given", ["h:80", "127.0.0.1", "ftp://h", "ws://", "ws://h:99999", "ws://h:x", ""])
def test_addresses_that_are_none(given: str) -> None:
    with pytest.raises(ConfigError, match="no address of a realtime server; accepted: ws://HOST:PORT"):
        realtime_url(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microphone": True}, "--audio and --mic exclude each other"),
        ({"cushion": 3}, "--cushion needs the microphone"),
        ({"half_duplex": True}, "--half-duplex needs the microphone"),
        ({"input_device": "x"}, "--input-device needs the microphone"),
        ({"audio": None, "pace": "fast"}, "--pace needs --audio"),
        ({"audio": None, "cushion": -1}, "--cushion must be 0 to 100"),
        ({"extra_seconds": -1.0}, "--extra-seconds must not be negative"),
        ({"channel": -1}, "--channel counts from 0"),
        ({"device": "cpu"}, "--device needs a pipeline of its own"),
        ({"api_key": "a\nb"}, "--api-key must be printable ASCII"),
    ],
)
def test_options_that_have_no_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        talk(TalkOptions(**{"url": "ws://127.0.0.1:1", "audio": "x.wav", **options}))


def test_a_recording_that_is_none_costs_no_connection(tmp_path: Path) -> None:
    with pytest.raises(AudioInputError, match="cannot be opened"):
        talk(TalkOptions(url="ws://127.0.0.1:1", audio=str(tmp_path / "none.wav")))


def test_the_command_ends_with_one_line_and_a_code(recording: str) -> None:
    def script(visitor: Visitor) -> None:
        visitor.open()
        visitor.all_audio()
        visitor.send("response.cancelled", frame_index=0)

    def command(url: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-m", "vcpipe", "talk", "--url", url, "--audio", recording]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    with scripted_server(script) as url:
        done = command(url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the server cancelled the session; start another one\n"
    # Bound, so that nobody else answers there; not listening, so that it does not.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{bound.getsockname()[1]}"
        gone = command(url)
    assert gone.returncode == 2
    assert (
        gone.stderr == f"error: nothing answers at {url}/v1/realtime: connection refused; is `vcpipe serve` running?\n"
    )
