"""Stands in for the sounddevice library: devices that a test describes, and whose callbacks it drives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

#: Bound of every wait, in seconds.
PATIENCE_S = 60


class PortAudioError(Exception):
    """As the library's own."""


class Stream:
    """An open device. ``record`` and ``play`` do what its hardware would."""

    def __init__(self, sound: FakeSound, form: dict[str, Any], callback: Any, finished: Callable[[], None]) -> None:
        self.form = form
        self.channels: int = form["channels"]
        self.state = "open"
        self.fails_to_start = sound.fails_to_start
        self._callback = callback
        self._finished = finished
        self._started = threading.Event()
        self._running = threading.RLock()  # no callback runs, or begins, once a stream has ended

    def start(self) -> None:
        if self.fails_to_start:
            raise PortAudioError("Unanticipated host error [PaErrorCode -9999]")
        self.state = "started"
        self._started.set()

    def stop(self) -> None:
        self._end("stopped")

    def abort(self) -> None:
        self._end("aborted")

    def close(self) -> None:
        self._end("closed")

    def _end(self, state: str) -> None:
        with self._running:
            was, self.state = self.state, state
        if was == "started":
            self._finished()

    # -- the hardware's side

    def wait_started(self) -> None:
        assert self._started.wait(PATIENCE_S), "the stream was not started"

    def record(self, samples: np.ndarray) -> None:
        """A block of (n,) or (n, channels) samples was heard."""
        self.wait_started()
        assert self.state == "started"
        block = samples if samples.ndim == 2 else np.repeat(samples[:, np.newaxis], self.channels, axis=1)
        block = block.astype(np.float32)
        self._callback(block, len(block), None, None)
        block[:] = np.nan  # The library takes its buffer back.

    def play(self, count: int) -> np.ndarray:
        """The next (count, channels) samples that are heard."""
        self.wait_started()
        block = self.play_unless_ended(count)
        assert block is not None, self.state
        return block

    def play_unless_ended(self, count: int) -> np.ndarray | None:
        """As :meth:`play` of a stream that was started; None once it has ended."""
        with self._running:
            if self.state != "started":
                return None
            block = np.full((count, self.channels), np.nan, np.float32)
            self._callback(block, count, None, None)
            return block

    def unplug(self) -> None:
        self._end("gone")


class FakeSound:
    """The module. ``accepts(kind, rate, channels)`` tells in which forms the devices may be opened."""

    PortAudioError = PortAudioError

    def __init__(self, rows: list[dict[str, Any]] | None = None) -> None:
        self.rows = [device("Built-in", 2, 2), device("Headset", 1, 2, 44100)] if rows is None else rows
        for index, row in enumerate(self.rows):
            row["index"] = index
        self.default = SimpleNamespace(device=(0, 0))
        self.accepts: Callable[[str, float, int], bool] = lambda kind, rate, channels: True
        self.tried: list[tuple[str, float, int]] = []
        self.fails_to_start = False
        self.input: Stream
        self.output: Stream

    def query_devices(self) -> list[dict[str, Any]]:
        return self.rows

    def check_input_settings(self, **form: Any) -> None:
        self._check("input", form)

    def check_output_settings(self, **form: Any) -> None:
        self._check("output", form)

    def _check(self, kind: str, form: dict[str, Any]) -> None:
        assert form["dtype"] == "float32"
        self.tried.append((kind, form["samplerate"], form["channels"]))
        if not self.accepts(*self.tried[-1]):
            raise PortAudioError("Invalid sample rate or number of channels [PaErrorCode -9997]")

    def InputStream(self, *, latency: str, callback: Any, finished_callback: Any, **form: Any) -> Stream:  # noqa: N802
        self._check("input", form)
        self.input = Stream(self, form, callback, finished_callback)
        return self.input

    def OutputStream(self, *, latency: str, callback: Any, finished_callback: Any, **form: Any) -> Stream:  # noqa: N802
        self._check("output", form)
        self.output = Stream(self, form, callback, finished_callback)
        return self.output


def device(name: str, inputs: int, outputs: int, rate: float = 48000) -> dict[str, Any]:
    channels = {"max_input_channels": inputs, "max_output_channels": outputs}
    return {"name": name, **channels, "default_samplerate": float(rate)}
