"""Counters and histograms of a server, as Prometheus text."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from vcpipe.launch.server.protocol import Timings

#: Upper bounds of the histograms, in seconds; one of them is the length of a frame.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.16, 0.32, 0.64, 1.28, 2.56)

#: What a session is for.
Task = Literal["conversation", "transcription", "speech"]
#: Sessions that do not pass every stage, by the stages that they pass.
_TASKS: dict[frozenset[str], Task] = {
    frozenset({"perception"}): "transcription",
    frozenset({"tts", "codec"}): "speech",
}


class Histogram:
    """Counts by upper bound, and the sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BUCKETS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one value."""
        self._counts[bisect_left(_BUCKETS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> Iterable[str]:
        """The samples; ``labels`` without braces, or empty."""
        total = 0
        prefix = labels + "," if labels else ""
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{prefix}le="{bound}"}} {total}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braces} {self._sum:.9g}"
        yield f"{name}_count{braces} {total}"


class Metrics:
    """Everything since the server's start. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frames = 0
        self._late_frames = 0
        self._lateness = Histogram()
        self._end_to_end = Histogram()
        self._stages: dict[str, Histogram] = {}
        self._side_frames: Counter[str] = Counter()
        self._sessions: dict[Task, Counter[str]] = {"conversation": Counter()}
        self._errors: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._restarts = 0

    def frame(self, timings: Timings) -> None:
        """A frame came out. Only those of conversations have a time at which they are due."""
        task = _TASKS.get(frozenset(timings.stages), "conversation")
        with self._lock:
            if task == "conversation":
                self._frames += 1
                self._late_frames += timings.lateness_ms > 0
                self._lateness.add(timings.lateness_ms / 1e3)
                self._end_to_end.add(timings.end_to_end_ms / 1e3)
            else:
                self._side_frames[task] += 1
            for stage, ms in timings.stages.items():
                self._stages.setdefault(stage, Histogram()).add(ms / 1e3)

    def session_ended(self, end: str, task: Task = "conversation") -> None:
        """A connection that held a slot ended: done, cancelled, disconnected, limit, fault."""
        with self._lock:
            self._sessions.setdefault(task, Counter())[end] += 1

    def error(self, code: str) -> None:
        """An ``error`` went to a client."""
        with self._lock:
            self._errors[code] += 1

    def refused(self, why: str) -> None:
        """A connection was refused: key, origin, busy."""
        with self._lock:
            self._refused[why] += 1

    def restarted(self) -> None:
        """The stages are started anew after a failure."""
        with self._lock:
            self._restarts += 1

    def text(self, gauges: Mapping[str, float], stages_up: Mapping[str, bool]) -> str:
        """Prometheus text, version 0.0.4. ``gauges``: values of now by name, without the prefix ``vcpipe_``."""
        with self._lock:
            return "\n".join(self._lines(gauges, stages_up)) + "\n"

    def _lines(self, gauges: Mapping[str, float], stages_up: Mapping[str, bool]) -> Iterable[str]:
        for name, value in gauges.items():
            yield f"# TYPE vcpipe_{name} gauge"
            yield f"vcpipe_{name} {value:g}"
        yield from _labelled("stage_up", "gauge", "stage", {stage: int(up) for stage, up in stages_up.items()})
        for name, count in (
            ("frames_total", self._frames),
            ("late_frames_total", self._late_frames),
            ("pipeline_restarts_total", self._restarts),
        ):
            yield f"# TYPE vcpipe_{name} counter"
            yield f"vcpipe_{name} {count}"
        yield from _labelled("side_frames_total", "counter", "task", self._side_frames)
        for task, ends in self._sessions.items():
            prefix = "" if task == "conversation" else f"{task}_"
            yield from _labelled(f"{prefix}sessions_total", "counter", "end", ends)
        yield from _labelled("errors_total", "counter", "code", self._errors)
        yield from _labelled("connections_refused_total", "counter", "reason", self._refused)
        for name, histogram in (("frame_lateness_seconds", self._lateness), ("frame_seconds", self._end_to_end)):
            yield f"# TYPE vcpipe_{name} histogram"
            yield from histogram.lines(f"vcpipe_{name}", "")
        yield "# TYPE vcpipe_stage_seconds histogram"
        for stage, histogram in self._stages.items():
            yield from histogram.lines("vcpipe_stage_seconds", f'stage="{stage}"')


def _labelled(name: str, kind: str, label: str, values: Mapping[str, int]) -> Iterable[str]:
    yield f"# TYPE vcpipe_{name} {kind}"
    for key, value in sorted(values.items()):
        yield f'vcpipe_{name}{{{label}="{key}"}} {value}'
