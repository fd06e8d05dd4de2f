"""Chrome trace of a session (opens in Perfetto and chrome://tracing): one track a process, one slice a stage and frame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.geometry import STAGES

_COORDINATOR = "coordinator"


class TraceWriter:
    """Writes as frames come, so memory stays flat; the file is complete JSON after :meth:`close`."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the trace cannot be written to {path}: {error.strerror}") from None
        self._tracks = {name: number for number, name in enumerate((_COORDINATOR, *STAGES), 1)}
        self._origin_ns: int | None = None
        self._first = True
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for name, track in self._tracks.items():
            self._write({"ph": "M", "name": "process_name", "pid": track, "tid": 0, "args": {"name": name}})
            self._write(
                {"ph": "M", "name": "process_sort_index", "pid": track, "tid": 0, "args": {"sort_index": track}}
            )

    def add(self, timing: FrameTiming) -> None:
        """One frame: its way through the coordinator, and each stage's step with its parts inside."""
        if self._origin_ns is None:
            self._origin_ns = timing.sent_ns
        frame = timing.frame_index
        for phase, at_ns in (("b", timing.sent_ns), ("e", timing.released_ns)):
            event = {"ph": phase, "cat": "frame", "id": f"{timing.session}/{frame}", "name": f"frame {frame}"}
            self._write({**event, "pid": self._tracks[_COORDINATOR], "tid": 0, "ts": self._us(at_ns)})
        for stage, t in timing.stages.items():
            waited = {"frame_index": frame, "queue_wait_ms": round((t.started_ns - t.sent_ns) / 1e6, 3)}
            self._slice(stage, f"{stage} {frame}", t.started_ns, t.finished_ns, waited)
            for name, start_ns, end_ns in t.spans:
                if name != stage:
                    self._slice(stage, name, start_ns, end_ns, {"frame_index": frame})

    def close(self) -> None:
        """Finish the file."""
        self._file.write("\n]}\n")
        self._file.close()

    def _slice(self, stage: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        place = {"pid": self._tracks[stage], "tid": 0, "ts": self._us(start_ns)}
        self._write({"ph": "X", "name": name, **place, "dur": (end_ns - start_ns) / 1e3, "args": args})

    def _us(self, at_ns: int) -> float:
        return (at_ns - (self._origin_ns or 0)) / 1e3

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(("\n" if self._first else ",\n") + json.dumps(event))
        self._first = False
