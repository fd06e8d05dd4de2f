"""Stage timings: compute, queue wait and end to end are three things."""

from __future__ import annotations

import numpy as np
import pytest

from vcpipe.pipeline.profile import Profiler, percentile, summarise
from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.schemas.reports import StageTiming

MS = 1_000_000
#: Compute and wait of each stage in ms, for frame 0; see _timing.
COMPUTE = {"perception": 3, "language": 10, "tts": 20, "codec": 5}
WAIT = {"perception": 1, "language": 2, "tts": 4, "codec": 8}


def test_profile_summary_percentiles() -> None:
    """Linear between neighbours at rank (n-1)*q, whatever the order of arrival."""
    values = [10.0, 40.0, 20.0, 30.0]
    summary = summarise(values)
    assert (summary.mean, summary.p50, summary.max) == (25.0, 25.0, 40.0)
    assert summary.p95 == pytest.approx(38.5)
    rng = np.random.default_rng(0)
    for size in (1, 2, 99, 100, 101):
        sample = rng.exponential(size=size)
        summary = summarise(list(sample))
        assert summary.p50 == pytest.approx(np.percentile(sample, 50))
        assert summary.p95 == pytest.approx(np.percentile(sample, 95))
    assert percentile([], 0.5) == 0.0
    assert summarise([]) == summarise([0.0])


def _timing(index: int, slower_ms: int = 0) -> FrameTiming:
    """A frame sent on its deadline, 80 ms after the one before; ``slower_ms`` more compute in every stage."""
    sent = at = index * 80 * MS
    timing = FrameTiming("s", index, due_ns=sent, sent_ns=sent)
    for stage in COMPUTE:
        started = at + WAIT[stage] * MS
        computed = started + (COMPUTE[stage] + slower_ms) * MS
        spans: list[list[str | int]] = [[stage, started, computed]]
        finished = computed + MS  # messaging is not compute
        if stage == "perception":
            spans.append(["rnnt", computed, computed + 2 * MS])
            finished += 2 * MS
        timing.stages[stage] = StageTiming(stage, at, started, finished, spans)
        at = computed
    timing.released_ns = at
    return timing


def _profile(timings: list[FrameTiming]) -> Profiler:
    profiler = Profiler(0.08)
    for timing in timings:
        profiler.add(timing)
    return profiler


def test_compute_wait_and_end_to_end_are_kept_apart() -> None:
    summary = _profile([_timing(index) for index in range(20)]).summary()
    assert {name: stage["mean"] for name, stage in summary["stages"].items()} == COMPUTE | {"rnnt": 2}
    assert {name: stage["mean"] for name, stage in summary["queue_wait"].items()} == WAIT
    assert summary["total"]["mean"] == 40
    assert summary["end_to_end"]["mean"] == 38 + 15
    assert summary["processing_frames_per_second"] == 25
    assert summary["realtime_factor"] == 0.5


def test_throughput_is_the_period_of_release_not_the_sum_of_the_stages() -> None:
    timings = [_timing(index) for index in range(20)]
    for index, timing in enumerate(timings):
        timing.released_ns = index * 20 * MS
    summary = _profile(timings).summary()
    assert summary["period_ms"] == 20
    assert summary["pipelined_realtime_factor"] == 0.25
    assert summary["realtime_factor"] == 0.5


def test_cold_frames_are_left_out_and_counted() -> None:
    timings = [_timing(index, slower_ms=500 if index < 5 else 0) for index in range(20)]
    summary = _profile(timings).summary(drop_first=5)
    assert (summary["frames"], summary["dropped_cold_frames"]) == (20, 5)
    assert summary["stages"]["tts"]["max"] == 20
    short = _profile(timings[:3]).summary(drop_first=5)
    assert (short["frames"], short["dropped_cold_frames"], short["total"]["mean"]) == (3, 3, 0.0)


def test_late_frames_are_those_that_came_out_after_the_next_was_due() -> None:
    timings = [_timing(index) for index in range(10)]
    timings[7].released_ns = timings[7].due_ns + 95 * MS
    summary = _profile(timings).summary(drop_first=0)
    assert summary["late_frames"] == 1
    assert summary["lateness"]["max"] == 15


def test_growth_shows_in_the_last_window() -> None:
    timings = [_timing(index, slower_ms=0 if index < 150 else 6) for index in range(300)]
    windows = _profile(timings).summary(drop_first=0)["windows"]
    assert windows["tts"] == {"first": 20, "last": 26}
    assert windows["total"] == {"first": 40, "last": 64}
