"""The three clocks, with a time that is moved by hand."""

from __future__ import annotations

import pytest

from vcpipe.pipeline.clock import FileClock, SteppedClock, WallClock, make_clock

FRAME_NS = 80_000_000


def test_file_clock_lets_everything_go() -> None:
    clock = FileClock()
    assert [clock.due_ns(index, 17) for index in (0, 1, 10_000)] == [17, 17, 17]


def test_wall_clock_deadlines_are_absolute() -> None:
    """Whatever the delays are, frame n is due n frames after the first: they never add up."""
    clock = WallClock(FRAME_NS)
    assert clock.due_ns(0, 1_000) == 1_000
    late = 1_000
    for index in range(1, 10_000):
        late += FRAME_NS + 3_000_000
        assert clock.due_ns(index, late) == 1_000 + index * FRAME_NS


def test_stepped_clock_counts_what_was_allowed() -> None:
    clock = SteppedClock()
    assert clock.due_ns(0, 5) is None
    clock.allow(2)
    assert [clock.due_ns(index, 5) for index in (0, 1, 2)] == [5, 5, None]
    clock.allow(1)
    assert clock.due_ns(2, 9) == 9


@pytest.mark.parametrize(("kind", "expected"), [("file", FileClock), ("wall", WallClock), ("stepped", SteppedClock)])
def test_clocks_by_name(kind: str, expected: type) -> None:
    assert type(make_clock(kind, FRAME_NS)) is expected  # type: ignore[arg-type]
