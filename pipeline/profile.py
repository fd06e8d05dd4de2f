"""Stage timings of a session: compute apart from queue wait and from end-to-end, first window against last."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vcpipe.pipeline.tracks import FrameTiming

#: Columns of compute time; ``rnnt`` runs inside perception after its frame has left, off the critical path.
COMPUTE = ("perception", "rnnt", "language", "tts", "codec")
#: Frames compared at either end of a session.
WINDOW_FRAMES = 100


@dataclass(frozen=True, slots=True)
class Summary:
    """Milliseconds over the frames of a session. ``p50`` and ``p95`` interpolate linearly at (n-1)*q."""

    mean: float
    p50: float
    p95: float
    max: float


class Profiler:
    """Collects one row of floats a frame (about 100 bytes), the only thing that grows, and only when asked for."""

    def __init__(self, frame_duration_s: float) -> None:
        self._frame_ms = frame_duration_s * 1e3
        self._columns: dict[str, array[float]] = {}
        self._released: array[int] = array("q")

    def add(self, timing: FrameTiming) -> None:
        """Take one frame's timings."""
        row: dict[str, float] = {}
        for stage, t in timing.stages.items():
            row[f"wait_{stage}"] = (t.started_ns - t.sent_ns) / 1e6
            spans = {name: (end - start) / 1e6 for name, start, end in t.spans}
            row |= {f"{name}": value for name, value in spans.items() if name in COMPUTE}
        row["total"] = sum(row[name] for name in COMPUTE if name in row)
        row["end_to_end"] = (timing.released_ns - timing.sent_ns) / 1e6
        row["lateness"] = max(0.0, (timing.released_ns - timing.due_ns) / 1e6 - self._frame_ms)
        for name, value in row.items():
            self._columns.setdefault(name, array("d")).append(value)
        self._released.append(timing.released_ns)

    @property
    def frames(self) -> int:
        """Frames collected."""
        return len(self._released)

    def summary(self, drop_first: int = 5) -> dict[str, Any]:
        """Everything as plain numbers, the first ``drop_first`` frames (cold) left out and counted.

        ``stages``: compute per stage; ``queue_wait``: time a stage's input waited; ``total``: sum of the compute;
        ``period_ms``: mean time between frames as they came out; ``windows``: mean of the first and the last frames.
        """
        dropped = min(drop_first, self.frames)
        columns = {name: list(values)[dropped:] for name, values in self._columns.items()}
        total = summarise(columns.get("total", ()))
        released = self._released[dropped:]
        period = (released[-1] - released[0]) / 1e6 / (len(released) - 1) if len(released) > 1 else 0.0
        return {
            "frames": self.frames,
            "dropped_cold_frames": dropped,
            "frame_duration_ms": self._frame_ms,
            "stages": {name: asdict(summarise(columns[name])) for name in COMPUTE if name in columns},
            "queue_wait": {
                name.removeprefix("wait_"): asdict(summarise(values))
                for name, values in columns.items()
                if name.startswith("wait_")
            },
            "total": asdict(total),
            "end_to_end": asdict(summarise(columns.get("end_to_end", ()))),
            "lateness": asdict(summarise(columns.get("lateness", ()))),
            "late_frames": sum(value > 0 for value in columns.get("lateness", ())),
            "processing_frames_per_second": 1e3 / total.mean if total.mean else 0.0,
            "realtime_factor": total.mean / self._frame_ms,
            "period_ms": period,
            "pipelined_frames_per_second": 1e3 / period if period else 0.0,
            "pipelined_realtime_factor": period / self._frame_ms,
            "windows": {
                name: {
                    "first": summarise(columns[name][:WINDOW_FRAMES]).mean,
                    "last": summarise(columns[name][-WINDOW_FRAMES:]).mean,
                }
                for name in (*COMPUTE, "total")
                if name in columns
            },
        }


def summarise(values: Sequence[float]) -> Summary:
    """Mean, percentiles and maximum; zeros for no values."""
    if not values:
        return Summary(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    return Summary(sum(ordered) / len(ordered), percentile(ordered, 0.5), percentile(ordered, 0.95), ordered[-1])


def percentile(ordered: Sequence[float], q: float) -> float:
    """Value at rank (n-1)*q of an ascending sequence, linear between neighbours; 0 for an empty one."""
    if not ordered:
        return 0.0
    rank = (len(ordered) - 1) * q
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
