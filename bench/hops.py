"""What messaging costs: a frame's way through actors that do nothing, one frame at a time, a few milliseconds apart."""

from __future__ import annotations

import time
from typing import Any

from vcpipe.bench import floor
from vcpipe.bench.null_stages import frame_bytes
from vcpipe.bench.report import Measured, summary
from vcpipe.bench.signals import noise_frames
from vcpipe.bench.timings import Recorder
from vcpipe.launch.library import EMBEDDED_CHECKPOINT
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.geometry import STAGES

#: Until every process sleeps again, as it does between the frames of a live session.
_PAUSE_S = 0.004


def measure(frames: int, warm: int) -> Measured:
    """``p95_ms`` and the like are of the sum of a frame's hops, the way into the first stage and out of the last among them.

    ``floor_p95_ms`` and the like are of as many hops of bare sockets, half of them taken before and half after.
    """
    bare = floor.measure(frame_bytes(), frames // 2, warm, _PAUSE_S)
    recorder = Recorder()
    modules = dict.fromkeys(STAGES, "vcpipe.bench.null_stages")
    with Pipeline(PipelineConfig(EMBEDDED_CHECKPOINT), listener=recorder, modules=modules) as pipeline:
        pcm = noise_frames(1, pipeline.geometry.frame_samples)[0]
        with pipeline.open_session() as session:
            for _ in range(warm + frames):
                session.push_audio(pcm)
                time.sleep(_PAUSE_S)
        ready = pipeline.ready["codec"]
    bare += floor.measure(frame_bytes(), frames - frames // 2, warm, _PAUSE_S)
    timings = recorder.take()[0][warm:]
    rows = [_hops(timing) for timing in timings]
    hops = {name: [row[name] for row in rows] for name in rows[0]}
    total = [sum(row.values()) for row in rows]
    whole = summary(total)
    result: dict[str, Any] = {
        "bench": "hops",
        "device": ready.device,
        "mlx": ready.mlx_version,
        "frames": frames,
        "min_ms": round(min(total), 3),
        **{f"{name}_ms": whole[name] for name in ("mean", "p50", "p95", "max")},
        **{f"floor_{name}_ms": summary(bare)[name] for name in ("p50", "p95")},
        "hop_ms": {name: summary(values) for name, values in hops.items()},
        "end_to_end_ms": summary([(t.released_ns - t.sent_ns) / 1e6 for t in timings]),
    }
    bars = {name: (result["hop_ms"][name]["p50"], result["hop_ms"][name]["p95"]) for name in hops}
    return Measured(result, bars, {"all hops": total, "bare sockets": bare})


def _hops(timing: FrameTiming) -> dict[str, float]:
    """Milliseconds into each stage, and from the last stage's report to the frame's release."""
    hops = {stage: (timing.stages[stage].started_ns - timing.stages[stage].sent_ns) / 1e6 for stage in STAGES}
    # Packing the PCM counts too: the coordinator stamps a frame before it packs it.
    hops[STAGES[0]] = (timing.stages[STAGES[0]].started_ns - timing.sent_ns) / 1e6
    hops["coordinator"] = (timing.released_ns - timing.stages[STAGES[-1]].finished_ns) / 1e6
    return hops
