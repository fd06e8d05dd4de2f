"""Three clocks that say when a frame may leave: file speed, wall time, stepped by hand."""

from __future__ import annotations

from typing import Protocol

from vcpipe.schemas.config import ClockKind


class FrameClock(Protocol):
    """When frame ``frame_index`` of a session may be sent. Times are monotonic nanoseconds."""

    def due_ns(self, frame_index: int, now_ns: int) -> int | None:
        """Earliest time at which the frame may leave; None: not until something else happens."""


class FileClock:
    """As fast as credit allows."""

    def due_ns(self, frame_index: int, now_ns: int) -> int:
        return now_ns


class WallClock:
    """One frame every ``frame_ns``, at absolute deadlines counted from the first frame, so that delays never add up."""

    def __init__(self, frame_ns: int) -> None:
        self._frame_ns = frame_ns
        self._start_ns: int | None = None

    def due_ns(self, frame_index: int, now_ns: int) -> int:
        if self._start_ns is None:
            self._start_ns = now_ns - frame_index * self._frame_ns
        return self._start_ns + frame_index * self._frame_ns


class SteppedClock:
    """Frames leave only after :meth:`allow`: for tests and for stepping through a session."""

    def __init__(self) -> None:
        self._allowed = 0

    def allow(self, frames: int) -> None:
        """Let ``frames`` more frames go."""
        self._allowed += frames

    def due_ns(self, frame_index: int, now_ns: int) -> int | None:
        return now_ns if frame_index < self._allowed else None


def make_clock(kind: ClockKind, frame_ns: int) -> FrameClock:
    """The clock of a session by its name."""
    if kind == "wall":
        return WallClock(frame_ns)
    return SteppedClock() if kind == "stepped" else FileClock()
