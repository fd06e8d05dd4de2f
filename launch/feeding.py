"""From a source of samples into a live transcription.

It is fed on a thread of its own, so that text comes while the source is waited for.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

import numpy as np

from vcpipe.schemas.errors import AudioInputError, BacklogError, SessionClosedError, VcpipeError
from vcpipe.schemas.streaming import StreamingSession

#: Most seconds that are fed before they are heard, where the source can wait. So much is left to do at its end.
_AHEAD_S = 2.0

#: Longest piece that is fed at once, in seconds.
_PIECE_S = 0.08


class SampleSource(Protocol):
    """Where samples come from: a recording, a pipe, a microphone."""

    def chunks(self) -> Iterator[np.ndarray]:
        """Pieces of (n,) float32 at the session's rate."""

    def stop(self) -> None:
        """Let :meth:`chunks` end soon. Any thread."""


class Feeder:
    """Feeds ``session`` from ``source`` until that ends or :meth:`stop`, and closes it. A context manager that stops and joins.

    ``can_wait``: False for a microphone, which speaks on whether or not it is heard. ``paced``: samples are fed when they would
    have been spoken.

    ``error``: what ended the source too early, None otherwise. Times are of ``time.monotonic``.
    """

    def __init__(self, source: SampleSource, session: StreamingSession, *, can_wait: bool, paced: bool = False) -> None:
        self.fed_s = 0.0
        self.started_at: float | None = None
        self.closed_at: float | None = None
        self.error: BaseException | None = None
        self._source = source
        self._session = session
        self._can_wait = can_wait
        self._paced = paced
        self._heard_s = 0.0
        self._stopping = False
        # Tells the feeding thread to look again. Its put, unlike an event's set, may be interrupted by a signal's handler that
        # puts as well: Ctrl-C may come while the main thread is in here.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vcpipe-feeder", daemon=True)

    def heard(self, seconds: float) -> None:
        """So much of what was fed is done."""
        self._heard_s = seconds
        if self._wake.empty():
            self._wake.put(None)

    def stop(self) -> None:
        """Feed nothing more; what was fed is still to be heard. Any thread, and a signal's handler."""
        self._stopping = True
        self._wake.put(None)
        self._source.stop()

    def _run(self) -> None:
        try:
            self._feed()
        except SessionClosedError:
            pass  # Who steps the session is told why.
        except BaseException as error:
            self.error = error
        finally:
            self.closed_at = time.monotonic()
            # A pipeline that is lost tells so where the session is stepped.
            with contextlib.suppress(VcpipeError):
                self._session.close()

    def _feed(self) -> None:
        rate = self._session.input_sample_rate
        size = round(_PIECE_S * rate)
        for chunk in self._source.chunks():
            for start in range(0, len(chunk), size):
                if not self._may_go_on():
                    return
                piece = chunk[start : start + size]
                try:
                    self._session.feed(piece)
                except BacklogError as error:
                    raise AudioInputError(f"the model cannot keep up with the microphone: {error}") from None
                self.fed_s += len(piece) / rate

    def _may_go_on(self) -> bool:
        """Wait until the next piece is due and wanted. False where nothing more is to be fed."""
        if self.started_at is None:
            self.started_at = time.monotonic()
        if self._paced:
            due = self.started_at + self.fed_s
            while (left := due - time.monotonic()) > 0 and not self._stopping:
                with contextlib.suppress(queue.Empty):
                    self._wake.get(timeout=left)
        while self._can_wait and self.fed_s - self._heard_s >= _AHEAD_S and not self._stopping:
            self._wake.get()
        # A microphone has been stopped itself: what it heard before is fed.
        return not (self._can_wait and self._stopping)

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._thread.join()


class Interrupts:
    """Ctrl-C inside the block: the first one calls ``stop``, the next one is a KeyboardInterrupt.

    ``stopped``: whether there was a first one.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.stopped = False
        self._stop = stop

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        self._stop()
