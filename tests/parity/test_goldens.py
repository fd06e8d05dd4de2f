"""Real processes beside recorded runs of the public MLX code, and the promise that a seed gives the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity.compare import (
    GOLDEN,
    TINY,
    Heard,
    assert_same_bytes,
    assert_same_sound,
    heard,
    noise_bursts,
    read_wav,
)

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.session import VoiceChatSession
from vcpipe.pipeline.tap import TapSubscriber
from vcpipe.schemas.config import GenerateOptions, PipelineConfig
from vcpipe.schemas.errors import VcpipeError

pytestmark = pytest.mark.process

#: Ids that never show in events: BOS, EOS, silence, PAD.
SPECIAL_IDS = {1, 2, 11, 12}

WAV = read_wav(GOLDEN / "input.wav")
#: What most sessions here hear: 12 frames and a half, so that one frame is padded.
SHORT = WAV[:16000]
#: What most sessions here are opened with; their prompt takes four positions or more.
OPTIONS: dict[str, Any] = {"system_prompt": "be concise", "seed": 5}


@pytest.fixture(scope="module", params=["bf16", "q4"])
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    with Pipeline(PipelineConfig(TINY / request.param, device="cpu")) as running:
        yield running


@pytest.fixture(scope="module")
def bf16() -> Iterator[Pipeline]:
    with Pipeline(PipelineConfig(TINY / "bf16", device="cpu")) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(bf16: Pipeline) -> Heard:
    """SHORT pushed at once in the first session of fresh processes."""
    return push(bf16.open_session(**OPTIONS), SHORT)


def push(session: VoiceChatSession, wav: np.ndarray, chunk: int | None = None, pad_partial: bool = True) -> Heard:
    chunk = chunk or len(wav)
    events = []
    with session:
        for start in range(0, len(wav), chunk):
            events += session.push_audio(wav[start : start + chunk])
        events += session.flush(pad_partial)
    return heard(events)


def goldens(checkpoint: Path, mode: str) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    found = []
    for path in sorted(GOLDEN.glob(f"{mode}_{checkpoint.name}_*.json")):
        with np.load(path.with_suffix(".npz")) as arrays:
            found.append((json.loads(path.read_text()), dict(arrays)))
    assert found
    return found


# ------------------------------------------------------------------------------------------------ goldens
def test_streaming_goldens(pipeline: Pipeline) -> None:
    """Among them the one with both switches off."""
    for info, arrays in goldens(pipeline.config.checkpoint, "stream"):
        options = dict(info["options"])
        chunk, pad_partial = options.pop("chunk"), options.pop("pad_partial")
        session = pipeline.open_session(system_prompt=info["system_prompt"], seed=info["seed"], **options)
        ours = push(session, WAV, chunk, pad_partial)
        fields = ("kind", "frame_index", "token_id", "delta", "text")
        assert ours.events == [tuple(event.get(name) for name in fields) for event in info["events"]]
        np.testing.assert_array_equal(ours.codes, arrays["codes"])
        assert_same_sound(ours.samples, arrays["samples"].reshape(-1))


def test_offline_goldens(pipeline: Pipeline) -> None:
    for info, arrays in goldens(pipeline.config.checkpoint, "offline"):
        options = GenerateOptions(system_prompt=info["system_prompt"], seed=info["seed"], **info["options"])
        result = pipeline.generate(WAV, options)
        assert result.text == info["text"]
        assert result.user_transcript == info["transcript"]
        assert result.text_tokens == arrays["text_ids"].tolist()
        assert result.function_tokens == arrays["function_ids"].tolist()
        np.testing.assert_array_equal(result.audio_codes, arrays["codes"])
        assert result.sample_rate == 22050
        assert_same_sound(result.audio, arrays["samples"])


def test_goldens_cover_both_checkpoints() -> None:
    assert len(list(GOLDEN.glob("*.npz"))) == 7 + 2  # two hold the voice prompt


# ------------------------------------------------------------------------------------------------ streaming and offline
@pytest.mark.parametrize("prompt", ["", "hello there, speak quietly"])
def test_streaming_equals_offline(pipeline: Pipeline, prompt: str) -> None:
    streamed = push(pipeline.open_session(system_prompt=prompt, seed=21), SHORT)
    offline = pipeline.generate(SHORT, GenerateOptions(system_prompt=prompt, seed=21))
    frames = len(streamed.codes)
    assert len(offline.audio_codes) >= frames
    for kind, ids in (("assistant_text_delta", offline.text_tokens), ("function_delta", offline.function_tokens)):
        shown = {frame: token for event, frame, token, _, _ in streamed.events if event == kind}
        assert shown == {frame: token for frame, token in enumerate(ids[:frames]) if token not in SPECIAL_IDS}
        assert shown
    # Without a prompt nothing precedes frame 0: a stream sends silence codes there, an offline run code 0.
    first = 0 if prompt else 1
    np.testing.assert_array_equal(streamed.codes[first:], offline.audio_codes[first:frames])


def test_streaming_first_frame_matches_offline(pipeline: Pipeline) -> None:
    prompt = "Be concise and answer in one sentence."
    offline = pipeline.generate(SHORT, GenerateOptions(system_prompt=prompt, seed=0))
    with pipeline.open_session(system_prompt=prompt, seed=0) as session:
        events = session.push_audio(SHORT[:1280])
    codes = [event.audio_codes for event in events if event.kind == "audio"]
    ids = [event.token_id for event in events if event.token_id is not None]
    np.testing.assert_array_equal(codes, offline.audio_codes[:1])
    assert ids == [i for i in (offline.text_tokens[0], offline.function_tokens[0]) if i not in SPECIAL_IDS]


def test_language_without_cache_equals_cached(bf16: Pipeline) -> None:
    cached = push(bf16.open_session(seed=8), SHORT)
    assert_same_bytes(push(bf16.open_session(seed=8, use_language_cache=False), SHORT), cached)


# ------------------------------------------------------------------------------------------------ same seed, same bytes
@pytest.mark.parametrize("chunk", [1, 159, 300, 1280, 3000])
def test_any_chunking(bf16: Pipeline, undisturbed: Heard, chunk: int) -> None:
    assert_same_bytes(push(bf16.open_session(**OPTIONS), SHORT, chunk), undisturbed)


def fed(session: VoiceChatSession) -> Heard:
    with session:
        for start in range(0, len(SHORT), 700):
            session.feed(SHORT[start : start + 700])
        session.end()
        return heard(session.events())


def streamed(session: VoiceChatSession) -> Heard:
    with session:
        return heard(session.stream(np.array_split(SHORT, 5)))


@pytest.mark.parametrize("drive", [fed, streamed])
@pytest.mark.parametrize("clock", ["file", "wall"])
def test_any_drive_and_clock(
    bf16: Pipeline, undisturbed: Heard, drive: Callable[[VoiceChatSession], Heard], clock: str
) -> None:
    assert_same_bytes(drive(bf16.open_session(clock=clock, **OPTIONS)), undisturbed)


def test_after_a_cancelled_session(bf16: Pipeline, undisturbed: Heard) -> None:
    with bf16.open_session(seed=5) as session:
        session.feed(WAV)
        assert [event.kind for event in session.cancel()] == ["cancelled"]
        # Opened while the stages may still be busy with the other one.
        assert_same_bytes(push(bf16.open_session(**OPTIONS), SHORT), undisturbed)


def test_after_a_failed_session(bf16: Pipeline, undisturbed: Heard) -> None:
    with pytest.raises(VcpipeError, match="172"):
        bf16.generate(SHORT[:171])
    assert_same_bytes(push(bf16.open_session(**OPTIONS), SHORT), undisturbed)


def test_beside_another_session(bf16: Pipeline, undisturbed: Heard) -> None:
    other_options: dict[str, Any] = {"system_prompt": "", "seed": 5}
    other_wav = noise_bursts(1, len(SHORT))
    alone = push(bf16.open_session(**other_options), other_wav)
    events: tuple[list[Any], list[Any]] = ([], [])
    with bf16.open_session(**OPTIONS) as one, bf16.open_session(**other_options) as other:
        for start in range(0, len(SHORT), 2000):
            part = slice(start, start + 2000)
            one.feed(SHORT[part])
            other.feed(other_wav[part])
            events[0].extend(one.poll())
            events[1].extend(other.poll())
        for session, collected in zip((one, other), events, strict=True):
            session.end()
            collected.extend(session.events())
    assert_same_bytes(heard(events[0]), undisturbed)
    assert_same_bytes(heard(events[1]), alone)


def test_ten_sessions_in_a_row(bf16: Pipeline) -> None:
    first, *others = (push(bf16.open_session(**OPTIONS), SHORT[:4000]) for _ in range(10))
    for other in others:
        assert_same_bytes(other, first)


def test_another_seed_gives_other_codes(bf16: Pipeline, undisturbed: Heard) -> None:
    other = push(bf16.open_session(**{**OPTIONS, "seed": 6}), SHORT)
    assert not np.array_equal(other.codes, undisturbed.codes)


def test_offline_runs_repeat(bf16: Pipeline) -> None:
    options = GenerateOptions(seed=3, use_language_cache=True)
    first, second = (bf16.generate(SHORT, options) for _ in range(2))
    np.testing.assert_array_equal(first.audio, second.audio)
    np.testing.assert_array_equal(first.audio_codes, second.audio_codes)
    uncached = bf16.generate(SHORT, GenerateOptions(seed=3))
    np.testing.assert_array_equal(uncached.audio, first.audio)


def test_with_a_tap_and_fresh_processes(undisturbed: Heard, tmp_path: Path) -> None:
    """Another start of the processes, with someone listening: the same bytes for both."""
    endpoint = f"ipc://{tmp_path}/tap"
    config = PipelineConfig(TINY / "bf16", device="cpu", tap=endpoint, window=2)
    with Pipeline(config) as pipeline, TapSubscriber(endpoint, ("event.audio",)) as tap:
        assert_same_bytes(push(pipeline.open_session(**OPTIONS), SHORT), undisturbed)
        copies = {header.frame_index: message.samples for _, header, message in tap.messages(0.5)}
    assert copies
    for frame, samples in copies.items():
        np.testing.assert_array_equal(samples, undisturbed.samples.reshape(-1, 1764)[frame])
