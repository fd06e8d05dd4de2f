"""Speech turns across pipes: real processes, fakes for what can go wrong, the tiny checkpoint for the sound."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import PATIENCE_S, assert_quick, wait_until

from vcpipe.actors.local_speech import load_speech
from vcpipe.actors.speech.turns import SpeechTurns
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.session import VoiceChatSession
from vcpipe.pipeline.tracks import MAX_UNREAD_FRAMES
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.errors import (
    ActorDiedError,
    BacklogError,
    ConfigError,
    SessionClosedError,
    TurnError,
    VcpipeError,
)
from vcpipe.schemas.speech import SpeechChunk, SpeechOptions

pytestmark = pytest.mark.process

TINY = Path(__file__).parents[1] / "data" / "tiny" / "bf16"
PAD, EOS = 12, 2

#: The fakes sound as loud as the id is high: PAD and EOS are silent, letters are not.
FAKE_OPTIONS: dict[str, Any] = {"silence_level": 0.02}


def ids(chunks: list[SpeechChunk], seed: int = 0) -> list[int]:
    return [int(row[0]) - seed for chunk in chunks for row in chunk.codes]


def say(turns: SpeechTurns, text: str, **options: Any) -> list[SpeechChunk]:
    turns.reset_turn(**options)
    return turns.push_text(text) + turns.end_text() + turns.drain()


# ------------------------------------------------------------------------------------------------ turns
def test_turn_after_turn_frame_by_frame(pipeline: Pipeline) -> None:
    with pipeline.open_speech(**FAKE_OPTIONS) as turns:
        first = say(turns, "Well, go on.")
        assert [chunk.frame_index for chunk in first] == list(range(len(first)))
        assert {(chunk.samples.shape, chunk.codes.shape) for chunk in first} == {((1764,), (1, 31))}
        assert ids(first)[-turns.options.silence_frames :] == [EOS, PAD, PAD, PAD]
        assert ids(say(turns, "Well, go on.", seed=7), seed=7) == ids(first)
        with pytest.raises(TurnError):
            turns.push_text("more")


def test_sound_comes_while_text_does(pipeline: Pipeline) -> None:
    with pipeline.open_speech(chunk_frames=2, **FAKE_OPTIONS) as turns:
        turns.reset_turn()
        chunks = turns.push_text("Well, go on then, ")
        wait_until(lambda: bool(chunks.extend(turns.poll()) or len(chunks) >= 4))
        assert all(chunk.frames == 2 for chunk in chunks)
        chunks += turns.end_text() + turns.drain()
        assert [chunk.frame_index for chunk in chunks] == list(range(0, 2 * len(chunks), 2))


def test_speech_between_the_frames_of_conversations(pipeline: Pipeline) -> None:
    ones = np.ones(1280, np.float32)
    with pipeline.open_speech(**FAKE_OPTIONS) as alone:
        wanted = [ids(say(alone, text)) for text in ("Well, go on.", "Who else?")]
    with pipeline.open_session() as session:
        quiet = [event.audio_codes for event in session.push_audio(np.tile(ones, 6)) if event.kind == "audio"]
    first, second = (pipeline.open_speech(**FAKE_OPTIONS) for _ in range(2))
    with first, second, pipeline.open_session() as session:
        first.reset_turn()
        second.reset_turn()
        said: list[list[SpeechChunk]] = [[], []]
        codes = []
        for piece in (("Well,", "Who"), (" go", " el"), (" on.", "se?")):
            for chunks, turns, text in zip(said, (first, second), piece, strict=True):
                chunks += turns.push_text(text)
            codes += [e.audio_codes for e in session.push_audio(np.tile(ones, 2)) if e.kind == "audio"]
        for chunks, turns in zip(said, (first, second), strict=True):
            chunks += turns.end_text() + turns.drain()
        assert [ids(chunks) for chunks in said] == wanted
        np.testing.assert_array_equal(codes, quiet)


def test_the_pipeline_lets_go_of_every_turn(pipeline: Pipeline) -> None:
    turns = pipeline.open_speech(**FAKE_OPTIONS)
    for _ in range(5):
        say(turns, "Go on.")
        turns.reset_turn()
        turns.push_text("Well, go on.")
        turns.cancel()
    turns.close()
    wait_until(lambda: pipeline._coordinator.sessions == 0)


# ------------------------------------------------------------------------------------------------ bounds
def test_a_reader_that_does_not_read_holds_the_stages_back(pipeline: Pipeline) -> None:
    turns = pipeline.open_speech(max_pending_frames=1000, **FAKE_OPTIONS)
    turns.reset_turn()
    # Or a slow push would be a reader that reads.
    os.kill(pipeline.pids["tts"], signal.SIGSTOP)
    try:
        chunks = turns.push_text_tokens([100] * 1000, paced=False)
        # Some may have come back already.
        free = len(chunks)
        with pytest.raises(BacklogError, match=f"{1000 - free} frames wait and {free + 1} more"):
            turns.push_text_tokens([100] * (free + 1), paced=False)
    finally:
        os.kill(pipeline.pids["tts"], signal.SIGCONT)
    track = turns._engine._turn.track
    wait_until(lambda: track.frames_done - track.frames_taken >= MAX_UNREAD_FRAMES)
    assert track.frames_done - track.frames_taken < MAX_UNREAD_FRAMES + pipeline.config.window
    chunks += turns.end_text() + turns.drain()
    assert ids(chunks)[:1000] == [100] * 1000
    turns.close()


def test_cancel_drops_what_is_queued_at_once(start: Callable[..., Pipeline]) -> None:
    pipeline = start("tts", "codec", tts="fakes_heavy")
    turns = pipeline.open_speech(**FAKE_OPTIONS)

    def attempt() -> float:
        turns.reset_turn()
        turns.push_text_tokens([100] * 4000, paced=False)
        turns.end_text()
        ended: list[list[SpeechChunk]] = []
        reader = threading.Thread(target=lambda: ended.append(turns.drain()))
        track = turns._engine._turn.track
        before = track.frames_taken
        reader.start()
        wait_until(lambda: track.frames_taken > before, "the drain has begun")
        began = time.monotonic()
        turns.cancel()
        reader.join(PATIENCE_S)
        assert not reader.is_alive() and len(ended) == 1
        return time.monotonic() - began

    assert_quick(attempt, 3.0)
    turns.close()
    assert pipeline._coordinator.sessions == 0


# ------------------------------------------------------------------------------------------------ what cannot be
def test_a_pipeline_without_the_stages(start: Callable[..., Pipeline]) -> None:
    pipeline = start("codec")
    with pytest.raises(ConfigError, match="speech needs the stage tts; this pipeline was started with codec"):
        pipeline.open_speech()


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty is not accepted"),
        ({"chunk_frames": 4, "overlap_frames": 2}, "overlap_frames must be 0 here: the codec's process"),
    ],
)
def test_options_that_cannot_be(pipeline: Pipeline, options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        pipeline.open_speech(**options)


def test_a_stage_that_dies(start: Callable[..., Pipeline]) -> None:
    pipeline = start("tts", "codec")
    turns = pipeline.open_speech(**FAKE_OPTIONS)
    turns.reset_turn()
    turns.push_text("Well, go on.")
    os.kill(pipeline.pids["codec"], signal.SIGKILL)
    turns_over = False
    with pytest.raises(ActorDiedError, match="codec ended while it was needed"):
        turns.end_text()
        turns.drain()
        while not turns_over:
            say(turns, "Go on.")
    with pytest.raises((ActorDiedError, TurnError)):
        turns.push_text("more")
    with pytest.raises(VcpipeError):
        turns.reset_turn()
    with turns:
        pass
    with pytest.raises(SessionClosedError):
        turns.reset_turn()


# ------------------------------------------------------------------------------------------------ the tiny checkpoint
@pytest.fixture(scope="module")
def tiny() -> Iterator[Pipeline]:
    with Pipeline(PipelineConfig(TINY, device="cpu")) as running:
        yield running


def sound(chunks: list[SpeechChunk]) -> np.ndarray:
    return np.concatenate([chunk.samples for chunk in chunks])


def test_in_one_process_or_in_several(tiny: Pipeline) -> None:
    options = SpeechOptions(seed=3, chunk_frames=4, silence_level=0.0)
    text = "So, it is."
    with load_speech(TINY, options, device="cpu") as local, tiny.open_speech(options) as turns:
        for seed in (3, 8):
            local.reset_turn(seed=seed)
            wanted = [*local.push_text(text), *local.end_text(), *local.drain(max_steps=9)]
            turns.reset_turn(seed=seed)
            chunks = [chunk for letter in text for chunk in turns.push_text(letter)]
            chunks += turns.end_text() + turns.drain(max_steps=9)
            assert [chunk.frame_index for chunk in chunks] == [chunk.frame_index for chunk in wanted]
            np.testing.assert_array_equal(*(np.concatenate([c.codes for c in said]) for said in (chunks, wanted)))
            # The actors may run on another library of matrix products than this process.
            np.testing.assert_allclose(sound(chunks), sound(wanted), atol=3e-2)


def test_a_conversation_is_not_disturbed(tiny: Pipeline) -> None:
    noise = np.random.default_rng(1).normal(0, 0.1, 6 * 1280).astype(np.float32)

    def hear(session: VoiceChatSession, between: Callable[[], None]) -> np.ndarray:
        codes = []
        with session:
            for start in range(0, len(noise), 1280):
                codes += [e.audio_codes for e in session.push_audio(noise[start : start + 1280]) if e.kind == "audio"]
                between()
        return np.stack(codes)

    wanted = hear(tiny.open_session(seed=5), lambda: None)
    with tiny.open_speech(seed=5) as turns:
        turns.reset_turn()
        said: list[SpeechChunk] = []
        heard = hear(tiny.open_session(seed=5), lambda: said.extend(turns.push_text("is ")))
        said += turns.end_text() + turns.drain(2)
        np.testing.assert_array_equal(heard, wanted)
        turns.reset_turn()
        alone = turns.push_text("is " * 6) + turns.end_text() + turns.drain(2)
    np.testing.assert_array_equal(sound(said), sound(alone))
