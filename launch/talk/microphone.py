"""A microphone as the source of a session, and a loudspeaker that plays the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from vcpipe.launch.talk.connection import Message, SessionInfo, decode_pcm16
from vcpipe.launch.talk.devices import Device, OpenDevice, device_error, open_device
from vcpipe.launch.talk.playback import Playback
from vcpipe.launch.talk.resample import FrameCutter, Resampler
from vcpipe.schemas.errors import AudioInputError

#: How long after the end of the speech the device may take to play it out, in seconds.
_PATIENCE_S = 2.0

_VANISHED = "stopped by itself; was it unplugged?"


class Microphone:
    """The source of ``vcpipe talk --mic``. Opens the device at once, records from :meth:`frames` on.

    ``channel``: the one that is sent, from 0. ``muted``: asked with every block; silence is sent in place of it while true.
    """

    def __init__(
        self, sound: Any, device: Device, *, channel: int = 0, muted: Callable[[], bool] = lambda: False
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._muted = muted
        self._stopping = False
        self._blocks: asyncio.Queue[np.ndarray | AudioInputError | None] = asyncio.Queue()
        self._opened = open_device(sound, device, self._heard, self._ended, least_channels=channel + 1)
        self._info: SessionInfo | None = None

    def configure(self, info: SessionInfo) -> None:
        """Tell what the session wants."""
        self._info = info

    async def frames(self) -> AsyncIterator[np.ndarray]:
        """See ``Source``: a frame every 80 ms; after :meth:`stop` the rest, which may be shorter."""
        assert self._info is not None
        resampler = Resampler(self._opened.rate, self._info.input_rate)
        cutter = FrameCutter(self._info.frame_samples)
        if not self._stopping:
            self._opened.start()
            while (block := await self._blocks.get()) is not None:
                if isinstance(block, AudioInputError):
                    raise block
                for frame in cutter.push(resampler.push(block)):
                    yield frame
            for frame in cutter.push(resampler.finish()):
                yield frame
        if len(rest := cutter.finish()):
            yield rest

    def stop(self) -> None:
        """See ``Source``: what was said before is still sent."""
        if not self._stopping:
            self._stopping = True
            self._opened.stop()
            # After the blocks that the device's thread has handed over.
            self._loop.call_soon(self._blocks.put_nowait, None)

    def fail(self, error: AudioInputError) -> None:
        """End with ``error``. May be called on any thread."""
        _call(self._loop, self._blocks.put_nowait, error)

    def close(self) -> None:
        """Let go of the device."""
        self._stopping = True
        self._opened.close()

    def _heard(self, block: np.ndarray, frames: int, time: Any, status: Any) -> None:
        samples = np.zeros(len(block), np.float32) if self._muted() else block[:, self._channel].copy()
        _call(self._loop, self._blocks.put_nowait, samples)

    def _ended(self) -> None:
        if not self._stopping:
            self.fail(device_error(self._opened.device, _VANISHED))


class Speaker:
    """Plays audio deltas through a :class:`Playback`. Opens the device at once, sounds from :meth:`start` on.

    ``on_failure`` is told, on the device's thread, when it ends by itself.
    """

    def __init__(self, sound: Any, device: Device, cushion_frames: int = 3) -> None:
        self._loop = asyncio.get_running_loop()
        self._cushion_frames = cushion_frames
        self._drained = asyncio.Event()
        self._stopping = False
        self._opened: OpenDevice = open_device(sound, device, self._play, self._ended)
        self.playback: Playback | None = None
        self.on_failure: Callable[[AudioInputError], None] = lambda error: None

    @property
    def speaking(self) -> bool:
        """True while the loudspeaker is heard."""
        return self.playback is not None and self.playback.speaking

    def start(self, info: SessionInfo) -> None:
        """Begin to play what the session says."""
        on_drained = self._drained.set
        self.playback = Playback(
            info.output_rate,
            self._opened.rate,
            info.output_samples,
            self._cushion_frames,
            on_drained=lambda: _call(self._loop, on_drained),
        )
        self._opened.start()

    def take(self, message: Message) -> None:
        """See ``Listener``: a cancelled session falls silent at once."""
        assert self.playback is not None
        if message["type"] == "response.audio.delta":
            self.playback.write(np.frombuffer(decode_pcm16(message), "<i2").astype(np.float32) / 32768)
        elif message["type"] == "response.done":
            self.playback.finish()
        elif message["type"] == "response.cancelled":
            self.playback.clear()

    async def play_out(self) -> None:
        """After ``response.done``: wait until what was said is heard."""
        assert self.playback is not None
        left_s = self.playback.waiting / self._opened.rate
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drained.wait(), left_s + _PATIENCE_S)
        self._stopping = True
        self._opened.stop()

    def close(self) -> None:
        """Fall silent and let go of the device."""
        self._stopping = True
        self._opened.abort()
        self._opened.close()

    def _play(self, block: np.ndarray, frames: int, time: Any, status: Any) -> None:
        if self.playback is None:
            block[:] = 0.0
        else:
            self.playback.fill(block)

    def _ended(self) -> None:
        if not self._stopping:
            _call(self._loop, self._drained.set)
            self.on_failure(device_error(self._opened.device, _VANISHED))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
    """From a device's thread; a loop that is gone wants to hear nothing."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)
