"""Frame timings of a pipeline's sessions, as they are delivered, and what they say."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from vcpipe.bench.report import summary
from vcpipe.pipeline.profile import COMPUTE
from vcpipe.pipeline.tracks import Delivery, FrameTiming
from vcpipe.schemas.events import Event


class Recorder:
    """A listener that keeps the timings of all frames and checksums of their codes; :meth:`take` empties it."""

    def __init__(self) -> None:
        self._timings: list[FrameTiming] = []
        self._codes: list[int] = []

    def __call__(self, session: str, delivery: Delivery) -> None:
        if isinstance(delivery, FrameTiming):
            self._timings.append(delivery)
        elif isinstance(delivery, Event) and delivery.audio_codes is not None:
            self._codes.append(zlib.crc32(delivery.audio_codes.tobytes()))

    def take(self) -> tuple[list[FrameTiming], list[int]]:
        """Everything since the last call."""
        taken = self._timings, self._codes
        self._timings, self._codes = [], []
        return taken


def stage_ms(timings: Sequence[FrameTiming]) -> dict[str, list[float]]:
    """Compute time of every frame by stage, RNN-T apart from perception."""
    found: dict[str, list[float]] = {name: [] for name in COMPUTE}
    for timing in timings:
        for report in timing.stages.values():
            for name, start, end in report.spans:
                if name in found:
                    found[name].append((end - start) / 1e6)
    return {name: values for name, values in found.items() if values}


def step_ms(timings: Sequence[FrameTiming]) -> dict[str, list[float]]:
    """A stage's whole step by stage: the least period the stage allows."""
    return {
        stage: [(t.stages[stage].finished_ns - t.stages[stage].started_ns) / 1e6 for t in timings]
        for stage in timings[0].stages
    }


def queue_wait_ms(timings: Sequence[FrameTiming]) -> dict[str, list[float]]:
    """How long a stage's input waited, the way there included."""
    return {
        stage: [(t.stages[stage].started_ns - t.stages[stage].sent_ns) / 1e6 for t in timings]
        for stage in timings[0].stages
    }


def latency_ms(timings: Sequence[FrameTiming]) -> list[float]:
    """From when a frame's PCM was due to its release: PCM in, samples out."""
    return [(t.released_ns - t.due_ns) / 1e6 for t in timings]


def period_ms(timings: Sequence[FrameTiming]) -> list[float]:
    """Between releases of consecutive frames."""
    return [(b.released_ns - a.released_ns) / 1e6 for a, b in zip(timings, timings[1:], strict=False)]


def summaries(columns: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Each column summarised."""
    return {name: summary(values) for name, values in columns.items()}
