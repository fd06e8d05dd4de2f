"""A recording as the source of a session, at the pace of speech or as fast as the server answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import numpy as np

from vcpipe.launch.audio_io import AudioReader, WavWriter
from vcpipe.launch.talk.connection import Message, SessionInfo, decode_pcm16
from vcpipe.launch.talk.resample import FrameCutter

Pace = Literal["real", "fast"]

#: Frames that may be unanswered. Enough to keep a server busy over any network, and far less than it would refuse to hold.
MOST_AHEAD = 64


class Recording:
    """The source of ``vcpipe talk --audio``: a file, then ``extra_s`` seconds of silence.

    It ends by itself where the session would take no more. ``cut`` tells that something was not sent.
    """

    def __init__(self, reader: AudioReader, info: SessionInfo, pace: Pace, extra_s: float = 0.0) -> None:
        self.cut = False
        self._reader = reader
        self._info = info
        self._pace = pace
        self._extra_samples = round(extra_s * info.input_rate)
        self._most_frames = None if info.limit_s is None else int(info.limit_s / info.frame_s)
        self._sent = self._answered = 0
        self._stopped = asyncio.Event()
        self._changed = asyncio.Event()

    async def frames(self) -> AsyncIterator[np.ndarray]:
        """See ``Source``; the last one may be short."""
        begun = asyncio.get_running_loop().time()
        pieces = self._pieces()
        # Reading may wait, as on a pipe.
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            await self._room()
            if self._pace == "real":
                await self._until(begun + self._sent * self._info.frame_s)
            self.cut = self._stopped.is_set() or self._sent == self._most_frames
            if self.cut:
                return
            self._sent += 1
            yield piece

    def stop(self) -> None:
        """See ``Source``."""
        self._stopped.set()
        self._changed.set()

    def take(self, message: Message) -> None:
        """Learn from the server's messages how far it is."""
        if message["type"] == "response.audio.delta":
            self._answered += 1
            self._changed.set()

    def _pieces(self) -> Iterator[np.ndarray]:
        cutter = FrameCutter(self._info.frame_samples)
        for chunk in self._reader.chunks():
            yield from cutter.push(chunk)
        yield from cutter.push(np.zeros(self._extra_samples, np.float32))
        if len(rest := cutter.finish()):
            yield rest

    async def _room(self) -> None:
        while self._sent - self._answered >= MOST_AHEAD and not self._stopped.is_set():
            self._changed.clear()
            await self._changed.wait()

    async def _until(self, due: float) -> None:
        delay = due - asyncio.get_running_loop().time()
        if delay > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), delay)


class AnswerFile:
    """Writes what the server says into a WAV."""

    def __init__(self, writer: WavWriter) -> None:
        self._writer = writer

    def take(self, message: Message) -> None:
        """Append the samples of an audio delta, bit for bit."""
        if message["type"] == "response.audio.delta":
            self._writer.write_pcm16(decode_pcm16(message))
