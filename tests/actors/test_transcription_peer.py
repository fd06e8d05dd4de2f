"""Live transcription beside the published session for live input, over the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import soundfile

from vcpipe.actors.perception.actor import PerceptionStage, load
from vcpipe.actors.stage import StageConfig
from vcpipe.schemas.streaming import StreamingSession

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peer_session = pytest.importorskip("mlx_audio.stt.models.nemotron_asr.session")
    peer_streaming = pytest.importorskip("mlx_audio.stt.streaming")
    peer_utils = pytest.importorskip("mlx_vlm.utils")

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # the peer's own
]

DATA = Path(__file__).parents[1] / "data"
FRAME = 1280


class Pair:
    """Both sides on one checkpoint. The peer's session asks a speech model for its parts: here those of a voice-chat model."""

    def __init__(self, checkpoint: Path) -> None:
        self.ours: PerceptionStage = load(StageConfig("perception", checkpoint), lambda step, fraction: None)
        model = peer_utils.load_model(checkpoint, lazy=False)
        network, config = model.stt_model, model.config
        audio = config.audio_config
        self._parts = SimpleNamespace(
            model_type="voice chat",
            default_language=None,
            _resolve_prompt_index=lambda language: 0,
            default_att_context_size=list(audio.encoder.att_context_size[0]),
            preprocessor_config=audio.preprocessor,
            encoder_config=audio.encoder,
            encoder=network.perception.encoder,
            apply_prompt=lambda encoded, language: encoded,
            decoder=network.rnnt_decoder,
            joint=network.rnnt_joint,
            blank_id=config.rnnt_blank_id,
            vocabulary=config.rnnt_vocabulary,
            max_symbols=audio.max_symbols,
        )

    def theirs(self) -> Any:
        return peer_session.NemotronStreamingSession(self._parts)


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


@pytest.fixture(scope="module", params=["bf16", "q4"])
def pair(request: pytest.FixtureRequest, on_cpu: None) -> Pair:
    return Pair(DATA / "tiny" / request.param)


@pytest.fixture(scope="module")
def waveform() -> np.ndarray:
    samples, _ = soundfile.read(DATA / "golden" / "input.wav", dtype="float32")
    return samples


def transcribe(session: StreamingSession, samples: np.ndarray, chunk: int, budget: int) -> list[str]:
    deltas: list[str] = []
    for start in range(0, samples.size, chunk):
        session.feed(samples[start : start + chunk])
        deltas += session.step(max_decode_tokens=budget)
    session.close()
    while not session.done:
        deltas += session.step(max_decode_tokens=budget)
    return deltas


@pytest.mark.parametrize(("frames", "chunk", "budget"), [(1, 700, 4), (7, 1280, 1), (13, 159, 8), (30, 8000, 4)])
def test_deltas_are_equal(pair: Pair, waveform: np.ndarray, frames: int, chunk: int, budget: int) -> None:
    """Whole frames: the peer encodes the two last frames of any other length at once, and the first of them sees the second."""
    clip = waveform[: frames * FRAME]
    theirs = transcribe(pair.theirs(), clip, chunk, budget)
    assert transcribe(pair.ours.create_streaming_session(), clip, chunk, budget) == theirs
    assert theirs


@pytest.mark.parametrize("samples", [5000, 8100, 20001])
def test_text_before_the_tail_is_equal(pair: Pair, waveform: np.ndarray, samples: int) -> None:
    session = pair.ours.create_streaming_session()
    session.feed(waveform[:samples])
    session.close()
    deltas = []
    while not session.done:
        deltas += session.advance(4)
    before = [delta.text for delta in deltas if delta.frame_index < session.frames - 2]
    theirs = transcribe(pair.theirs(), waveform[:samples], 1280, 4)
    assert theirs[: len(before)] == before != []


@pytest.mark.parametrize("samples", [0, 1, 100, 159])
def test_short_inputs_end_alike(pair: Pair, waveform: np.ndarray, samples: int) -> None:
    clip = waveform[9000 : 9000 + samples]
    assert transcribe(pair.ours.create_streaming_session(), clip, 100, 4) == transcribe(pair.theirs(), clip, 100, 4)


def test_each_side_meets_the_others_protocol(pair: Pair) -> None:
    assert isinstance(pair.theirs(), StreamingSession)
    assert isinstance(pair.ours.create_streaming_session(), peer_streaming.StreamingSession)
