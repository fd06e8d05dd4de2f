"""The Chrome trace of a session: one track a process, one slice a stage and frame."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FAKES

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.trace import TraceWriter
from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.geometry import STAGES
from vcpipe.schemas.reports import StageTiming

MS = 1_000_000


def read(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def test_one_track_a_process_and_one_slice_a_stage_and_frame(pipeline: Pipeline, shared: Any, tmp_path: Path) -> None:
    with pipeline.open_session() as session:
        session.push_audio(np.zeros(12 * 1280))
        session.flush()
    writer = TraceWriter(tmp_path / "trace.json")
    for delivery in shared.heard_of(session.id):
        if isinstance(delivery, FrameTiming):
            writer.add(delivery)
    writer.close()
    events = read(tmp_path / "trace.json")

    tracks = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(tracks) == ["coordinator", *STAGES]
    assert len(set(tracks.values())) == 5
    slices = [(event["pid"], event["name"]) for event in events if event["ph"] == "X"]
    assert Counter(slices) == {(tracks[stage], f"{stage} {frame}"): 1 for stage in STAGES for frame in range(12)}
    frames = Counter((event["ph"], event["id"]) for event in events if event["ph"] in "be")
    assert frames == {(ph, f"{session.id}/{frame}"): 1 for ph in "be" for frame in range(12)}
    for stage in STAGES:
        steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == tracks[stage]]
        assert all(end <= start for (_, end), (start, _) in zip(steps, steps[1:], strict=False))


def test_times_are_microseconds_from_the_first_frame_and_parts_lie_inside_their_step(tmp_path: Path) -> None:
    timing = FrameTiming("s", 0, due_ns=10**15, sent_ns=10**15, released_ns=10**15 + 9 * MS)
    start = 10**15 + 2 * MS
    spans: list[list[str | int]] = [["perception", start, start + MS], ["rnnt", start + MS, start + 3 * MS]]
    timing.stages["perception"] = StageTiming("perception", 10**15, start, start + 4 * MS, spans)
    writer = TraceWriter(tmp_path / "trace.json")
    writer.add(timing)
    writer.close()
    step, part = [event for event in read(tmp_path / "trace.json") if event["ph"] == "X"]
    assert (step["name"], step["ts"], step["dur"]) == ("perception 0", 2000, 4000)
    assert step["args"] == {"frame_index": 0, "queue_wait_ms": 2}
    assert (part["name"], part["ts"], part["dur"], part["pid"]) == ("rnnt", 3000, 2000, step["pid"])


def test_a_trace_without_frames_is_still_json(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "trace.json").close()
    assert {event["ph"] for event in read(tmp_path / "trace.json")} == {"M"}


def test_a_trace_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the trace cannot be written to .*nowhere.*: No such file or directory"):
        TraceWriter(tmp_path / "nowhere" / "trace.json")


def test_a_listener_that_fails_is_dropped_and_the_session_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def full_disk(session: str, delivery: object) -> None:
        calls.append(delivery)
        raise OSError("No space left on device")

    config = PipelineConfig(Path(__file__).parents[1] / "data" / "tiny" / "bf16")
    with Pipeline(config, listener=full_disk, modules=FAKES) as pipeline, pipeline.open_session() as session:
        events = session.push_audio(np.zeros(2560))
    assert [event.frame_index for event in events if event.kind == "audio"] == [0, 1]
    assert len(calls) == 1
    assert "No space left on device" in caplog.text
