"""Speech turns in one process on the tiny checkpoint: recorded runs, seeds, the windowed decode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vcpipe.actors.codec import actor as codec_actor
from vcpipe.actors.codec.actor import CodecStage
from vcpipe.actors.codec.windowed import WindowedDecoder
from vcpipe.actors.local_speech import load_speech, open_speech
from vcpipe.actors.speech.turns import SpeechTurns
from vcpipe.actors.stage import StageConfig
from vcpipe.actors.tts import actor as tts_actor
from vcpipe.actors.tts.actor import TtsStage
from vcpipe.schemas.speech import SpeechChunk, SpeechOptions

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "tiny" / "bf16"
TEXT = "So, it is."
PAD, EOS = 12, 2


@pytest.fixture(scope="module")
def stages() -> tuple[TtsStage, CodecStage]:
    tts = tts_actor.load(StageConfig("tts", TINY), lambda step, fraction: None)
    return tts, codec_actor.load(StageConfig("codec", TINY), lambda step, fraction: None)


@pytest.fixture
def speech(stages: tuple[TtsStage, CodecStage]) -> Callable[..., SpeechTurns]:
    return lambda **options: open_speech(*stages, TINY, SpeechOptions.of(**options))


def say(turns: SpeechTurns, *pieces: str, steps: int = 3, **options: Any) -> list[SpeechChunk]:
    turns.reset_turn(**options)
    chunks = [chunk for piece in pieces for chunk in turns.push_text(piece)]
    return chunks + turns.end_text() + turns.drain(steps)


def samples(chunks: list[SpeechChunk]) -> np.ndarray:
    return np.concatenate([chunk.samples for chunk in chunks])


def codes(chunks: list[SpeechChunk]) -> np.ndarray:
    return np.concatenate([chunk.codes for chunk in chunks])


@pytest.mark.parametrize("name", ["stream_bf16_seed0_prompt", "stream_bf16_seed7_noprompt"])
def test_ids_of_a_recorded_conversation_give_its_codes(speech: Callable[..., SpeechTurns], name: str) -> None:
    """Position 0 of a conversation takes no step, its prompt is stepped with PAD: a turn that begins with PAD is the same."""
    info = json.loads((DATA / "golden" / f"{name}.json").read_text())
    with np.load(DATA / "golden" / f"{name}.npz") as golden:
        ids, wanted, heard = golden["text_ids"].reshape(-1), golden["codes"], golden["samples"].reshape(-1, 1764)
    before = len(ids) - len(wanted)
    turns = speech(seed=info["seed"])
    turns.reset_turn()
    chunks = turns.push_text_tokens([int(token) for token in ids[1:]], paced=False)
    np.testing.assert_array_equal(codes(chunks)[max(before - 1, 0) :], wanted[1 - min(before, 1) :])
    if not before:
        # From another past the codec's sound of the first frames is another one.
        np.testing.assert_allclose(samples(chunks)[8 * 1764 :], heard[9:].reshape(-1), atol=2e-2)
    turns.cancel()


def test_a_seed_gives_the_same_bytes_however_the_text_is_cut(speech: Callable[..., SpeechTurns]) -> None:
    turns = speech(seed=4)
    wanted = samples(say(turns, TEXT))
    assert len(wanted) % 1764 == 0 and len(wanted) > 12 * 1764
    np.testing.assert_array_equal(samples(say(turns, *TEXT)), wanted)
    np.testing.assert_array_equal(samples(say(speech(chunk_frames=6), TEXT[:9], TEXT[9:], seed=4)), wanted)
    assert not np.array_equal(samples(say(turns, TEXT, seed=5)), wanted)


def test_text_and_its_ids_sound_the_same(speech: Callable[..., SpeechTurns], stages: Any) -> None:
    from vcpipe.actors.checkpoint import load_tokenizer

    turns = speech()
    wanted = say(turns, TEXT)
    turns.reset_turn()
    ids = load_tokenizer(TINY).encode(" " + TEXT, add_special_tokens=False).ids
    chunks = turns.push_text_tokens(ids[:5]) + turns.push_text_tokens(ids[5:]) + turns.end_text() + turns.drain(3)
    assert [chunk.samples.size for chunk in chunks] == [chunk.samples.size for chunk in wanted]
    np.testing.assert_array_equal(samples(chunks), samples(wanted))


def test_a_turn_begins_anew_after_a_cancelled_one(speech: Callable[..., SpeechTurns]) -> None:
    turns = speech()
    wanted = samples(say(turns, "Yes."))
    turns.reset_turn(seed=9)
    turns.push_text(TEXT)
    turns.cancel()
    np.testing.assert_array_equal(samples(say(turns, "Yes.")), wanted)


def test_the_voice_prompt_is_taken_in_once(
    speech: Callable[..., SpeechTurns], stages: tuple[TtsStage, CodecStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = speech()
    turns.reset_turn(seed=1)
    turns.cancel()
    monkeypatch.setattr(stages[0]._model, "prefill", None)
    turns.reset_turn(seed=2)
    assert turns.push_text("is it so? ") != []
    turns.cancel()


def test_a_turn_loaded_by_itself() -> None:
    with load_speech(TINY, SpeechOptions(seed=4), device="cpu") as turns:
        assert samples(say(turns, "No.")).size > 0


# ------------------------------------------------------------------------------------------------ windowed decode
def test_the_windowed_decode_conserves_samples(speech: Callable[..., SpeechTurns]) -> None:
    wanted = say(speech(chunk_frames=5), TEXT)
    assert wanted[-1].frames < 5  # a short last chunk
    for overlap in (1, 4):
        chunks = say(speech(chunk_frames=5, overlap_frames=overlap), TEXT)
        assert [(chunk.frame_index, chunk.samples.size) for chunk in chunks] == [
            (chunk.frame_index, chunk.samples.size) for chunk in wanted
        ]
        np.testing.assert_array_equal(codes(chunks), codes(wanted))


def test_a_windowed_turn_that_falls_silent(speech: Callable[..., SpeechTurns]) -> None:
    options = {"silence_level": 1e9, "silence_frames": 2, "chunk_frames": 7}
    wanted, chunks = (say(speech(**options, overlap_frames=overlap), TEXT, steps=50) for overlap in (0, 3))
    assert len(samples(chunks)) == len(samples(wanted))
    np.testing.assert_array_equal(codes(chunks), codes(wanted))


@pytest.mark.parametrize("frames", [23, 20, 3])
@pytest.mark.parametrize("overlap", [0, 1, 3, 4])
def test_the_windowed_decode_beside_the_full_one(stages: Any, frames: int, overlap: int) -> None:
    codec = stages[1].codec
    tokens = np.random.default_rng(3).integers(0, 32, (frames, 31)).astype(np.int32)
    full = np.array(codec.decode(mx.array(tokens.T[None]))[0, 0])
    decoder = WindowedDecoder(codec, 5, overlap)
    pieces = [piece for row in tokens for piece in decoder.push(row)] + decoder.flush()
    assert [piece.shape for piece in pieces] == [(1764,)] * frames and decoder.flush() == []
    # A stream's first samples lack what stands before it in the full decode's window; its others come 8 samples late.
    difference = np.abs(np.concatenate(pieces)[16:] - full[8:-8])
    seams = [start * 1764 for start in range(5, frames, 5)]
    if overlap >= 3:
        # The decoder's past is shorter than three frames: equal but for rounding.
        np.testing.assert_allclose(difference, 0, atol=1e-2)
    elif frames > 5:
        assert max(difference[seam - 16 :][:1764].max() for seam in seams) > 1e-2


@pytest.mark.parametrize(("chunk", "overlap"), [(5, 5), (5, -1), (0, 0)])
def test_windows_that_cannot_be(stages: Any, chunk: int, overlap: int) -> None:
    with pytest.raises(ValueError, match="overlap_frames must be from 0 to"):
        WindowedDecoder(stages[1].codec, chunk, overlap)
