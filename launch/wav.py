"""WAV as it is met in the wild, read forward only: pipes, odd chunks, headers that lie about sizes.

Headers are walked here; samples are decoded by soundfile. Kinds of coding that are not plain samples are left to soundfile
altogether (:attr:`WavHeader.subtype` is None then).
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import BinaryIO, Literal

import numpy as np
import soundfile

from vcpipe.schemas.errors import AudioInputError

#: First four bytes of a file -> byte order of its numbers.
_BYTE_ORDER = {b"RIFF": "<", b"RF64": "<", b"BW64": "<", b"RIFX": ">"}

#: (format tag, bits) -> soundfile's name of the coding.
_SUBTYPES = {
    (1, 8): "PCM_U8",
    (1, 16): "PCM_16",
    (1, 24): "PCM_24",
    (1, 32): "PCM_32",
    (3, 32): "FLOAT",
    (3, 64): "DOUBLE",
    (6, 8): "ALAW",
    (7, 8): "ULAW",
}

#: The tag that stands for "see the sub-format", whose first two bytes are a tag again.
_EXTENSIBLE = 0xFFFE

#: Sizes from here on are what tools write that do not know the length yet (ffmpeg 0xFFFFFFFF, arecord and sox 0x7FFF....).
_PLACEHOLDER_FROM = 0x7FFFFF00

#: More than any file holds.
_UNKNOWN = 1 << 62

_SKIP_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class WavHeader:
    """What stands before the samples.

    ``subtype``: soundfile's name of the coding, None for one that is not decoded here. ``frame_bytes``: one sample of every
    channel. ``riff_bytes`` and ``data_bytes``: sizes as the header says, from its 64-bit fields where it has them.
    ``data_offset``: bytes before the first sample.
    """

    byte_order: str
    subtype: str | None
    channels: int
    rate: int
    frame_bytes: int
    riff_bytes: int
    data_bytes: int
    data_offset: int


@dataclass(frozen=True, slots=True)
class RawForm:
    """Mono samples without a header: 16-bit integers or 32-bit floats, little-endian, at ``rate`` Hz."""

    coding: Literal["s16le", "f32le"]
    rate: int


def raw_header(form: RawForm) -> WavHeader:
    """What a header would say, but for the length: until the end."""
    subtype, frame_bytes = {"s16le": ("PCM_16", 2), "f32le": ("FLOAT", 4)}[form.coding]
    return WavHeader("<", subtype, 1, form.rate, frame_bytes, _UNKNOWN, _UNKNOWN, 0)


def read_header(stream: BinaryIO, name: str) -> WavHeader | None:
    """Read up to the first sample. None for another kind of file; AudioInputError for a WAV that holds no samples."""
    start = stream.read(12)
    order = _BYTE_ORDER.get(start[:4])
    if order is None or start[8:12] != b"WAVE":
        return None
    riff_bytes = struct.unpack(order + "I", start[4:8])[0]
    long_sizes: tuple[int, int] | None = None
    form: tuple[str | None, int, int, int] | None = None
    carried = b""
    offset = 12
    while True:
        head = carried + stream.read(8 - len(carried))
        offset += 8
        if len(head) < 8:
            raise AudioInputError(f"{name} is a WAV file without a data chunk: it holds no samples")
        identifier, size = head[:4], struct.unpack(order + "I", head[4:])[0]
        if identifier == b"data":
            break
        body = _read_chunk(stream, size)
        # Chunks are padded to an even size; some writers forget it, then the next chunk's name begins here.
        pad = stream.read(1) if size % 2 else b""
        carried = pad if pad.isalpha() else b""
        offset += size + size % 2 - len(carried)
        if identifier == b"fmt " and len(body) >= 16:
            form = _parse_format(body, order)
        elif identifier == b"ds64" and len(body) >= 16:
            riff_long, data_long = struct.unpack(order + "QQ", body[:16])
            long_sizes = (riff_long, data_long)
    if form is None:
        raise AudioInputError(f"{name} is a WAV file whose samples come before (or without) their format")
    if long_sizes is not None and size == 0xFFFFFFFF:
        riff_bytes, size = long_sizes
    return WavHeader(order, *form, riff_bytes, size, offset)


def _read_chunk(stream: BinaryIO, size: int) -> bytes:
    """The first bytes of a chunk that is read to its end."""
    body = stream.read(min(size, _SKIP_BYTES))
    left = size - len(body)
    while left > 0 and (skipped := len(stream.read(min(left, _SKIP_BYTES)))):
        left -= skipped
    return body


def _parse_format(body: bytes, order: str) -> tuple[str | None, int, int, int]:
    """The body of a "fmt " chunk -> subtype, channels, rate, bytes of a frame."""
    tag, channels, rate, _, frame_bytes, bits = struct.unpack(order + "HHIIHH", body[:16])
    if tag == _EXTENSIBLE and len(body) >= 26:
        tag = struct.unpack(order + "H", body[24:26])[0]
    plain = channels > 0 and rate > 0 and frame_bytes * 8 == channels * bits
    return _SUBTYPES.get((tag, bits)) if plain else None, channels, rate, frame_bytes


class WavSource:
    """Samples of a WAV whose header has been read from ``stream``, decoded block by block.

    ``file_bytes``: size of the file, None for a pipe. ``frames``: samples of a channel, None if unknown.
    """

    def __init__(self, stream: BinaryIO, header: WavHeader, file_bytes: int | None, name: str) -> None:
        self._stream = stream
        self._header = header
        self._name = name
        self.rate = header.rate
        self.channels = header.channels
        self.warnings: list[str] = []
        self._claimed = self._left = _claimed_bytes(header, file_bytes)
        if file_bytes is not None:
            present = file_bytes - header.data_offset
            self._left = present if self._claimed is None else min(self._claimed, present)
            self._warn_of_missing(present)
            self._warn_of_part(self._left % header.frame_bytes)
            self._left -= self._left % header.frame_bytes
        self._taken = 0
        self.frames = None if self._left is None else self._left // header.frame_bytes

    def read(self, frames: int) -> np.ndarray:
        """The next at most ``frames`` frames, (n, channels) float32; n is 0 at the end."""
        header = self._header
        wanted = frames * header.frame_bytes
        data = self._stream.read(wanted if self._left is None else min(wanted, self._left))
        self._taken += len(data)
        if self._left is not None:
            self._left -= len(data)
            if not data and self._left:
                self._warn_of_missing(self._taken)
                self._left = 0
        part = len(data) % header.frame_bytes
        self._warn_of_part(part)
        data = data[: len(data) - part]
        if not data:
            return np.zeros((0, header.channels), dtype=np.float32)
        samples, _ = soundfile.read(
            io.BytesIO(data),
            dtype="float32",
            always_2d=True,
            format="RAW",
            subtype=header.subtype,
            channels=header.channels,
            samplerate=header.rate,
            endian="LITTLE" if header.byte_order == "<" else "BIG",
        )
        return samples

    def close(self) -> None:
        """The stream is its opener's to close."""

    def _warn_of_missing(self, present: int) -> None:
        if self._claimed is not None and present < self._claimed:
            self.warnings.append(
                f"{self._name}: the header claims {self._claimed} bytes of samples, there are {present}"
            )

    def _warn_of_part(self, part_bytes: int) -> None:
        if part_bytes:
            self.warnings.append(f"{self._name} ends in the middle of a sample, which is left out")


def _claimed_bytes(header: WavHeader, file_bytes: int | None) -> int | None:
    """Size of the samples by the header; None where it stands for "until the end"."""
    size = header.data_bytes
    if size == 0:
        # What an interrupted recorder leaves; believed only where the size of the whole file is right.
        honest = file_bytes is not None and header.riff_bytes in (file_bytes - 8, file_bytes - 9)
        return 0 if honest else None
    if size >= _PLACEHOLDER_FROM and (file_bytes is None or header.data_offset + size > file_bytes):
        return None
    return size
