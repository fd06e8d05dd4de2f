"""Live transcription across pipes: the same contract as in the model's process, on fakes and on the tiny checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
from live_audio import FIRST, FRAME, RATE, samples
from waiting import PATIENCE_S, assert_quick

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.pipeline.transcription import LiveTranscription
from vcpipe.schemas.errors import ActorDiedError, ConfigError, PipelineClosedError
from vcpipe.schemas.events import Event
from vcpipe.schemas.streaming import StreamingSession

#: Texts of the fakes for so many messages of samples.
SAID = {4: "w0 w2 end", 5: "w0 w2 w4 end"}


def drain(session: LiveTranscription) -> str:
    deadline, said = time.monotonic() + PATIENCE_S, ""
    while not session.done:
        assert time.monotonic() < deadline, "the transcription did not end"
        said += "".join(session.step())
    return said


# -- a turn


def test_it_is_a_streaming_session(pipeline: Pipeline) -> None:
    with pipeline.open_transcription() as session:
        assert isinstance(session, StreamingSession) and session.input_sample_rate == RATE
        session.feed(samples(4))
        session.close()
        session.close()
        assert not session.done
        assert drain(session) == SAID[4]
        assert (session.done, session.step(), session.frames) == (True, [], 5)


@pytest.mark.parametrize("size", [1, 159, 1280, 8000])
def test_any_cut_gives_the_same_messages(size: int, pipeline: Pipeline) -> None:
    pcm = samples(4)
    with pipeline.open_transcription() as session:
        for start in range(0, pcm.size, size):
            session.feed(pcm[start : start + size])
        session.close()
        deltas = list(session.deltas())
    # The last one comes from the end of the stream: it lies beyond what the messages completed.
    assert [(delta.frame_index, delta.text) for delta in deltas] == [(0, "w0"), (2, " w2"), (4, " end")]
    assert (deltas[1].start_s, deltas[1].end_s) == (pytest.approx(0.08), pytest.approx(0.16))


def test_a_tail_shorter_than_a_frame_is_sent_with_the_end(pipeline: Pipeline) -> None:
    with pipeline.open_transcription() as session:
        session.feed(samples(4))
        session.feed(np.zeros(5, np.float32))
        session.close()
        assert drain(session) == SAID[5]


def test_text_comes_before_the_end(pipeline: Pipeline) -> None:
    with pipeline.open_transcription() as session:
        session.feed(samples(4))
        said, deadline = "", time.monotonic() + PATIENCE_S
        while said != "w0 w2" and time.monotonic() < deadline:
            said += "".join(session.step())
        assert said == "w0 w2"
        assert session.step() == [] and not session.done


def test_a_step_takes_so_many_texts_at_most(pipeline: Pipeline) -> None:
    with pipeline.open_transcription() as session:
        session.feed(samples(40))
        session.close()
        found = []
        while not session.done:
            found.append(session.step(max_decode_tokens=1))
        assert max(len(texts) for texts in found) == 1
        assert len([texts for texts in found if texts]) == 21
        with pytest.raises(ValueError, match="max_decode_tokens must be at least 1, not 0"):
            session.step(max_decode_tokens=0)


def test_a_step_with_nothing_on_its_way_does_not_wait(pipeline: Pipeline) -> None:
    with pipeline.open_transcription() as session:
        session.feed(np.zeros(FIRST - 1, np.float32))

        def attempt() -> float:
            started = time.monotonic()
            for _ in range(20):
                assert session.step() == []
            return time.monotonic() - started

        assert_quick(attempt, 0.5)
        assert session.poll() == []


def test_a_producers_thread_feeds_while_the_consumer_iterates(pipeline: Pipeline) -> None:
    with pipeline.open_transcription() as session:

        def produce() -> None:
            for _ in range(60):
                session.feed(np.zeros(640, np.float32))
            session.close()

        producer = threading.Thread(target=produce)
        producer.start()
        said = [delta.frame_index for delta in session.deltas()]
        producer.join()
    assert said == [*range(0, 31, 2), 31]


def test_without_input_there_is_an_end_all_the_same(pipeline: Pipeline) -> None:
    with pipeline.open_transcription() as session:
        session.close()
        assert drain(session) == " end"


# -- several turns, several sessions


def test_reset_begins_the_next_turn(pipeline: Pipeline) -> None:
    with pipeline.open_transcription() as session:
        ids = set()
        for _ in range(3):
            session.feed(samples(4))
            session.close()
            assert drain(session) == SAID[4]
            ids.add(session.id)
            session.reset()
            assert (session.done, session.frames) == (False, None)
        assert len(ids) == 3
        session.feed(samples(30))
        session.reset()
        session.feed(samples(4))
        session.close()
        assert drain(session) == SAID[4]


def test_cancel_ends_at_once_and_the_next_turn_is_whole(pipeline: Pipeline) -> None:
    session = pipeline.open_transcription()
    session.feed(samples(30))
    session.cancel()
    assert (session.done, session.step(), session.poll(), session.frames) == (True, [], [], None)
    with pytest.raises(RuntimeError, match="the transcription is closed; reset it or open another one"):
        session.feed(samples(1))
    session.cancel()
    session.reset()
    session.feed(samples(4))
    session.close()
    assert drain(session) == SAID[4]
    session.cancel()


def test_transcriptions_and_a_voice_chat_session_run_side_by_side(pipeline: Pipeline) -> None:
    with pipeline.open_session() as alone:
        expected = alone.push_audio(np.ones(10 * FRAME, np.float32)) + alone.flush()
    with (
        pipeline.open_session() as chat,
        pipeline.open_transcription() as first,
        pipeline.open_transcription() as second,
    ):
        events: list[Event] = []
        for _ in range(10):
            first.feed(np.zeros(FRAME, np.float32))
            events += chat.push_audio(np.ones(FRAME, np.float32))
            second.feed(np.zeros(FRAME // 2, np.float32))
        first.close()
        second.close()
        events += chat.flush()
        said = [[delta.frame_index for delta in session.deltas()] for session in (first, second)]
    assert [event.to_json() for event in events] == [event.to_json() for event in expected]
    assert said == [[0, 2, 4, 6, 8, 10, 11], [0, 2, 4, 6]]


def test_the_other_stages_hear_nothing_of_it(shared: Any) -> None:
    pipeline: Pipeline = shared.pipeline
    with pipeline.open_transcription() as session:
        session.feed(samples(20))
        session.close()
        drain(session)
        heard = shared.heard_of(session.id)
    timings = [delivery for delivery in heard if isinstance(delivery, FrameTiming)]
    assert len(timings) == 20 and all(set(timing.stages) == {"perception"} for timing in timings)
    assert [delivery for delivery in heard if isinstance(delivery, str)][0] == "opened"


# -- bad input, bounds, ends


def test_bad_input_is_refused_and_nothing_of_it_taken(pipeline: Pipeline) -> None:
    with pipeline.open_transcription() as session:
        for bad, complaint in ((np.zeros((2, 2)), "mono"), ([np.nan], "finite; sample 0 is not"), (1.0, "mono")):
            with pytest.raises(ValueError, match=complaint):
                session.feed(bad)
        session.feed(samples(4))
        session.close()
        assert drain(session) == SAID[4]
    for options in ({"temperature": 1.0}, {"language": "de"}, {"transcription_delay_ms": 560}):
        with pytest.raises(ValueError, match=next(iter(options))):
            pipeline.open_transcription(**options)  # type: ignore[arg-type]


def test_what_is_fed_is_copied(pipeline: Pipeline) -> None:
    with pipeline.open_transcription() as session:
        reused = np.zeros(5, np.float32)
        session.feed(reused)
        assert not np.shares_memory(session._pending, reused)


def test_a_pipeline_without_perception_cannot_transcribe(start: Callable[..., Pipeline]) -> None:
    with pytest.raises(
        ConfigError, match="transcription needs the stage perception; this pipeline was started with codec"
    ):
        start("codec").open_transcription()


def test_an_actor_that_dies_ends_the_turn_within_a_second(start: Callable[..., Pipeline]) -> None:
    def attempt() -> float:
        pipeline = start("perception")
        session = pipeline.open_transcription()
        os.kill(pipeline.pids["perception"], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(ActorDiedError, match="SIGKILL"):
            while not session.done:
                session.step()
                session.feed(samples(1))
        seconds = time.monotonic() - started
        with pytest.raises(ActorDiedError):
            session.reset()
        return seconds

    assert_quick(attempt, 1.0)


def test_a_closed_pipeline_ends_its_transcriptions(start: Callable[..., Pipeline]) -> None:
    pipeline = start("perception")
    session = pipeline.open_transcription()
    session.feed(samples(2))
    pipeline.close()
    with pytest.raises(PipelineClosedError):
        list(session.deltas())
    assert session.done and session.step() == []
    with pytest.raises(RuntimeError, match="closed"):
        session.feed(samples(1))


# -- the tiny checkpoint


@pytest.fixture(scope="module")
def tiny(shared: Any) -> Iterator[Pipeline]:
    """Perception alone, with weights."""
    from vcpipe.schemas.config import PipelineConfig

    with Pipeline(PipelineConfig(shared.pipeline.config.checkpoint, stages=("perception",), device="cpu")) as pipeline:
        yield pipeline


def test_across_pipes_as_in_the_models_process(tiny: Pipeline) -> None:
    from vcpipe.actors.perception.actor import load
    from vcpipe.actors.stage import StageConfig

    checkpoint = tiny.config.checkpoint
    pcm, _ = soundfile.read(checkpoint.parents[1] / "golden" / "input.wav", dtype="float32")
    session = load(StageConfig("perception", checkpoint), lambda step, fraction: None).create_streaming_session()
    session.feed(pcm)
    session.close()
    expected: dict[int, str] = {}
    while not session.done:
        for delta in session.advance(4):
            expected[delta.frame_index] = expected.get(delta.frame_index, "") + delta.text
    for size in (159, 8000):
        with tiny.open_transcription() as remote:
            for start in range(0, pcm.size, size):
                remote.feed(pcm[start : start + size])
            remote.close()
            assert {delta.frame_index: delta.text for delta in remote.deltas()} == expected
            assert remote.frames == session.frames
