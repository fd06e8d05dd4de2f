"""Audio files and pipes: any of them as 16 kHz mono float32, and speech into a WAV."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, cast

import numpy as np
import soundfile
import soxr

from vcpipe.launch.pipe_input import PipeInput
from vcpipe.launch.wav import RawForm, WavSource, raw_header, read_header
from vcpipe.schemas.errors import AudioInputError, ConfigError
from vcpipe.schemas.pcm import pcm16

#: Sample rates that are taken for audio, in Hz.
RATES = (4000, 384000)
#: Most channels of a recording: all of a block are in memory at once.
MAX_CHANNELS = 64

#: Read at once from a file and from a pipe, in seconds: the second is what a live source waits for.
_FILE_BLOCK_S = 0.5
_PIPE_BLOCK_S = 0.02

#: libsndfile's "unknown" is a huge number.
_MOST_FRAMES = 1 << 48

_ACCEPTED = "accepted: WAV, FLAC, OGG, MP3, AIFF and what else libsndfile reads"


class _Source(Protocol):
    """Decoded samples of a file; ``frames`` is None if not known before the end."""

    rate: int
    channels: int
    frames: int | None
    warnings: list[str]

    def read(self, frames: int) -> np.ndarray:
        """At most ``frames`` frames, (n, channels) float32; n is 0 at the end."""

    def close(self) -> None:
        """Let go of the file."""


class AudioReader:
    """One channel of a recording as float32 in [-1, 1] at ``sample_rate``, in chunks, in constant memory.

    ``source``: a path (also of a pipe), "-" for a WAV on standard input, or an open file, which is closed with this.
    ``channel``: counted from 0; channels are never mixed, as a recording of two parties would feed back what the other one
    said. ``raw``: for samples without a header.

    ``duration_s``: length, or None for a pipe that does not tell. ``warnings``: one line each, on what is wrong with the
    file and can be read nevertheless; of a pipe, some are known only at its end. Raises AudioInputError, also while reading.
    """

    def __init__(
        self, source: str | Path | BinaryIO, *, channel: int = 0, sample_rate: int = 16000, raw: RawForm | None = None
    ) -> None:
        if isinstance(source, (str, Path)):
            self.name = "standard input" if str(source) == "-" else str(source)
        else:
            self.name = "the file"
        self._channel = channel
        self._sample_rate = sample_rate
        self._stopped = False
        self._pipe, self._stream, file_bytes = _open_stream(source, self.name)
        self._block_s = _PIPE_BLOCK_S if file_bytes is None else _FILE_BLOCK_S
        try:
            self._source = _open_source(self._stream, file_bytes, self.name, raw)
            self._check()
        except BaseException:
            self._close_stream()
            raise
        self.warnings = self._source.warnings
        frames = self._source.frames
        self.duration_s = None if frames is None else frames / self._source.rate

    def _check(self) -> None:
        source = self._source
        if source.frames == 0:
            raise AudioInputError(f"{self.name} holds no samples")
        low, high = RATES
        if not low <= source.rate <= high:
            raise AudioInputError(f"{self.name} has a sample rate of {source.rate} Hz; accepted: {low} to {high} Hz")
        if source.channels > MAX_CHANNELS:
            raise AudioInputError(f"{self.name} has {source.channels} channels; accepted: up to {MAX_CHANNELS}")
        if not 0 <= self._channel < source.channels:
            has = "1 channel" if source.channels == 1 else f"{source.channels} channels"
            raise AudioInputError(f"{self.name} has no channel {self._channel}: it has {has}, counted from 0")

    def chunks(self) -> Iterator[np.ndarray]:
        """The recording to its end, (n,) float32 pieces with n > 0. Can be run through once."""
        source = self._source
        resampler = soxr.ResampleStream(source.rate, self._sample_rate, 1, dtype="float32")
        passed = source.rate == self._sample_rate
        block, taken = max(1, round(source.rate * self._block_s)), 0
        while not self._stopped and len(samples := self._read(block, taken)):
            taken += len(samples)
            chunk = samples if passed else resampler.resample_chunk(samples)
            if len(chunk):
                yield np.clip(chunk, -1.0, 1.0)
        if not taken and not self._stopped:
            raise AudioInputError(f"{self.name} holds no samples")
        if not passed and len(tail := resampler.resample_chunk(np.zeros(0, np.float32), last=True)):
            yield np.clip(tail, -1.0, 1.0)

    def _read(self, frames: int, position: int) -> np.ndarray:
        try:
            samples = self._source.read(frames)[:, self._channel]
        except (OSError, soundfile.SoundFileError) as error:
            where = position / self._source.rate
            raise AudioInputError(f"{self.name} cannot be read beyond {where:.2f} s: {error}") from None
        finite = np.isfinite(samples)
        if not finite.all():
            index = int(np.argmin(finite))
            where = (position + index) / self._source.rate
            raise AudioInputError(
                f"{self.name}: sample {position + index} ({where:.3f} s) is {samples[index]}, not a finite number"
            )
        return np.clip(samples, -1.0, 1.0)

    def stop(self) -> None:
        """Let :meth:`chunks` end soon, also where it waits for a pipe. Any thread."""
        self._stopped = True
        if self._pipe is not None:
            self._pipe.stop()

    def close(self) -> None:
        """Close the file; standard input stays open."""
        self._source.close()
        self._close_stream()

    def _close_stream(self) -> None:
        if self._stream is not standard_input():
            self._stream.close()

    def __enter__(self) -> AudioReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LibrarySource:
    """Everything that is not a plain WAV, through libsndfile. Needs a file that can be searched."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        try:
            self._file = soundfile.SoundFile(stream)
        except (soundfile.SoundFileError, TypeError, ValueError) as error:
            reason = getattr(error, "error_string", str(error))
            raise AudioInputError(f"{name} is not audio that can be read ({reason.strip()}); {_ACCEPTED}") from None
        self._name = name
        self.rate: int = self._file.samplerate
        self.channels: int = self._file.channels
        self.frames: int | None = self._file.frames if self._file.frames < _MOST_FRAMES else None
        self.warnings: list[str] = []
        self._taken = 0

    def read(self, frames: int) -> np.ndarray:
        samples = self._file.read(frames, dtype="float32", always_2d=True)
        self._taken += len(samples)
        if not len(samples) and self.frames is not None and self._taken < self.frames:
            self.warnings.append(f"{self._name}: the header claims {self.frames} samples, {self._taken} can be read")
            self.frames = self._taken
        return samples

    def close(self) -> None:
        self._file.close()


def standard_input() -> BinaryIO | None:
    """Bytes of standard input; None where there is none, as after ``<&-``."""
    return None if sys.stdin is None else sys.stdin.buffer


def _open_stream(source: str | Path | BinaryIO, name: str) -> tuple[PipeInput | None, BinaryIO, int | None]:
    """The pipe, if it is one; the bytes of ``source``; and how many they are (None for a pipe)."""
    try:
        if not isinstance(source, (str, Path)):
            stream: BinaryIO | None = source
        else:
            stream = standard_input() if str(source) == "-" else open(source, "rb")  # noqa: SIM115 - AudioReader closes it
    except OSError as error:
        raise AudioInputError(f"{name} cannot be opened: {error.strerror}") from None
    if stream is None:
        raise AudioInputError(f"{name} is closed")
    if not stream.seekable():
        pipe = PipeInput(stream, keep_open=stream is standard_input())
        return pipe, cast("BinaryIO", io.BufferedReader(pipe)), None
    size = os.fstat(stream.fileno()).st_size - stream.tell()
    if not size:
        if stream is not standard_input():
            stream.close()
        raise AudioInputError(f"{name} is empty")
    return None, stream, size


def _open_source(stream: BinaryIO, file_bytes: int | None, name: str, raw: RawForm | None) -> _Source:
    if raw is not None:
        return WavSource(stream, raw_header(raw), file_bytes, name)
    start = 0 if file_bytes is None else stream.tell()
    header = read_header(stream, name)
    if header is not None and header.subtype is not None:
        return WavSource(stream, header, file_bytes, name)
    if file_bytes is None:
        found = "no WAV" if header is None else "a WAV of a compressed kind"
        raise AudioInputError(
            f"{name} holds {found}; a pipe must hold a WAV of PCM or float samples, a file may be more"
        )
    stream.seek(start)
    return _LibrarySource(stream, name)


class WavWriter:
    """Speech into a 16-bit mono WAV. A context manager.

    The header is right after every second of audio and after :meth:`close`, so that what an interrupt or a crash leaves is a
    valid file. A pipe gets sizes that mean "until the end". Raises ConfigError where the file cannot be written; an
    existing file is only replaced once the new one could be opened.
    """

    def __init__(self, path: str | Path | None, rate: int = 22050) -> None:
        """``path``: None for standard output, which stays open."""
        self._name = "standard output" if path is None else str(path)
        self._rate = rate
        self._data_bytes = 0
        self._unsaved_bytes = 0
        try:
            self._file = open(_standard_output() if path is None else path, "wb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise self._error(error) from None
        self._is_pipe = not _begins_a_file(self._file)
        try:
            self._write(_wav_header(rate, None if self._is_pipe else 0))
        except ConfigError:
            self._close_file()
            raise

    def write(self, samples: np.ndarray) -> None:
        """Append (n,) float samples; they are clipped to [-1, 1]."""
        self.write_pcm16(pcm16(samples))

    def write_pcm16(self, data: bytes) -> None:
        """Append samples that are little-endian int16 already."""
        self._write(data)
        self._data_bytes += len(data)
        self._unsaved_bytes += len(data)
        if self._is_pipe or self._unsaved_bytes >= 2 * self._rate:
            self._save()

    def close(self) -> None:
        """Finish the header and close the file. May be called again."""
        if self._file.closed:
            return
        try:
            self._save()
        finally:
            self._close_file()

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._error(error) from None

    def _save(self) -> None:
        """Hand the samples to the system, then bring the header's sizes up to date."""
        self._unsaved_bytes = 0
        try:
            self._file.flush()
            if not self._is_pipe:
                os.pwrite(self._file.fileno(), _wav_header(self._rate, self._data_bytes), 0)
        except OSError as error:
            raise self._error(error) from None

    def _close_file(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self._name} cannot be written: {error.strerror}")

    def __enter__(self) -> WavWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _standard_output() -> int:
    """A file descriptor of its own for standard output."""
    if sys.stdout is None:
        raise ConfigError("standard output is closed")
    sys.stdout.flush()
    return os.dup(sys.stdout.fileno())


def _begins_a_file(file: io.BufferedWriter) -> bool:
    """Whether the header can be mended later: not in a pipe, nor behind what a shell's file holds already."""
    if not file.seekable():
        return False
    return file.tell() == 0 and not fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_APPEND


def _wav_header(rate: int, data_bytes: int | None) -> bytes:
    """44 bytes for 16-bit mono; sizes that mean "unknown" for None and for what 32 bits cannot hold."""
    largest = 0xFFFFFFFF
    size = largest - 36 if data_bytes is None else min(data_bytes, largest - 36)
    riff, data = (largest, largest) if data_bytes is None else (size + 36, size)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", riff, b"WAVE") + form + struct.pack("<4sI", b"data", data)
