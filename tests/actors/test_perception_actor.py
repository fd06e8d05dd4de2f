"""The perception stage on the tiny checkpoints, against the recorded outputs of the published model's code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import soundfile
from collector import Collector

from vcpipe.actors.perception.actor import PerceptionStage, load
from vcpipe.actors.perception.cache import EncoderStream, Positions
from vcpipe.actors.perception.fastconformer import FastConformer
from vcpipe.actors.perception.mel import MelStream
from vcpipe.actors.perception.rnnt import GreedyDecoder, PredictionNetwork, Recogniser
from vcpipe.actors.stage import StageConfig
from vcpipe.schemas.errors import AudioInputError, ConfigError, FrameContractError
from vcpipe.schemas.messages import OpenSession, PcmFrame, Projected
from vcpipe.schemas.reports import Transcript

DATA = Path(__file__).parents[1] / "data"
FRAME = 1280
TOLERANCE = 1e-4

STREAMS = [
    "stream_bf16_seed0_prompt",
    "stream_bf16_seed7_noprompt",
    "stream_bf16_seed3_nocache",
    "stream_q4_seed0_prompt",
]
OFFLINE = ["offline_bf16_seed0_prompt", "offline_bf16_seed7_cached_extra", "offline_q4_seed1_maxframes"]


@pytest.fixture(scope="module")
def stages() -> dict[str, PerceptionStage]:
    found = {}
    for name in ("bf16", "q4"):
        found[name] = load(StageConfig("perception", DATA / "tiny" / name), lambda step, fraction: None)
        found[name].warm_up()
    return found


@pytest.fixture(scope="module")
def waveform() -> np.ndarray:
    samples, rate = soundfile.read(DATA / "golden" / "input.wav", dtype="float32")
    assert rate == 16000
    return samples


def golden(run: str) -> tuple[dict[str, Any], Any]:
    info = json.loads((DATA / "golden" / f"{run}.json").read_text())
    return info, np.load(DATA / "golden" / f"{run}.npz")


def frames_of(waveform: np.ndarray, count: int) -> np.ndarray:
    """(count, 1280), the last one padded with zeros."""
    return np.resize(np.pad(waveform, (0, FRAME)), count * FRAME).reshape(count, FRAME)


def stream(stage: PerceptionStage, frames: np.ndarray, **options: Any) -> Collector:
    request = OpenSession(**options)
    session, passed_on = stage.open(request)
    assert passed_on == request
    collector = Collector()
    for index, samples in enumerate(frames):
        collector.frame_index = index
        session.step(PcmFrame(samples), collector)
    session.end(collector)
    return collector


def offline(stage: PerceptionStage, samples: np.ndarray, chunk: int, **options: Any) -> Collector:
    session, _ = stage.open(OpenSession(offline=True, **options))
    collector = Collector()
    for start in range(0, samples.size, chunk):
        session.step(PcmFrame(samples[start : start + chunk]), collector)
    assert not collector.sent and not collector.reported
    session.end(collector)
    return collector


def sent_frames(collector: Collector) -> np.ndarray:
    assert [index for index, _ in collector.sent] == list(range(len(collector.sent)))
    assert all(isinstance(message, Projected) for _, message in collector.sent)
    return np.concatenate([message.projected for _, message in collector.sent], axis=1)


def transcript(collector: Collector) -> str:
    assert all(isinstance(message, Transcript) for _, message in collector.reported)
    return "".join(message.delta for _, message in collector.reported)


@pytest.mark.parametrize("run", STREAMS)
def test_streaming_session_equals_golden(run: str, stages: dict[str, PerceptionStage], waveform: np.ndarray) -> None:
    info, arrays = golden(run)
    frames = frames_of(waveform, info["frames"])
    collector = stream(stages[info["checkpoint"]], frames, use_perception_cache="nocache" not in run)
    np.testing.assert_allclose(sent_frames(collector), arrays["projected"], atol=TOLERANCE, rtol=0)
    assert transcript(collector) == info["transcript"]
    expected = [(e["frame_index"], e["delta"]) for e in info["events"] if e["kind"] == "user_transcript_delta"]
    assert [(index, message.delta) for index, message in collector.reported] == expected
    assert collector.spans == ["perception", "rnnt"] * info["frames"]


def test_no_frame_of_a_stream_is_traced_after_warm_up(
    stages: dict[str, PerceptionStage], waveform: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(*arguments: Any) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(FastConformer, "step", trace)
    monkeypatch.setattr(PredictionNetwork, "__call__", trace)
    info, _ = golden(STREAMS[0])
    assert transcript(stream(stages["bf16"], frames_of(waveform, info["frames"]))) == info["transcript"] != ""


def test_uncompiled_steps_equal_golden(waveform: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine without a C++ compiler runs."""
    monkeypatch.setattr(mx, "compile", lambda function: function)
    stage = load(StageConfig("perception", DATA / "tiny" / "bf16"), lambda step, fraction: None)
    stage.warm_up()
    info, arrays = golden(STREAMS[0])
    collector = stream(stage, frames_of(waveform, info["frames"]))
    np.testing.assert_allclose(sent_frames(collector), arrays["projected"], atol=TOLERANCE, rtol=0)
    assert transcript(collector) == info["transcript"]


@pytest.mark.parametrize("run", STREAMS)
def test_inside_of_a_stream_equals_golden(run: str, stages: dict[str, PerceptionStage], waveform: np.ndarray) -> None:
    info, arrays = golden(run)
    stage = stages[info["checkpoint"]]
    perceive = stage.open_window() if "nocache" in run else stage.open_cached()
    mel_stream, decoder = MelStream(stage.log_mel, lookahead_samples=FRAME), GreedyDecoder(stage.transducer)
    mel, encoded, tokens = [], [], []
    for samples in frames_of(waveform, info["frames"]):
        mel.append(np.array(mel_stream.push(samples)))
        heard = perceive(samples, decoder.from_prediction)
        encoded.append(np.array(heard.encoded))
        tokens += [token for token in decoder.step(heard.scored) if stage.pieces.text(token) is not None]
    np.testing.assert_allclose(np.concatenate(encoded)[None], arrays["encoded"], atol=TOLERANCE, rtol=0)
    if "mel" in arrays:
        np.testing.assert_allclose(np.concatenate(mel, axis=1), arrays["mel"], atol=TOLERANCE, rtol=0)
    assert tokens == info["rnnt_tokens"]


@pytest.mark.parametrize("run", OFFLINE)
def test_offline_session_equals_golden(run: str, stages: dict[str, PerceptionStage], waveform: np.ndarray) -> None:
    info, arrays = golden(run)
    options = info["options"]
    extra = round(options.get("extra_decoding_seconds", 0.0) * 16000)
    stage, samples = stages[info["checkpoint"]], np.pad(waveform, (0, extra))
    collector = offline(stage, samples, 4321, max_frames=options.get("max_frames"))
    frames = info["frames"]
    assert len(collector.sent) == frames
    np.testing.assert_allclose(sent_frames(collector), arrays["projected"][:, :frames], atol=TOLERANCE, rtol=0)
    assert transcript(collector) == info["transcript"]
    assert [index for index, _ in collector.reported] == [frames - 1]
    np.testing.assert_allclose(np.array(stage.log_mel.whole(samples)), arrays["mel"], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(np.array(stage.perceive_whole(samples)[1]), arrays["encoded"], atol=TOLERANCE, rtol=0)


def test_offline_session_is_independent_of_chunking(stages: dict[str, PerceptionStage], waveform: np.ndarray) -> None:
    clip = waveform[:8000]  # half a second
    first, *others = (offline(stages["bf16"], clip, chunk) for chunk in (8000, 1280, 159, 1))
    assert len(first.sent) == 8
    for other in others:
        np.testing.assert_array_equal(sent_frames(other), sent_frames(first))
        assert transcript(other) == transcript(first)


def test_flushed_stream_of_any_chunking_equals_offline(
    stages: dict[str, PerceptionStage], waveform: np.ndarray
) -> None:
    """The pieces of a transcription session: minimal look-ahead, both streams flushed, the tail decoded."""
    stage, clip = stages["bf16"], waveform[:8100]
    whole, positions = np.array(stage.perceive_whole(clip)[1]), Positions(stage.config.encoder)
    for chunk in (8100, 1280, 700, 90):
        mel_stream, encoder, encoded = MelStream(stage.log_mel), EncoderStream(stage.perception.encoder, positions), []
        for start in range(0, clip.size, chunk):
            final = start + chunk >= clip.size
            frames = encoder.push(mel_stream.push(clip[start : start + chunk], final=final), final=final)
            mx.eval(frames, encoder.state)
            encoded.append(np.array(frames))
        np.testing.assert_allclose(np.concatenate(encoded, axis=1), whole, atol=1e-5)


def test_projected_frame_is_sent_before_it_is_recognised(
    stages: dict[str, PerceptionStage], waveform: np.ndarray
) -> None:
    session, _ = stages["bf16"].open(OpenSession())
    order: list[str] = []

    class Recorder(Collector):
        def send(self, message: Any, frame_index: int | None = None) -> None:
            order.append("send")

        def report(self, message: Any, frame_index: int | None = None) -> None:
            order.append("report")

        def span(self, name: str) -> Any:
            order.append(name)
            return super().span(name)

    for samples in frames_of(waveform, 2):
        session.step(PcmFrame(samples), Recorder())
    assert order == ["perception", "send", "rnnt", "perception", "send", "rnnt", "report"]


@pytest.mark.parametrize("size", [0, 1279, 1281])
def test_frame_of_another_size_is_refused(size: int, stages: dict[str, PerceptionStage]) -> None:
    session, _ = stages["bf16"].open(OpenSession())
    with pytest.raises(FrameContractError, match=f"got {size} samples for frame 0, expected 1280"):
        session.step(PcmFrame(np.zeros(size, dtype=np.float32)), Collector())


def test_offline_refuses_max_frames_below_2_and_input_below_172_samples(stages: dict[str, PerceptionStage]) -> None:
    with pytest.raises(ConfigError, match="max_frames must be at least 2, not 1"):
        stages["bf16"].open(OpenSession(offline=True, max_frames=1))
    with pytest.raises(AudioInputError, match="171 samples; at least 172"):
        offline(stages["bf16"], np.zeros(171, dtype=np.float32), 100)
    with pytest.raises(AudioInputError, match="0 samples"):
        offline(stages["bf16"], np.zeros(0, dtype=np.float32), 100)
    assert len(offline(stages["bf16"], np.zeros(172, dtype=np.float32), 172).sent) == 1


def test_no_transcript_without_a_vocabulary(stages: dict[str, PerceptionStage], waveform: np.ndarray) -> None:
    silent_stage = load(StageConfig("perception", DATA / "tiny" / "bf16"), lambda step, fraction: None)
    silent_stage.transducer.config = dataclasses.replace(silent_stage.config.rnnt, pieces=())
    streamed = stream(silent_stage, frames_of(waveform, 3))
    assert len(streamed.sent) == 3 and not streamed.reported and "rnnt" not in streamed.spans
    assert not offline(silent_stage, waveform, 5000).reported


def test_interleaved_sessions_equal_sessions_alone(stages: dict[str, PerceptionStage], waveform: np.ndarray) -> None:
    stage = stages["bf16"]
    inputs = [frames_of(waveform, 12), frames_of(waveform[::-1].copy(), 12)]
    alone = [stream(stage, frames) for frames in inputs]
    sessions = [stage.open(OpenSession())[0] for _ in inputs]
    together = [Collector(), Collector()]
    for index in range(12):
        for session, frames, collector in zip(sessions, inputs, together, strict=True):
            collector.frame_index = index
            session.step(PcmFrame(frames[index]), collector)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(sent_frames(one), sent_frames(other))
        assert one.reported == other.reported


def test_session_holds_the_same_memory_after_200_frames(stages: dict[str, PerceptionStage]) -> None:
    stage = stages["bf16"]
    perceive, recogniser = stage.open_cached(), Recogniser(stage.transducer, stage.pieces)
    rng = np.random.default_rng(3)
    sizes, memory = [], []
    for _ in range(200):
        recogniser.step(perceive(rng.normal(0, 0.1, FRAME).astype(np.float32), recogniser.from_prediction).scored)
        sizes.append(perceive.state_bytes)
        memory.append(mx.get_active_memory())
    assert len(set(sizes[1:])) == 1
    # Eight bytes a frame that stayed would be more. A frame in which a word piece comes holds a little more for its time.
    assert median(memory[100:]) < median(memory[20:100]) + 512
