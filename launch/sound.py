"""Microphone and loudspeaker for a thread that reads or writes them, where no server stands between."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np

from vcpipe.launch.talk.devices import Device, device_error, open_device
from vcpipe.launch.talk.playback import Playback
from vcpipe.launch.talk.resample import Resampler
from vcpipe.schemas.errors import AudioInputError

#: Frames that wait before speech is played, and beyond them before a writer waits.
_CUSHION, _SPARE = 3, 3

#: How long a device may take for nothing, in seconds.
_PATIENCE_S = 5.0

_VANISHED = "stopped by itself; was it unplugged?"


class Recorder:
    """A microphone as a source of samples. Opens the device at once, records from :meth:`chunks` on. A context manager."""

    def __init__(self, sound: Any, device: Device, *, channel: int = 0, sample_rate: int = 16000) -> None:
        self._channel = channel
        self._sample_rate = sample_rate
        self._stopping = False
        self._blocks: queue.SimpleQueue[np.ndarray | AudioInputError | None] = queue.SimpleQueue()
        self._opened = open_device(sound, device, self._heard, self._ended, least_channels=channel + 1)

    def chunks(self) -> Iterator[np.ndarray]:
        """What is said until :meth:`stop`, (n,) float32. Raises AudioInputError where the device ends by itself."""
        resampler = Resampler(self._opened.rate, self._sample_rate)
        if self._stopping:
            return
        self._opened.start()
        while (block := self._blocks.get()) is not None:
            if isinstance(block, AudioInputError):
                raise block
            yield resampler.push(block)
        yield resampler.finish()

    def stop(self) -> None:
        """No more: :meth:`chunks` gives what was said before, and ends. Any thread."""
        if not self._stopping:
            self._stopping = True
            self._opened.stop()
            self._blocks.put(None)

    def _heard(self, block: np.ndarray, frames: int, time: Any, status: Any) -> None:
        self._blocks.put(block[:, self._channel].copy())

    def _ended(self) -> None:
        if not self._stopping:
            self._blocks.put(device_error(self._opened.device, _VANISHED))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._opened.close()


class Loudspeaker:
    """Plays what is written, as long as it takes. Opens the device at once, sounds from :meth:`start` on.

    A context manager that falls silent.
    """

    def __init__(self, sound: Any, device: Device) -> None:
        self._changed = threading.Event()
        self._drained = threading.Event()
        self._stopping = False
        self._failure: AudioInputError | None = None
        self._playback: Playback | None = None
        self._opened = open_device(sound, device, self._play, self._ended)

    @property
    def underruns(self) -> int:
        """Times that silence was played because no speech was there."""
        return 0 if self._playback is None else self._playback.underruns

    @property
    def left_s(self) -> float:
        """Seconds until silence, if nothing more is written."""
        return 0.0 if self._playback is None else self._playback.waiting / self._opened.rate

    def start(self, rate: int, frame_samples: int) -> None:
        """Begin to play frames of so many samples at ``rate`` Hz."""
        self._playback = Playback(rate, self._opened.rate, frame_samples, _CUSHION, on_drained=self._drained.set)
        self._most_waiting = (_CUSHION + _SPARE) * frame_samples * self._opened.rate / rate
        self._opened.start()

    def write(self, samples: np.ndarray) -> None:
        """Append a frame; waits while enough waits. Raises AudioInputError where the device ended or stands still."""
        assert self._playback is not None
        self._check()
        while self._playback.waiting >= self._most_waiting:
            self._changed.clear()
            # Looked at once more, as either may have changed just before.
            waits = self._failure is None and self._playback.waiting >= self._most_waiting
            if waits and not self._changed.wait(_PATIENCE_S):
                raise device_error(self._opened.device, f"plays nothing for {_PATIENCE_S:g} s")
            self._check()
        self._playback.write(samples)

    def play_out(self) -> None:
        """Wait until what was written is heard."""
        assert self._playback is not None
        self._playback.finish()
        if not self._drained.wait(self.left_s + _PATIENCE_S):
            raise device_error(self._opened.device, f"plays nothing for {_PATIENCE_S:g} s")
        self._check()
        self._stopping = True
        self._opened.stop()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _play(self, block: np.ndarray, frames: int, time: Any, status: Any) -> None:
        if self._playback is None:
            block[:] = 0.0
        else:
            self._playback.fill(block)
            self._changed.set()

    def _ended(self) -> None:
        if not self._stopping:
            self._failure = device_error(self._opened.device, _VANISHED)
            self._changed.set()
            self._drained.set()

    def __enter__(self) -> Loudspeaker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._opened.abort()
        self._opened.close()
