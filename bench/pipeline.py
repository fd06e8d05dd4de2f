"""The whole pipeline: throughput at file speed, latency on the wall clock, session open; beside the peer if wanted.

A block opens a session with a long system prompt, steps some frames to get warm and then measures. Blocks of ours and of
the peer's alternate in one call, and either side is idle during the other's block. The same prompt, seed and noise go into
both, and the codes that come out are compared.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import psutil

from vcpipe.bench.report import Measured, ratio, summary, with_bar
from vcpipe.bench.signals import noise_frames
from vcpipe.bench.target import Target
from vcpipe.bench.timings import Recorder, latency_ms, period_ms, queue_wait_ms, stage_ms, step_ms, summaries
from vcpipe.bench.worker import Worker
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.tracks import FrameTiming

_SEED = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """``frames`` measured and ``warm`` before them in each of ``rounds`` blocks; ``prompt_tokens`` of the system prompt."""

    frames: int
    warm: int
    rounds: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Block:
    """One of our blocks: seconds for both opens and for the frames, their timings, checksums of all codes."""

    cold_s: float
    warm_s: float
    wall_s: float
    timings: list[FrameTiming]
    codes: list[int]


def measure(target: Target, plan: Plan, peer: bool) -> Measured:
    """Everything, as numbers."""
    recorder = Recorder()
    # A prompt of its own for every block: what was opened before may be reused.
    prompts = [target.prompt(plan.prompt_tokens, variant) for variant in range(plan.rounds)]
    ours, theirs = [], []
    with ExitStack() as stack:
        # The peer first: what cannot be imported should fail before anything else is loaded.
        worker = stack.enter_context(target.start_peer()) if peer else None
        pipeline = stack.enter_context(target.start(recorder))
        for prompt, _ in with_bar(prompts):
            ours.append(_file_block(pipeline, recorder, plan, prompt))
            if worker is not None:
                theirs.append(_peer_block(worker, plan, prompt))
        wall = _wall_block(pipeline, recorder, plan)
        ready = pipeline.ready["tts"]
        result: dict[str, Any] = {
            "bench": "pipeline",
            **target.facts(),
            "device": ready.device,
            "mlx": ready.mlx_version,
            "frames": plan.frames,
            "rounds": plan.rounds,
        }
        result |= _file_figures(ours, plan, pipeline.geometry.frame_duration_s)
        result["wall_clock"] = _wall_figures(wall, pipeline.geometry.frame_duration_s)
        result["session_open"] = {
            "prompt_tokens": prompts[0][1],
            "cold_ms": round(median(block.cold_s for block in ours) * 1e3, 3),
            "warm_ms": round(median(block.warm_s for block in ours) * 1e3, 3),
        }
        result["memory"] = _memory(pipeline)
        if worker is not None:
            result |= _peer_figures(worker, theirs, ours, plan, result)
    return Measured(result, *_drawn(ours, theirs, plan))


# ------------------------------------------------------------------------------------------------ blocks
def _file_block(pipeline: Pipeline, recorder: Recorder, plan: Plan, prompt: str) -> Block:
    pcm = noise_frames(plan.warm + plan.frames, pipeline.geometry.frame_samples)
    started = time.perf_counter()
    with pipeline.open_session(system_prompt=prompt, seed=_SEED):
        cold_s = time.perf_counter() - started
    started = time.perf_counter()
    with pipeline.open_session(system_prompt=prompt, seed=_SEED) as session:
        warm_s = time.perf_counter() - started
        session.push_audio(np.ravel(pcm[: plan.warm]))
        started = time.perf_counter()
        session.push_audio(np.ravel(pcm[plan.warm :]))
        wall_s = time.perf_counter() - started
    timings, codes = recorder.take()
    return Block(cold_s, warm_s, wall_s, timings[plan.warm :], codes)


def _wall_block(pipeline: Pipeline, recorder: Recorder, plan: Plan) -> list[FrameTiming]:
    pcm = noise_frames(plan.warm + plan.frames, pipeline.geometry.frame_samples)
    with pipeline.open_session(system_prompt="", seed=_SEED, clock="wall") as session:
        for _ in session.stream(pcm):
            pass
    return recorder.take()[0][plan.warm :]


def _peer_block(worker: Worker, plan: Plan, prompt: str) -> dict[str, Any]:
    opened = worker.ask("open", prompt=prompt, seed=_SEED)
    warm = worker.ask("push", frames=plan.warm)
    pushed = worker.ask("push", frames=plan.frames)
    return {**pushed, **opened, "codes": warm["codes"] + pushed["codes"]}


# ------------------------------------------------------------------------------------------------ figures
def _file_figures(blocks: list[Block], plan: Plan, frame_s: float) -> dict[str, Any]:
    """Throughput: the median block; per-stage numbers: the frames of all blocks."""
    timings = [timing for block in blocks for timing in block.timings]
    rates = [plan.frames / block.wall_s for block in blocks]
    return {
        "frames_per_s": round(median(rates), 3),
        "frames_per_s_blocks": [round(rate, 3) for rate in rates],
        "realtime_factor": ratio(1 / frame_s, median(rates)),
        "period_ms": summary([value for block in blocks for value in period_ms(block.timings)]),
        "stage_ms": summaries(stage_ms(timings)),
        "step_ms": summaries(step_ms(timings)),
        "queue_wait_ms": summaries(queue_wait_ms(timings)),
    }


def _wall_figures(timings: list[FrameTiming], frame_s: float) -> dict[str, Any]:
    latency = latency_ms(timings)
    late = [value - frame_s * 1e3 for value in latency if value > frame_s * 1e3]
    return {
        "latency_ms": summary(latency),
        "late_frames": len(late),
        "max_lateness_ms": round(max(late, default=0.0), 3),
        "stage_ms": summaries(stage_ms(timings)),
        "queue_wait_ms": summaries(queue_wait_ms(timings)),
    }


def _memory(pipeline: Pipeline) -> dict[str, dict[str, float]]:
    """Megabytes by actor; MLX's own from the last heartbeat."""
    found = {}
    for stage, pid in pipeline.pids.items():
        found[stage] = {"rss_mb": round(psutil.Process(pid).memory_info().rss / 1e6, 1)}
        if (beat := pipeline.beats.get(stage)) is not None:
            found[stage] |= {
                "mlx_mb": round(beat.mlx_bytes / 1e6, 1),
                "mlx_cache_mb": round(beat.mlx_cache_bytes / 1e6, 1),
            }
    return found


def _peer_figures(
    worker: Worker, theirs: list[dict[str, Any]], ours: list[Block], plan: Plan, result: dict[str, Any]
) -> dict[str, Any]:
    rates = [plan.frames / block["wall_s"] for block in theirs]
    frame_ms = summary([value for block in theirs for value in block["frame_ms"]])
    peer = {
        "mlx_vlm": worker.ready["mlx_vlm"],
        "mlx": worker.ready["mlx"],
        "device": worker.ready["device"],
        "frames_per_s": round(median(rates), 3),
        "frames_per_s_blocks": [round(rate, 3) for rate in rates],
        "frame_ms": frame_ms,
        "session_open_ms": round(median(block["open_ms"] for block in theirs), 3),
        "memory": worker.ask("memory"),
    }
    equal = [
        a == b
        for mine, other in zip(ours, theirs, strict=True)
        for a, b in zip(mine.codes, other["codes"], strict=True)
    ]
    return {
        "peer": peer,
        "frames_with_the_peers_codes": round(sum(equal) / len(equal), 4),
        "ratio_frames_per_s": ratio(result["frames_per_s"], peer["frames_per_s"]),
        "ratio_p95_latency": ratio(result["wall_clock"]["latency_ms"]["p95"], frame_ms["p95"]),
        "ratio_session_open": ratio(result["session_open"]["warm_ms"], peer["session_open_ms"]),
        "ratio_session_open_cold": ratio(result["session_open"]["cold_ms"], peer["session_open_ms"]),
    }


def _drawn(
    ours: list[Block], theirs: list[dict[str, Any]], plan: Plan
) -> tuple[dict[str, tuple[float, float]], dict[str, list[float]]]:
    """Bars of the stages, and time per frame over the last block."""
    stages = summaries(stage_ms([timing for block in ours for timing in block.timings]))
    frame_ms = {"vcpipe, period": period_ms(ours[-1].timings)}
    if theirs:
        frame_ms["mlx-vlm"] = theirs[-1]["frame_ms"]
    return {name: (values["p50"], values["p95"]) for name, values in stages.items()}, frame_ms
