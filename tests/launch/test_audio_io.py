"""Audio in: every header is built here by hand."""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import soundfile
import soxr
from waiting import wait_until

from vcpipe.launch import audio_io
from vcpipe.launch.audio_io import AudioReader
from vcpipe.launch.pipe_input import PipeInput
from vcpipe.launch.wav import RawForm
from vcpipe.schemas.errors import AudioInputError

UNKNOWN = 0xFFFFFFFF
TONE = (0.6 * np.sin(np.arange(1600) / 9)).astype(np.float32)
INT16 = np.rint(TONE * 32767).astype("<i2")
PCM = INT16.tobytes()
GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")


def chunk(identifier: bytes, body: bytes, size: int | None = None, order: str = "<") -> bytes:
    pad = b"\0" if size is None and len(body) % 2 else b""
    return identifier + struct.pack(order + "I", len(body) if size is None else size) + body + pad


def form(
    tag: int = 1, bits: int = 16, channels: int = 1, rate: int = 16000, sub_tag: int | None = None, order: str = "<"
) -> bytes:
    frame = channels * bits // 8
    body = struct.pack(order + "HHIIHH", tag, channels, rate, rate * frame, frame, bits)
    if sub_tag is not None:
        body += struct.pack(order + "HHIH", 22, bits, 0, sub_tag) + GUID_TAIL
    return body


def wav(
    fmt: bytes,
    data: bytes,
    *,
    data_size: int | None = None,
    riff_size: int | None = None,
    before: bytes = b"",
    after: bytes = b"",
    order: str = "<",
) -> bytes:
    body = b"WAVE" + chunk(b"fmt ", fmt, order=order) + before + chunk(b"data", data, data_size, order) + after
    riff = b"RIFF" if order == "<" else b"RIFX"
    return riff + struct.pack(order + "I", len(body) if riff_size is None else riff_size) + body


def rf64(long_data_size: int) -> bytes:
    sizes = chunk(b"ds64", struct.pack("<QQQI", long_data_size + 72, long_data_size, 1600, 0))
    return b"RF64" + b"\xff" * 4 + b"WAVE" + sizes + chunk(b"fmt ", form()) + chunk(b"data", PCM, UNKNOWN)


def packed24(values: np.ndarray) -> bytes:
    return np.rint(values * (2**23 - 1)).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


def read(path: Path, **options: int) -> np.ndarray:
    with AudioReader(path, **options) as reader:
        return np.concatenate(list(reader.chunks()))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in.wav"


# ------------------------------------------------------------------------------------------------ WAV headers
HEALTHY = {
    "pcm16": wav(form(), PCM),
    "pcm8": wav(form(bits=8), np.rint(TONE * 127 + 128).astype(np.uint8).tobytes()),
    "pcm24": wav(form(bits=24), packed24(TONE)),
    "pcm32": wav(form(bits=32), np.rint(TONE.astype(np.float64) * (2**31 - 1)).astype("<i4").tobytes()),
    "float32": wav(form(3, 32), TONE.tobytes()),
    "float64": wav(form(3, 64), TONE.astype("<f8").tobytes()),
    "extensible pcm16": wav(form(0xFFFE, sub_tag=1), PCM),
    "extensible pcm24": wav(form(0xFFFE, 24, sub_tag=1), packed24(TONE)),
    "extensible float": wav(form(0xFFFE, 32, sub_tag=3), TONE.tobytes()),
    "big-endian": wav(form(order=">"), INT16.astype(">i2").tobytes(), order=">"),
    "format of 18 bytes": wav(form() + b"\0\0", PCM),
    "odd LIST": wav(form(), PCM, before=chunk(b"LIST", b"INFOa")),
    "odd LIST without its pad byte": wav(form(), PCM, before=chunk(b"LIST", b"INFOa", size=5)),
    "bext and unknown chunks": wav(form(), PCM, before=chunk(b"bext", b"x" * 602) + chunk(b"zzzz", b"abc")),
    "large chunk before": wav(form(), PCM, before=chunk(b"JUNK", b"data" * 50_000)),
    "LIST behind": wav(form(), PCM, after=chunk(b"LIST", b"INFOabcd")),
    "RF64": rf64(len(PCM)),
    "RF64 of an interrupted recorder": rf64(0),
    "sizes 0": wav(form(), PCM, data_size=0, riff_size=0),
    "sizes of an empty file": wav(form(), PCM, data_size=0, riff_size=36),
    "sizes unknown": wav(form(), PCM, data_size=UNKNOWN, riff_size=UNKNOWN),
    "sizes of arecord": wav(form(), PCM, data_size=0x7FFFFFFF, riff_size=0x7FFFFFFF),
    "A-law": wav(form(6, 8), b"\xd5" * 1600),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_headers_of_all_kinds_give_the_samples(file: Path, name: str) -> None:
    file.write_bytes(HEALTHY[name])
    with AudioReader(file) as reader:
        samples = np.concatenate(list(reader.chunks()))
        assert reader.duration_s == 0.1
        assert reader.warnings == []
    assert samples.dtype == np.float32
    expected = np.zeros(1600) if name == "A-law" else TONE
    assert np.abs(samples - expected).max() < (0.01 if name == "pcm8" else 1e-3)


@pytest.mark.parametrize(
    ("data", "claimed", "samples", "warnings"),
    [
        (PCM, 4 * len(PCM), 1600, ["header claims 12800 bytes of samples, there are 3200"]),
        (PCM[:-1], len(PCM), 1599, ["header claims 3200 bytes of samples, there are 3199", "middle of a sample"]),
        (PCM[:-1], UNKNOWN, 1599, ["middle of a sample"]),
        (PCM, 2 * 1000, 1000, []),
    ],
)
def test_sizes_that_lie_are_warned_of(file: Path, data: bytes, claimed: int, samples: int, warnings: list[str]) -> None:
    file.write_bytes(wav(form(), data, data_size=claimed))
    with AudioReader(file) as reader:
        assert len(reader.warnings) == len(warnings)
        assert all(text in line for text, line in zip(warnings, reader.warnings, strict=True))
        assert reader.duration_s == samples / 16000
        assert np.allclose(np.concatenate(list(reader.chunks())), TONE[:samples], atol=1e-4)
        assert len(reader.warnings) == len(warnings)


def test_data_chunk_that_is_really_empty(file: Path) -> None:
    file.write_bytes(wav(form(), b"", after=chunk(b"LIST", b"INFO" + b"a" * 60)))
    with pytest.raises(AudioInputError, match="holds no samples"):
        AudioReader(file)


def test_24_bits_are_as_loud_as_16(file: Path) -> None:
    sine = np.sin(np.arange(16000) / 5)
    file.write_bytes(wav(form(bits=24), packed24(sine)))
    assert abs(np.sqrt(np.mean(read(file) ** 2)) - np.sqrt(0.5)) < 0.01


def test_float_samples_are_clipped(file: Path) -> None:
    file.write_bytes(wav(form(3, 32), np.array([0.5, 1.5, -2], "<f4").tobytes()))
    assert read(file).tolist() == [0.5, 1.0, -1.0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_no_numbers_are_located(file: Path, value: float) -> None:
    samples = np.zeros(20000, "<f4")
    samples[12000] = value
    file.write_bytes(wav(form(3, 32), samples.tobytes()))
    with pytest.raises(AudioInputError, match=rf"in\.wav: sample 12000 \(0\.750 s\) is {value}, not a finite number"):
        read(file)


# ------------------------------------------------------------------------------------------------ channels, rates
def test_one_channel_is_taken_never_a_mix(file: Path) -> None:
    left, right = np.sin(np.arange(1600) / 9), np.cos(np.arange(1600) / 5) / 2
    both = np.rint(np.stack([left, right], axis=1) * 32767).astype("<i2")
    file.write_bytes(wav(form(channels=2), both.tobytes()))
    assert np.allclose(read(file), left, atol=1e-4)
    assert np.allclose(read(file, channel=1), right, atol=1e-4)
    with pytest.raises(AudioInputError, match="no channel 2: it has 2 channels, counted from 0"):
        AudioReader(file, channel=2)
    file.write_bytes(HEALTHY["pcm16"])
    with pytest.raises(AudioInputError, match="no channel -1: it has 1 channel,"):
        AudioReader(file, channel=-1)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000, 192000])
def test_resampling_has_no_seams_and_no_lost_tail(file: Path, rate: int) -> None:
    sine = (0.9 * np.sin(2 * np.pi * 1000 * np.arange(round(1.2345 * rate)) / rate)).astype(np.float32)
    file.write_bytes(wav(form(3, 32, rate=rate), sine.tobytes()))
    with AudioReader(file) as reader:
        chunks = list(reader.chunks())
    assert len(chunks) > 2
    samples = np.concatenate(chunks)
    assert abs(len(samples) - round(len(sine) * 16000 / rate)) <= 1
    at_once = soxr.resample(sine, rate, 16000)
    common = min(len(samples), len(at_once))
    assert np.abs(samples[:common] - at_once[:common]).max() < 1e-3


def test_result_does_not_depend_on_the_block_size(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 24000).astype("<f4")
    file.write_bytes(wav(form(3, 32, rate=48000), noise.tobytes()))
    expected = read(file)
    for block_s in (0.001, 0.01, 3.0):
        monkeypatch.setattr(audio_io, "_FILE_BLOCK_S", block_s)
        samples = read(file)
        assert samples.shape == expected.shape == (8000,)
        assert np.abs(samples - expected).max() < 1e-5


def test_resampled_samples_stay_in_range(file: Path) -> None:
    square = np.sign(np.sin(np.arange(48000) / 20)).astype("<f4")
    file.write_bytes(wav(form(3, 32, rate=48000), square.tobytes()))
    assert np.abs(read(file)).max() == 1.0


@pytest.mark.parametrize("rate", [100, 400_000])
def test_rates_out_of_reach_are_refused(file: Path, rate: int) -> None:
    file.write_bytes(wav(form(rate=rate), PCM))
    with pytest.raises(AudioInputError, match=f"sample rate of {rate} Hz; accepted: 4000 to 384000 Hz"):
        AudioReader(file)


def test_chunks_of_a_long_file_are_small(file: Path) -> None:
    file.write_bytes(wav(form(), b"\1\0" * 160_000))
    with AudioReader(file) as reader:
        assert {len(samples) for samples in reader.chunks()} == {8000}


# ------------------------------------------------------------------------------------------------ other files
@pytest.mark.parametrize(
    ("name", "subtype"),
    [("a.flac", "PCM_24"), ("a.ogg", "VORBIS"), ("a.aiff", "PCM_16"), ("a.w64", "PCM_16"), ("a.wav", "MS_ADPCM")],
)
def test_other_formats_go_through_the_library(tmp_path: Path, name: str, subtype: str) -> None:
    path = tmp_path / name
    sine = 0.5 * np.sin(2 * np.pi * 300 * np.arange(16000) / 16000)
    soundfile.write(path, np.stack([np.zeros(16000), sine], axis=1), 16000, subtype=subtype)
    with AudioReader(path, channel=1) as reader:
        samples = np.concatenate(list(reader.chunks()))
        assert reader.duration_s == pytest.approx(1.0, abs=0.1)
    assert np.corrcoef(samples[:16000], sine)[0, 1] > 0.99


def test_a_cut_flac_gives_what_is_there_or_says_where_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, np.random.default_rng(0).uniform(-0.5, 0.5, 64000), 16000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with AudioReader(path) as reader:
        try:
            samples = np.concatenate(list(reader.chunks()))
        except AudioInputError as error:
            assert "cannot be read beyond" in str(error)
        else:
            assert 0 < len(samples) < 64000
            assert "claims 64000 samples" in reader.warnings[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"RIFF", "is not audio that can be read"),
        (b"hello, I am a text\n" * 9, r"is not audio that can be read \(Format not recognised.\); accepted: WAV, FLAC"),
        (wav(form(), b""), "holds no samples"),
        (wav(form(), b"\1"), "holds no samples"),
        (wav(form(), b"")[:-8], "without a data chunk"),
        (b"RIFF" + struct.pack("<I", 12 + len(PCM)) + b"WAVE" + chunk(b"data", PCM), "before .* their format"),
        (wav(form(channels=0), PCM), "Channel count is zero"),
        (wav(form(), PCM, before=b"LIST" + struct.pack("<I", UNKNOWN - 1)), "without a data chunk"),
    ],
)  # fmt: skip
def test_what_is_no_audio_is_one_clear_line(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(AudioInputError, match=message) as caught:
        AudioReader(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(AudioInputError, match=r"nope\.wav cannot be opened: No such file"):
        AudioReader(tmp_path / "nope.wav")
    with pytest.raises(AudioInputError, match="cannot be opened: Is a directory"):
        AudioReader(tmp_path)


# ------------------------------------------------------------------------------------------------ pipes
@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard input becomes a pipe; the value is its writing end."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
        yield writing


@pytest.mark.parametrize(
    "name", ["pcm16", "extensible float", "odd LIST", "sizes unknown", "sizes 0", "RF64", "LIST behind"]
)
def test_standard_input_is_read_without_searching(stdin: int, name: str) -> None:
    os.write(stdin, HEALTHY[name])
    os.close(stdin)
    with AudioReader("-") as reader:
        assert reader.duration_s == (None if name.startswith("sizes") else 0.1)
        chunks = list(reader.chunks())
    assert {len(samples) for samples in chunks} == {320}
    assert np.allclose(np.concatenate(chunks), TONE, atol=1e-3)
    assert reader.warnings == []
    assert not sys.stdin.buffer.closed


def test_a_live_pipe_gives_samples_before_its_end(stdin: int) -> None:
    os.write(stdin, wav(form(), b"", data_size=UNKNOWN, riff_size=UNKNOWN) + PCM[:640])
    with AudioReader("-") as reader:
        chunks = reader.chunks()
        assert len(next(chunks)) == 320
        os.write(stdin, PCM[640:1281])
        assert len(next(chunks)) == 320
        os.close(stdin)
        assert list(chunks) == []
    assert reader.warnings == ["standard input ends in the middle of a sample, which is left out"]


def test_a_pipe_that_ends_early_is_warned_of(stdin: int) -> None:
    os.write(stdin, wav(form(), PCM, data_size=2 * len(PCM)))
    os.close(stdin)
    with AudioReader("-") as reader:
        assert sum(map(len, reader.chunks())) == 1600
    assert reader.warnings == ["standard input: the header claims 6400 bytes of samples, there are 3200"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "standard input holds no WAV"),
        (b"fLaC" + b"\0" * 99, "standard input holds no WAV; a pipe must hold a WAV of PCM or float samples"),
        (wav(form(2, 4), PCM), "standard input holds a WAV of a compressed kind"),
    ],
)
def test_a_pipe_must_hold_a_plain_wav(stdin: int, content: bytes, message: str) -> None:
    os.write(stdin, content)
    os.close(stdin)
    with pytest.raises(AudioInputError, match=message):
        AudioReader("-")


def test_an_empty_stream_of_unknown_length(stdin: int) -> None:
    os.write(stdin, wav(form(), b"", data_size=UNKNOWN))
    os.close(stdin)
    with AudioReader("-") as reader, pytest.raises(AudioInputError, match="standard input holds no samples"):
        list(reader.chunks())


def test_stop_ends_a_reader_that_waits_for_a_pipe(stdin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[PipeInput] = []
    read = PipeInput.readinto
    monkeypatch.setattr(PipeInput, "readinto", lambda self, buffer: reads.append(self) or read(self, buffer))
    os.write(stdin, wav(form(), b"", data_size=UNKNOWN, riff_size=UNKNOWN) + PCM[:1000])
    with AudioReader("-") as reader:

        def stop_once_it_waits() -> None:
            wait_until(lambda: len(reads) == 2, "a read after the one that took all there is")
            reader.stop()

        stopping = threading.Thread(target=stop_once_it_waits)
        stopping.start()
        chunks = list(reader.chunks())  # nobody writes, and nobody closes
        stopping.join()
    os.close(stdin)
    assert np.array_equal(np.rint(np.concatenate(chunks) * 32768), INT16[:500])


def test_stop_ends_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav(form(), bytes(16000 * 4)))
    with AudioReader(path) as reader:
        chunks = reader.chunks()
        assert len(next(chunks)) == 8000
        reader.stop()
        assert list(chunks) == []


@pytest.mark.parametrize(("coding", "kind", "scale"), [("s16le", "<i2", 32768), ("f32le", "<f4", 1)])
@pytest.mark.parametrize("piped", [False, True])
def test_samples_without_a_header(
    tmp_path: Path, stdin: int, coding: Literal["s16le", "f32le"], kind: str, scale: int, piped: bool
) -> None:
    data = (TONE * scale).astype(kind)
    path = tmp_path / "a.raw"
    path.write_bytes(data.tobytes() + b"\1")
    os.write(stdin, path.read_bytes())
    os.close(stdin)
    with AudioReader("-" if piped else path, raw=RawForm(coding, 16000)) as reader:
        assert reader.duration_s == (None if piped else 0.1)
        assert np.array_equal(np.concatenate(list(reader.chunks())), data.astype(np.float32) / scale)
    assert len(reader.warnings) == 1 and "middle of a sample" in reader.warnings[0]


def test_a_closed_standard_input_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(AudioInputError, match="standard input is closed"):
        AudioReader("-")
