"""A streaming session as its user holds it: push PCM of any size, get the events of the frames it completed.

Two ways to drive it, not to be mixed: :meth:`VoiceChatSession.push_audio` waits for the frames it completed;
:meth:`VoiceChatSession.feed` never waits, :meth:`VoiceChatSession.end` closes the input, and
:meth:`VoiceChatSession.events` yields what comes, so that the stages of consecutive frames overlap.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import numpy as np

from vcpipe.pipeline.clock import FrameClock, SteppedClock
from vcpipe.pipeline.profile import Profiler
from vcpipe.pipeline.tracks import Delivery, FrameTiming, FrameTrack
from vcpipe.schemas.config import SessionOptions
from vcpipe.schemas.errors import (
    BacklogError,
    ContextLimitError,
    SessionClosedError,
    StageTimeoutError,
    VcpipeError,
)
from vcpipe.schemas.events import TERMINAL_KINDS, Event
from vcpipe.schemas.geometry import MAX_BACKLOG_S, FrameGeometry

#: Most frames that push_audio keeps on their way; more would only wait.
_MAX_PUSH_FRAMES = 64
#: Frames on their way at which ``stream`` waits before it takes the next chunk.
_MAX_STREAM_FRAMES = 32


class VoiceChatSession:
    """One conversation. Made by ``Pipeline.open_session``; a context manager that cancels what was not flushed.

    For one thread, or one that feeds and one that reads events.
    """

    def __init__(
        self,
        session_id: str,
        options: SessionOptions,
        geometry: FrameGeometry,
        clock: FrameClock,
        track: FrameTrack,
        deliveries: queue.SimpleQueue[Delivery],
        commands: SessionCommands,
        step_timeout_s: float,
    ) -> None:
        self.id = session_id
        self.options = options
        self.geometry = geometry
        self.profiler = Profiler(geometry.frame_duration_s) if options.profile else None
        self._clock = clock
        self._track = track
        self._deliveries = deliveries
        self._commands = commands
        self._timeout_s = step_timeout_s
        self._max_frames = options.max_frames(geometry.frame_duration_s)
        self._max_backlog = int(MAX_BACKLOG_S / geometry.frame_duration_s)
        self._pending = np.zeros(0, np.float32)
        self._frames_fed = 0
        self._frames_read = 0
        self._closed = False
        self._said_last = False
        self._stages_freed = False
        self._error: VcpipeError | None = None

    # -- input

    @property
    def frames_fed(self) -> int:
        """Whole frames accepted so far."""
        return self._frames_fed

    @property
    def frames_done(self) -> int:
        """Frames whose events were read."""
        return self._frames_read

    @property
    def closed(self) -> bool:
        """True after flush, end, cancel or an error."""
        return self._closed

    def push_audio(self, samples: Any, sample_rate: int | None = None) -> list[Event]:
        """Take mono PCM of any length and return the events of every frame it completed, in order.

        ``samples``: float PCM in [-1, 1], (n,) or with a second axis of length 1; ``sample_rate``: None or the model's 16000.
        Raises SessionClosedError; ValueError for another rate, rank or non-finite samples (nothing is taken);
        ContextLimitError once ``max_streaming_seconds`` are full: the completed frame is lost, the events of earlier
        frames of the same push are in the error's ``events``.
        """
        frames, over_limit = self._cut(samples, sample_rate)
        events: list[Event] = []
        for frame in frames:
            self._send([frame])
            events += self._read_until(lambda: self._frames_fed - self._frames_read < _MAX_PUSH_FRAMES)
        events += self._read_until(lambda: self._frames_read == self._frames_fed)
        if over_limit:
            raise self._limit_error(events)
        return events

    def feed(self, samples: Any, sample_rate: int | None = None) -> None:
        """Queue mono PCM of any length without waiting; read the results from :meth:`events`.

        Errors as :meth:`push_audio`, and BacklogError when more than 30 s would wait: nothing of the chunk was taken.
        """
        pcm = self._checked(samples, sample_rate)
        completed = (len(self._pending) + len(pcm)) // self.geometry.frame_samples
        waiting = self._frames_fed - self._frames_read
        if waiting + completed > self._max_backlog:
            raise BacklogError(
                f"{waiting} frames wait and {completed} more were fed; at most {MAX_BACKLOG_S:.0f} s "
                f"({self._max_backlog} frames) may wait. Nothing of this chunk was taken"
            )
        frames, over_limit = self._cut(pcm, sample_rate)
        self._send(frames)
        if over_limit:
            raise self._limit_error([])

    def step(self, frames: int = 1) -> None:
        """Stepped clock only: let so many more frames leave."""
        if not isinstance(self._clock, SteppedClock):
            raise ValueError("step() needs a session with clock='stepped'")
        clock = self._clock
        self._commands.submit(lambda: clock.allow(frames))

    # -- ends

    def flush(self, pad_partial: bool = True) -> list[Event]:
        """Close the input and return all remaining events, ``done`` last; [] when already closed.

        ``pad_partial``: samples that do not fill a frame become one more frame, padded with zeros; else they are dropped.
        """
        if self._closed:
            return []
        if pad_partial and len(self._pending) and self._at_limit(self._frames_fed + 1):
            self._pending = self._pending[:0]
            raise self._limit_error([])
        self.end(pad_partial)
        return self._read_until(lambda: self._said_last)

    def end(self, pad_partial: bool = True) -> None:
        """Close the input without waiting; :meth:`events` ends with ``done``."""
        if self._closed:
            return
        if pad_partial and len(self._pending) and not self._at_limit(self._frames_fed + 1):
            padded = np.zeros(self.geometry.frame_samples, np.float32)
            padded[: len(self._pending)] = self._pending
            self._send([padded])
        self._pending = self._pending[:0]
        self._closed = True
        self._ask(lambda: self._commands.finish(self.id))

    def cancel(self) -> list[Event]:
        """Drop everything at once; returns the session's last event, ``cancelled``, or [] when it was said already."""
        if self._said_last:
            return []
        self.abort()
        return [event for event in self._read_until(lambda: self._said_last) if event.kind in TERMINAL_KINDS]

    def abort(self) -> None:
        """Cancel without waiting, from any thread: after what is on its way, :meth:`events` ends with ``cancelled``."""
        self._closed = True
        self._pending = self._pending[:0]
        self._ask(lambda: self._commands.cancel(self.id))

    def close(self) -> None:
        """Cancel unless it has ended; returns once every stage has freed the session (bounded).

        Where the pipeline is lost nothing is left to free; that is raised unless it was before.
        """
        known = self._error
        try:
            if not self._said_last:
                self.cancel()
            if not self._stages_freed:
                self._drain(lambda: self._stages_freed)
        except VcpipeError as error:
            if error is not known:
                raise

    def __enter__(self) -> VoiceChatSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except VcpipeError:
            if error is None:
                raise

    # -- output

    def events(self, timeout_s: float | None = None) -> Iterator[Event]:
        """Yield events as they come until ``done`` or ``cancelled``; raises the error that ended the session.

        ``timeout_s``: bound of the wait for the next event while frames are on their way (default: the step timeout).
        """
        while not self._said_last:
            event = self._next_event(timeout_s)
            if event is not None:
                yield event

    def stream(self, chunks: Iterable[Any], pad_partial: bool = True) -> Iterator[Event]:
        """Feed ``chunks`` (mono PCM of any size) and yield events as they come, ``done`` last.

        Chunks are taken no faster than they are worked on. With a limit on the session, ContextLimitError is raised after
        the events of all frames before it; flush or cancel then ends the session.
        """
        for chunk in chunks:
            yield from self._events_while_more_than(_MAX_STREAM_FRAMES)
            try:
                self.feed(chunk)
            except ContextLimitError:
                yield from self._events_while_more_than(0)
                raise
            yield from self.poll()
        self.end(pad_partial)
        yield from self.events()

    def _events_while_more_than(self, frames: int) -> Iterator[Event]:
        while self._frames_fed - self._frames_read > frames:
            if (event := self._next_event(None)) is not None:
                yield event

    def poll(self) -> list[Event]:
        """Events that are there now; never waits."""
        events = []
        while not self._deliveries.empty():
            if (event := self._take(self._deliveries.get())) is not None:
                events.append(event)
        return events

    def wait_opened(self, timeout_s: float) -> None:
        """Until every stage has the session (prompt included). For Pipeline.open_session."""
        deadline = time.monotonic() + timeout_s
        while (delivery := self._get(deadline - time.monotonic())) != "opened":
            self._take(delivery)

    def _read_until(self, reached: Callable[[], bool]) -> list[Event]:
        events = []
        while not reached():
            if (event := self._next_event(None)) is not None:
                events.append(event)
        return events

    def _drain(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._next_event(None)

    def _next_event(self, timeout_s: float | None) -> Event | None:
        return self._take(self._get(self._timeout_s if timeout_s is None else timeout_s))

    def _get(self, timeout_s: float) -> Delivery:
        if self._error is not None and self._stages_freed:
            raise self._error
        try:
            return self._deliveries.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            waits = self._track.describe_wait()
            raise StageTimeoutError(f"session {self.id}: no event within {timeout_s:g} s; {waits}") from None

    def _take(self, delivery: Delivery) -> Event | None:
        if isinstance(delivery, FrameTiming):
            # The last delivery of a frame: only now is the frame read.
            self._frames_read += 1
            self._track.frames_taken += 1
            if self.profiler is not None:
                self.profiler.add(delivery)
            return None
        if isinstance(delivery, VcpipeError):
            self._closed = self._said_last = True
            self._error = delivery
            raise delivery
        if delivery == "ended":
            self._stages_freed = self._said_last = True
            return None
        if not isinstance(delivery, Event):
            return None
        if delivery.kind in TERMINAL_KINDS:
            self._said_last = True
        return delivery

    # -- PCM to frames

    def _checked(self, samples: Any, sample_rate: int | None) -> np.ndarray:
        if self._closed:
            raise SessionClosedError(f"session {self.id} is closed; open another one") from self._error
        if sample_rate is not None and sample_rate != self.geometry.input_sample_rate:
            raise ValueError(
                f"sample_rate must be {self.geometry.input_sample_rate} Hz, not {sample_rate}; resample first"
            )
        pcm = np.asarray(samples, dtype=np.float32)
        if pcm.ndim == 2 and 1 in pcm.shape:
            pcm = pcm.reshape(-1)
        if pcm.ndim != 1:
            raise ValueError(f"samples must be mono, (n,) or (n, 1), not of shape {pcm.shape}")
        if not np.isfinite(pcm).all():
            raise ValueError(f"samples must be finite; sample {int(np.argmin(np.isfinite(pcm)))} is not")
        return pcm

    def _cut(self, samples: Any, sample_rate: int | None) -> tuple[list[np.ndarray], bool]:
        """Append to what is pending and cut whole frames; what is beyond the limit is lost (second value True)."""
        size = self.geometry.frame_samples
        pcm = np.concatenate([self._pending, self._checked(samples, sample_rate)])
        count = len(pcm) // size
        self._pending = pcm[count * size :].copy()
        frames = [pcm[i * size : (i + 1) * size] for i in range(count)]
        if self._max_frames is None or self._frames_fed + count <= self._max_frames:
            return frames, False
        self._pending = self._pending[:0]
        return frames[: max(self._max_frames - self._frames_fed, 0)], True

    def _send(self, frames: list[np.ndarray]) -> None:
        if frames:
            self._frames_fed += len(frames)
            self._ask(lambda: self._commands.feed(self.id, frames))

    def _ask(self, command: Callable[[], None]) -> None:
        """Keep the error of a pipeline that is lost, as one that was delivered."""
        try:
            command()
        except VcpipeError as error:
            self._error = error
            raise

    def _at_limit(self, frames: int) -> bool:
        return self._max_frames is not None and frames > self._max_frames

    def _limit_error(self, events: list[Event]) -> ContextLimitError:
        limit = self.options.max_streaming_seconds
        frames = self._max_frames
        text = f"the session is limited to {limit:g} s ({frames} frames); flush or cancel it and open another one"
        return ContextLimitError(text, events)


class SessionCommands:
    """What a session asks of the coordinator, whichever thread that runs on."""

    def __init__(self, submit: Callable[[Callable[[], None]], None], coordinator: Any) -> None:
        self.submit = submit
        self._coordinator = coordinator

    def feed(self, session: str, inputs: list[Any]) -> None:
        """Queue what the session's track takes: whole frames of PCM, text ids."""
        self.submit(lambda: self._coordinator.feed(session, inputs))

    def finish(self, session: str) -> None:
        """End of stream."""
        self.submit(lambda: self._coordinator.finish(session))

    def cancel(self, session: str) -> None:
        """Drop the session."""
        self.submit(lambda: self._coordinator.cancel(session))
