"""A long session: does the time per frame or the memory of an actor grow?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress

from vcpipe.bench.signals import noise_frames
from vcpipe.launch.library import start_pipeline
from vcpipe.pipeline.profile import summarise
from vcpipe.pipeline.tracks import Delivery, FrameTiming

#: Frames compared: early, after caches have reached their size, against the last ones.
_EARLY = slice(100, 300)
_LATE_FRAMES = 100
_MEMORY_FROM = 300
_SAMPLE_EVERY = 100


def measure(model: Path, frames: int) -> dict[str, Any]:
    """Run ``frames`` frames; per-frame period and each actor's resident memory, early against late.

    ``memory_slope_kb_per_frame``: least-squares slope of resident memory from frame 300 on.
    """
    released: list[int] = []

    def listen(session: str, delivery: Delivery) -> None:
        if isinstance(delivery, FrameTiming):
            released.append(delivery.released_ns)

    with start_pipeline(model, listener=listen) as pipeline:
        memory: dict[str, list[tuple[int, int]]] = {stage: [] for stage in pipeline.pids}
        processes = {stage: psutil.Process(pid) for stage, pid in pipeline.pids.items()}
        pcm = noise_frames(_SAMPLE_EVERY, pipeline.geometry.frame_samples)
        with pipeline.open_session(seed=0) as session, Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("frames", total=frames)
            while session.frames_done < frames:
                session.push_audio(np.ravel(pcm[: frames - session.frames_done]))
                for stage, process in processes.items():
                    memory[stage].append((session.frames_done, process.memory_info().rss))
                bar.update(task, completed=session.frames_done)
        device = pipeline.ready["tts"].device
    period_ms = np.diff(np.array(released)) / 1e6
    early, late = period_ms[_EARLY], period_ms[-_LATE_FRAMES:]
    return {
        "device": device,
        "frames": frames,
        "frames_per_s": round(1e3 / float(period_ms.mean()), 1),
        "early_period_ms": round(float(early.mean()), 3),
        "late_period_ms": round(float(late.mean()), 3),
        "late_over_early": round(float(late.mean() / early.mean()), 3),
        "early_p95_ms": round(summarise(early.tolist()).p95, 3),
        "late_p95_ms": round(summarise(late.tolist()).p95, 3),
        "memory_mb": {stage: _growth_mb(samples) for stage, samples in memory.items()},
        "memory_slope_kb_per_frame": {stage: _slope_kb(samples) for stage, samples in memory.items()},
    }


def _growth_mb(samples: list[tuple[int, int]]) -> list[float]:
    """Resident memory at frame 300 and at the end."""
    first = next(rss for frame, rss in samples if frame >= min(_MEMORY_FROM, samples[-1][0]))
    return [round(first / 1e6, 1), round(samples[-1][1] / 1e6, 1)]


def _slope_kb(samples: list[tuple[int, int]]) -> float:
    late = np.array([sample for sample in samples if sample[0] >= _MEMORY_FROM], dtype=np.float64)
    return round(float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) / 1e3, 3) if len(late) > 1 else 0.0


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print the result."""
    if as_json:
        print(json.dumps(result))
        return
    print(f"{result['frames']} frames at {result['frames_per_s']} frames/s on {result['device']}")
    print(
        f"period  early {result['early_period_ms']} ms, late {result['late_period_ms']} ms: x{result['late_over_early']}"
    )
    for stage, (first, last) in result["memory_mb"].items():
        slope = result["memory_slope_kb_per_frame"][stage]
        print(f"{stage:>10}  {first} MB at frame {_MEMORY_FROM}, {last} MB at the end, {slope} kB a frame")
