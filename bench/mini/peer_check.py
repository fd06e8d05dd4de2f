"""Whether a checkpoint gives the same in vcpipe and in mlx-vlm: ids, texts and codes of a short session.

The parent runs vcpipe's pipeline; ``python -m vcpipe.bench.mini.peer_check FACTS`` is the child that runs mlx-vlm, with the
environment of an actor, so that both have the same BLAS.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vcpipe.actors.checkpoint import geometry, load_tokenizer, read_config
from vcpipe.bench.signals import noise_frames
from vcpipe.bench.worker import Handler, Reply, Worker, serve
from vcpipe.launch.audio_io import AudioReader
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.errors import ConfigError, FrameContractError

_SEED = 5


def compare(folder: Path, frames: int = 50, recording: Path | None = None) -> str:
    """One session each over the beginning of ``recording``, or noise; says what was equal.

    FrameContractError naming the first event that is not equal; ConfigError where mlx-vlm is not installed.
    """
    facts = {"checkpoint": str(folder), "frames": frames, "recording": None if recording is None else str(recording)}
    with Worker("vcpipe.bench.mini.peer_check", facts) as peer:
        theirs = peer.ask("run")["rows"]
    with (
        Pipeline(PipelineConfig(folder, device="cpu")) as pipeline,
        pipeline.open_session(system_prompt="", seed=_SEED) as session,
    ):
        ours = _rows(session.stream([_samples(facts)]))
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            raise FrameContractError(f"not what mlx-vlm gives, from frame {mine[1]} on: {mine} here, {other} there")
    if len(ours) != len(theirs):
        raise FrameContractError(f"{len(ours)} events here, {len(theirs)} of mlx-vlm")
    texts = sum(row[0] == "assistant_text_delta" for row in ours)
    return f"equal to mlx-vlm: ids and codes of {frames} frames, {texts} of them with text"


def _samples(facts: dict[str, Any]) -> np.ndarray:
    """(n,) float32 at 16 kHz: silence follows a recording that is too short."""
    frames, size = facts["frames"], geometry(read_config(Path(facts["checkpoint"]))).frame_samples
    if facts["recording"] is None:
        return np.ravel(noise_frames(frames, size))
    with AudioReader(facts["recording"]) as reader:
        sound = np.concatenate([*reader.chunks(), np.zeros(frames * size, np.float32)])
    return sound[: frames * size]


def _rows(events: Iterable[Any]) -> list[list[Any]]:
    """Everything of the events but their samples; the fields have the same names on both sides."""
    return [
        [
            event.kind,
            event.frame_index,
            event.token_id,
            event.text,
            None if event.audio_codes is None else np.array(event.audio_codes).tolist(),
        ]
        for event in events
    ]


def _start(facts: dict[str, Any]) -> tuple[Reply, dict[str, Handler]]:
    import mlx.core as mx

    from vcpipe.bench.peer_worker import BareTokenizer

    mx.set_default_device(mx.cpu)
    folder = Path(facts["checkpoint"])
    try:
        model = importlib.import_module("mlx_vlm.utils").load_model(folder, lazy=False)
    except ImportError as error:
        raise ConfigError(f"the comparison needs mlx-vlm, which cannot be imported here ({error})") from None
    maker = model.create_session(BareTokenizer(load_tokenizer(folder)))

    def run() -> Reply:
        session = maker.create_streaming_session(system_prompt="", seed=_SEED)
        return {"rows": _rows([*session.push_audio(_samples(facts)), *session.flush()])}

    return {}, {"run": run}


if __name__ == "__main__":
    serve(_start)
