"""One stage alone: time of its steps on real shapes, its memory; beside the peer's own timing of that stage if wanted."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from vcpipe.actors.checkpoint import geometry, read_config
from vcpipe.bench.report import Measured, ratio, summary, with_bar
from vcpipe.bench.target import Target
from vcpipe.bench.worker import Worker

#: What can be measured -> the stage that does it.
PARTS = {"perception": "perception", "rnnt": "perception", "language": "language", "tts": "tts", "codec": "codec"}

Reply = dict[str, Any]


def measure(part: str, target: Target, frames: int, warm: int, rounds: int, peer: bool) -> Measured:
    """``rounds`` blocks of ``frames`` steps after ``warm``, each in a session of its own; the peer's alternate with them."""
    frame_s = geometry(read_config(target.folder)).frame_duration_s
    with ExitStack() as stack:
        other = stack.enter_context(target.start_peer()) if peer else None
        worker = stack.enter_context(_start_stage(part, target))
        ours, theirs = [], []
        for _ in with_bar(range(rounds)):
            ours.append(_block(worker, warm, frames))
            if other is not None:
                theirs.append(_block(other, warm, frames, profile=True)["stage_ms"][part])
        memory = worker.ask("memory")
    rate = _rate([value for block in ours for value in block["frame_ms"]], frame_s)
    result = {
        "bench": part,
        **target.facts(),
        "device": worker.ready["device"],
        "mlx": worker.ready["mlx"],
        "frames": frames,
        "rounds": rounds,
        **rate,
        "step_ms": summary([value for block in ours for value in block["step_ms"]]),
        "load_s": round(worker.ready["load_s"], 3),
        "warm_up_s": round(worker.ready["warm_up_s"], 3),
        "memory": memory,
    }
    drawn = {part: ours[-1]["frame_ms"]}
    bars = {part: (rate["frame_ms"]["p50"], rate["frame_ms"]["p95"])}
    if other is not None:
        peer_rate = _rate([value for block in theirs for value in block], frame_s)
        result["peer"] = {"mlx_vlm": other.ready["mlx_vlm"], "device": other.ready["device"], **peer_rate}
        result["ratio_frames_per_s"] = ratio(rate["frames_per_s"], peer_rate["frames_per_s"])
        drawn["mlx-vlm"] = theirs[-1]
        bars["mlx-vlm"] = (peer_rate["frame_ms"]["p50"], peer_rate["frame_ms"]["p95"])
    return Measured(result, bars, drawn)


def _start_stage(part: str, target: Target) -> Worker:
    stage = PARTS[part]
    facts = {
        "stage": stage,
        "part": part,
        "module": target.module(stage),
        "checkpoint": str(target.folder),
        "device": target.device,
        "tts_history_frames": target.tts_history_frames,
    }
    return Worker("vcpipe.bench.stage_worker", facts)


def _block(worker: Worker, warm: int, frames: int, **options: Any) -> Reply:
    worker.ask("open", **options)
    worker.ask("push", frames=warm)
    return worker.ask("push", frames=frames)


def _rate(frame_ms: list[float], frame_s: float) -> dict[str, Any]:
    """Milliseconds of a frame -> how many fit into a second, by the median."""
    times = summary(frame_ms)
    return {
        "frame_ms": times,
        "frames_per_s": round(1e3 / times["p50"], 3),
        "realtime_factor": ratio(times["p50"], frame_s * 1e3),
    }
