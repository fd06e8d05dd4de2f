"""What overlapping the stages gives: frames per second at file speed against one frame at a time, same actors, same call."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from vcpipe.bench.report import Measured, ratio, with_bar
from vcpipe.bench.signals import noise_frames
from vcpipe.bench.target import Target
from vcpipe.pipeline.pipeline import Pipeline

_WARM_FRAMES = 20


def measure(target: Target, frames: int, rounds: int) -> Measured:
    """Alternating blocks of both kinds on one pipeline; frames per second of each block and the ratio of the medians."""
    with target.start() as pipeline:
        rates: dict[str, list[float]] = {"one_at_a_time": [], "overlapped": []}
        for _ in with_bar(range(rounds)):
            rates["one_at_a_time"].append(_frames_per_second(pipeline, frames, overlapped=False))
            rates["overlapped"].append(_frames_per_second(pipeline, frames, overlapped=True))
        ready = pipeline.ready["tts"]
    single, overlapped = (round(median(values), 1) for values in rates.values())
    return Measured(
        {
            "bench": "overlap",
            **target.facts(),
            "device": ready.device,
            "mlx": ready.mlx_version,
            "frames": frames,
            "rounds": rounds,
            "frames_per_s_blocks": {name: [round(rate, 1) for rate in values] for name, values in rates.items()},
            "one_at_a_time_frames_per_s": single,
            "overlapped_frames_per_s": overlapped,
            "ratio_frames_per_s": ratio(overlapped, single),
        }
    )


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
