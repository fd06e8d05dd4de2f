"""Speech out: WAV files and pipes as they are written."""

from __future__ import annotations

import os
import struct
import wave
from pathlib import Path

import numpy as np
import pytest

from vcpipe.launch.audio_io import AudioReader, WavWriter
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.pcm import pcm16


def test_pcm16_rounds_half_to_even_and_clips() -> None:
    samples = np.array([0.5, -0.5, 1.5, -1.5, 0.0, 1 / 32767, 2.5 / 32767], np.float32)
    assert np.frombuffer(pcm16(samples), "<i2").tolist() == [16384, -16384, 32767, -32767, 0, 1, 2]


def frames_of(path: Path) -> int:
    with wave.open(str(path)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (22050, 1, 2)
        assert path.stat().st_size >= 44 + 2 * reader.getnframes()
        return reader.getnframes()


@pytest.mark.parametrize("interrupt", [None, KeyboardInterrupt, ValueError])
def test_one_header_with_the_right_sizes(tmp_path: Path, interrupt: type[BaseException] | None) -> None:
    path = tmp_path / "out.wav"
    frame = np.linspace(-1, 1, 1764, dtype=np.float32)
    try:
        with WavWriter(path) as writer:
            for _ in range(5):
                writer.write(frame)
            if interrupt is not None:
                raise interrupt
    except (KeyboardInterrupt, ValueError):
        pass
    assert frames_of(path) == 5 * 1764
    assert path.read_bytes()[44:] == pcm16(frame) * 5
    with AudioReader(path, sample_rate=22050) as reader:
        assert reader.warnings == []


def test_header_is_valid_while_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    with WavWriter(path) as writer:
        for _ in range(30):
            writer.write(np.zeros(1764, np.float32))
        assert frames_of(path) == 2 * 13 * 1764, "13 frames are the first whole number beyond a second"
    assert frames_of(path) == 30 * 1764
    writer.close()


def test_no_samples_give_an_empty_valid_file(tmp_path: Path) -> None:
    with WavWriter(tmp_path / "out.wav"):
        pass
    assert frames_of(tmp_path / "out.wav") == 0


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no/out.wav cannot be written: No such file"):
        WavWriter(tmp_path / "no" / "out.wav")
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        WavWriter(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_one_clear_line() -> None:
    with (
        pytest.raises(ConfigError, match="/dev/full cannot be written: No space left"),
        WavWriter("/dev/full") as writer,
    ):
        for _ in range(20):
            writer.write(np.zeros(1764, np.float32))


def test_a_pipe_gets_samples_at_once_and_an_open_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with WavWriter(path, 24000) as writer:
        writer.write(np.full(100, 0.5, np.float32))
        received = os.read(reading, 4096)
    os.close(reading)
    assert received[:4] + received[40:44] == b"RIFF" + b"\xff" * 4
    assert struct.unpack("<I", received[24:28]) == (24000,)
    assert received[44:] == struct.pack("<h", 16384) * 100
