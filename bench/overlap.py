"""What overlapping the stages gives: frames per second at file speed against one frame at a time, same actors, same call."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from vcpipe.bench.signals import noise_frames
from vcpipe.launch.library import start_pipeline
from vcpipe.pipeline.pipeline import Pipeline

_WARM_FRAMES = 20


def measure(model: Path, frames: int, rounds: int) -> dict[str, Any]:
    """Alternating blocks of both kinds on one pipeline; frames per second of each block and the ratio of the medians."""
    with start_pipeline(model) as pipeline:
        blocks: dict[str, list[float]] = {"one_at_a_time": [], "overlapped": []}
        for _ in track(range(rounds), "blocks", console=Console(stderr=True), transient=True):
            blocks["one_at_a_time"].append(_frames_per_second(pipeline, frames, overlapped=False))
            blocks["overlapped"].append(_frames_per_second(pipeline, frames, overlapped=True))
        ready = pipeline.ready["tts"]
    single, overlapped = median(blocks["one_at_a_time"]), median(blocks["overlapped"])
    return {
        "device": ready.device,
        "mlx": ready.mlx_version,
        "frames": frames,
        "rounds": rounds,
        "frames_per_second": blocks,
        "one_at_a_time_frames_per_s": round(single, 1),
        "overlapped_frames_per_s": round(overlapped, 1),
        "ratio_frames_per_s": round(overlapped / single, 3),
    }


def _frames_per_second(pipeline: Pipeline, frames: int, overlapped: bool) -> float:
    pcm = noise_frames(_WARM_FRAMES + frames, pipeline.geometry.frame_samples)
    with pipeline.open_session(seed=0) as session:
        for frame in pcm[:_WARM_FRAMES]:
            session.push_audio(frame)
        started = time.perf_counter()
        if overlapped:
            session.push_audio(np.ravel(pcm[_WARM_FRAMES:]))
        else:
            for frame in pcm[_WARM_FRAMES:]:
                session.push_audio(frame)
        return frames / (time.perf_counter() - started)


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print the result."""
    if as_json:
        print(json.dumps(result))
        return
    print(f"one frame at a time  {result['one_at_a_time_frames_per_s']:8.1f} frames/s")
    print(f"frames overlapping   {result['overlapped_frames_per_s']:8.1f} frames/s")
    print(f"ratio                {result['ratio_frames_per_s']:8.3f}   ({result['device']}, mlx {result['mlx']})")
