"""Live transcription in the process of the model: the life of a session, many of them, and one in an actor."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from statistics import median

import mlx.core as mx
import numpy as np
import pytest
from collector import Collector
from hearing import FRAME, RATE, cut, drain, golden_input, load_tiny, noise, transcribe, whole

from vcpipe.actors.perception.actor import PerceptionStage
from vcpipe.schemas.errors import ConfigError, FrameContractError
from vcpipe.schemas.messages import OpenSession, PcmFrame
from vcpipe.schemas.reports import Transcribed, Transcript
from vcpipe.schemas.streaming import StreamingSession, TranscriptDelta


@pytest.fixture(scope="module")
def stage() -> PerceptionStage:
    stage = load_tiny()
    stage.warm_up()
    return stage


@pytest.fixture(scope="module")
def waveform() -> np.ndarray:
    return golden_input()


# -- life of a session


def test_a_session_is_one_turn(stage: PerceptionStage) -> None:
    session = stage.create_streaming_session()
    assert isinstance(session, StreamingSession) and session.input_sample_rate == RATE
    session.feed(noise(FRAME))
    session.close()
    session.close()
    with pytest.raises(RuntimeError, match="the transcription is closed"):
        session.feed(noise(1))
    assert not session.done
    drain(session)
    assert session.step() == [] and session.done
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.feed(noise(1))


def test_reset_begins_the_next_turn_anew(stage: PerceptionStage, waveform: np.ndarray) -> None:
    session = stage.create_streaming_session()
    first = transcribe(session, cut(waveform[:8000], 700))
    session.reset()
    assert transcribe(session, cut(waveform[:8000], 700)) == first
    session.reset()
    session.feed(waveform[:5000])
    session.step()
    session.reset()
    assert transcribe(session, cut(waveform[:8000], 700)) == first


def test_cancel_ends_at_once_without_a_word(stage: PerceptionStage, waveform: np.ndarray) -> None:
    session = stage.create_streaming_session()
    session.feed(waveform)
    session.step()
    session.cancel()
    assert (session.done, session.step(), session._queued) == (True, [], 0)
    with pytest.raises(RuntimeError, match="closed"):
        session.feed(noise(1))
    session.reset()
    assert not session.done
    session.feed(noise(1))


def test_30_seconds_may_wait_and_nothing_of_more_is_taken(stage: PerceptionStage) -> None:
    session = stage.create_streaming_session()
    with pytest.raises(BufferError, match=r"480001 more were fed; at most 480000 \(30 s\)"):
        session.feed(np.zeros(30 * RATE + 1, np.float32))
    session.feed(np.zeros(30 * RATE, np.float32))
    with pytest.raises(BufferError, match="480000 samples wait and 1 more were fed"):
        session.feed(np.zeros(1, np.float32))
    session.feed(np.zeros(0, np.float32))
    session.step()
    session.feed(np.zeros(FRAME, np.float32))
    assert session._queued == 30 * RATE


def test_bad_input_is_refused_and_nothing_of_it_taken(stage: PerceptionStage) -> None:
    session = stage.create_streaming_session()
    for bad, complaint in (
        (np.zeros((2, 2)), r"mono, \(n,\), not of shape \(2, 2\)"),
        (np.float32(1), r"not of shape \(\)"),
        ([0.0, np.nan], "finite; sample 1 is not"),
        ([np.inf], "finite; sample 0 is not"),
    ):
        with pytest.raises(ValueError, match=complaint):
            session.feed(bad)  # type: ignore[arg-type]
    for budget in (0, -1):
        with pytest.raises(ValueError, match=f"max_decode_tokens must be at least 1, not {budget}"):
            session.step(max_decode_tokens=budget)
    assert session._queued == 0


def test_what_is_fed_is_copied(stage: PerceptionStage, waveform: np.ndarray) -> None:
    expected = transcribe(stage.create_streaming_session(), [waveform[:8000]])
    session, reused = stage.create_streaming_session(), waveform[:8000].copy()
    session.feed(reused)
    reused[:] = 0
    session.close()
    assert (drain(session), session.frames) == expected
    integers = stage.create_streaming_session()
    integers.feed(np.zeros(FRAME, np.int16))  # any numbers become float32
    assert integers._queued == FRAME


def test_options_that_the_model_lacks_are_refused(stage: PerceptionStage) -> None:
    for options, complaint in (
        ({"temperature": 0.5}, "temperature must be 0: transcription is greedy, got 0.5"),
        ({"language": "en"}, "the model takes no language, got 'en'"),
        ({"transcription_delay_ms": 160}, r"transcription_delay_ms must be 80 \(no frames ahead\), got 160"),
    ):
        with pytest.raises(ValueError, match=complaint):
            stage.create_streaming_session(**options)  # type: ignore[arg-type]
    assert not stage.create_streaming_session(temperature=0.0, language=None, transcription_delay_ms=80).done


def test_a_checkpoint_without_pieces_cannot_transcribe() -> None:
    stage = load_tiny()
    stage.transducer.config = dataclasses.replace(stage.config.rnnt, pieces=())
    for make in (stage.create_streaming_session, lambda: stage.open(OpenSession(task="transcription"))):
        with pytest.raises(ConfigError, match="no rnnt_vocabulary: it cannot transcribe"):
            make()


def test_a_producers_thread_feeds_while_the_models_thread_steps(stage: PerceptionStage, waveform: np.ndarray) -> None:
    expected = transcribe(stage.create_streaming_session(), [waveform])
    session = stage.create_streaming_session()

    def produce() -> None:
        for chunk in cut(waveform, 111):
            session.feed(chunk)
        session.close()

    producer = threading.Thread(target=produce)
    producer.start()
    deltas: list[TranscriptDelta] = []
    while not session.done:
        deltas += session.advance(4)
    producer.join()
    assert (deltas, session.frames) == expected


# -- many sessions


def test_interleaved_sessions_equal_sessions_alone(stage: PerceptionStage, waveform: np.ndarray) -> None:
    """Two transcriptions and a voice-chat session, a chunk each in turn."""
    inputs = [cut(waveform[:16000], 1000), cut(waveform[::-1][:16000].copy(), 1000)]
    alone = [transcribe(stage.create_streaming_session(), chunks) for chunks in inputs]
    frames = cut(waveform[: 16 * FRAME], FRAME)
    chat_alone = Collector()
    for chat in chats(stage, frames, chat_alone):
        chat()
    sessions = [stage.create_streaming_session() for _ in inputs]
    found: list[list[TranscriptDelta]] = [[], []]
    chat_between = Collector()
    for chunks, chat in zip(zip(*inputs, strict=True), chats(stage, frames, chat_between), strict=True):
        for session, chunk, deltas in zip(sessions, chunks, found, strict=True):
            session.feed(chunk)
            deltas += session.advance(4)
        chat()
    for session, deltas in zip(sessions, found, strict=True):
        session.close()
        deltas += drain(session)
    assert [(deltas, session.frames) for deltas, session in zip(found, sessions, strict=True)] == alone
    assert chat_between.reported == chat_alone.reported
    for (_, one), (_, other) in zip(chat_between.sent, chat_alone.sent, strict=True):
        np.testing.assert_array_equal(one.projected, other.projected)


def chats(stage: PerceptionStage, frames: list[np.ndarray], collector: Collector) -> Iterator[Callable[[], None]]:
    """A voice-chat session, a frame a call."""
    session, _ = stage.open(OpenSession())
    for frame in frames:
        yield lambda frame=frame: session.step(PcmFrame(frame), collector)


def test_work_and_state_are_the_same_after_200_frames(stage: PerceptionStage) -> None:
    """W13 without a clock: what is held, what is evaluated a frame, and what MLX has in use."""
    session = stage.create_streaming_session()
    held, evaluated, memory = [], [], []
    for index in range(200):
        session.feed(noise(FRAME, index))
        count = 0
        while session.waiting:
            session.advance(1)
            count += 1
        held.append(session.state_bytes)
        evaluated.append(count)
        memory.append(mx.get_active_memory())
    assert len(set(held[2:])) == 1
    assert session.frames == 200
    assert max(evaluated) <= stage.config.rnnt.max_symbols + 1
    # Eight bytes a frame that stayed would be more; what the interpreter has not let go of yet differs by a few.
    assert median(memory[100:]) < median(memory[20:100]) + 512


# -- in an actor


def actor_run(stage: PerceptionStage, chunks: list[np.ndarray]) -> Collector:
    request = OpenSession(task="transcription", route=("perception",))
    session, passed_on = stage.open(request)
    assert passed_on == request
    session.prefill()
    collector = Collector()
    for index, chunk in enumerate(chunks):
        collector.frame_index = index
        session.step(PcmFrame(chunk), collector)
    collector.frame_index = -1
    session.end(collector)
    return collector


@pytest.mark.parametrize("size", [1280, 257, 1000])
def test_an_actors_session_reports_a_frames_text_at_once(
    size: int, stage: PerceptionStage, waveform: np.ndarray
) -> None:
    clip = waveform[:9000]
    pieces, frames = whole(stage, clip)
    collector = actor_run(stage, cut(clip, size))
    assert collector.sent == []
    *reports, (_, last) = collector.reported
    assert last == Transcribed(frames)
    joined: dict[int, str] = {}
    for index, text in pieces:
        joined[index] = joined.get(index, "") + text
    first = min(joined)
    joined[first] = joined[first].lstrip()
    assert reports == [(index, Transcript(text)) for index, text in joined.items()]


def test_an_actors_session_refuses_more_than_a_frame_and_tasks_it_has_not(stage: PerceptionStage) -> None:
    session, _ = stage.open(OpenSession(task="transcription"))
    with pytest.raises(FrameContractError, match="1281 samples of a transcription, expected at most 1280"):
        session.step(PcmFrame(noise(1281)), Collector())
    with pytest.raises(ConfigError, match="perception has no sessions for 'speech'"):
        stage.open(OpenSession(task="speech"))
