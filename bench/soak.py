"""A long session: does the time per frame or the memory of an actor grow?"""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
from rich.progress import Progress

from vcpipe.bench.report import Measured, ratio, summary
from vcpipe.bench.signals import noise_frames
from vcpipe.bench.target import Target
from vcpipe.bench.timings import Recorder, period_ms, stage_ms, step_ms
from vcpipe.launch.console import stderr
from vcpipe.pipeline.profile import summarise

#: Frames compared: early, after caches have reached their size, against the last ones.
_EARLY = slice(100, 300)
_LATE = slice(-200, None)
_MEMORY_FROM = 300
_SAMPLE_EVERY = 100

Memory = list[tuple[int, int]]  # (frames done, bytes)


def measure(target: Target, frames: int) -> Measured:
    """Run ``frames`` frames at file speed: time of the last 200 against frames 100 to 300, memory from frame 300 on.

    ``frame_ms`` is a frame's compute, all stages summed: how frames bunch at the end of the pipeline does not blur it.
    ``p95_ratio`` compares its 95th percentiles; ``memory_slope_kb_per_frame`` is a least-squares slope of resident memory.
    ``mlx_mb`` is what MLX holds in arrays, as of the last heartbeat: weights and caches.
    """
    recorder = Recorder()
    with target.start(recorder) as pipeline:
        processes = {stage: psutil.Process(pid) for stage, pid in pipeline.pids.items()}
        memory: dict[str, Memory] = {stage: [] for stage in processes}
        mlx: dict[str, Memory] = {stage: [] for stage in processes}
        pcm = noise_frames(_SAMPLE_EVERY, pipeline.geometry.frame_samples)
        with (
            pipeline.open_session(seed=0) as session,
            Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar,
        ):
            task = bar.add_task("frames", total=frames)
            while session.frames_done < frames:
                session.push_audio(np.ravel(pcm[: frames - session.frames_done]))
                for stage, process in processes.items():
                    memory[stage].append((session.frames_done, process.memory_info().rss))
                for stage, beat in pipeline.beats.items():
                    mlx[stage].append((session.frames_done, beat.mlx_bytes))
                bar.update(task, completed=session.frames_done)
        ready = pipeline.ready["tts"]
    timings, _ = recorder.take()
    steps = step_ms(timings)
    total = [sum(values) for values in zip(*steps.values(), strict=True)]
    result: dict[str, Any] = {
        "bench": "soak",
        **target.facts(),
        "device": ready.device,
        "mlx": ready.mlx_version,
        "frames": frames,
        "frames_per_s": round(1e3 / float(np.mean(period_ms(timings))), 1),
        **_growth("frame", total),
        "stages": {stage: _growth("step", values) for stage, values in steps.items()},
        "memory_mb": {stage: _ends_mb(samples) for stage, samples in memory.items()},
        "memory_slope_kb_per_frame": {stage: _slope_kb(samples) for stage, samples in memory.items()},
        "mlx_mb": {stage: _ends_mb(samples) for stage, samples in mlx.items() if samples},
    }
    bars = {name: summary(values) for name, values in stage_ms(timings).items()}
    return Measured(result, {name: (bar["p50"], bar["p95"]) for name, bar in bars.items()}, {"all stages": total})


def _growth(what: str, values: list[float]) -> dict[str, float]:
    early, late = summarise(values[_EARLY]), summarise(values[_LATE])
    return {
        f"{what}_p50_early_ms": round(early.p50, 3),
        f"{what}_p50_late_ms": round(late.p50, 3),
        f"{what}_p95_early_ms": round(early.p95, 3),
        f"{what}_p95_late_ms": round(late.p95, 3),
        "p50_ratio": ratio(late.p50, early.p50),
        "p95_ratio": ratio(late.p95, early.p95),
    }


def _ends_mb(samples: Memory) -> list[float]:
    """Memory at frame 300 and at the end."""
    first = next(rss for frame, rss in samples if frame >= min(_MEMORY_FROM, samples[-1][0]))
    return [round(first / 1e6, 1), round(samples[-1][1] / 1e6, 1)]


def _slope_kb(samples: Memory) -> float:
    late = np.array([sample for sample in samples if sample[0] >= _MEMORY_FROM], dtype=np.float64)
    return round(float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) / 1e3, 3) if len(late) > 1 else 0.0
