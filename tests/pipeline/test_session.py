"""A session as its user holds it, on a pipeline of fakes: audio in, events out."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from sessions import FRAME, audio_frames, facts, run, silence, sparks, text_ids
from waiting import PATIENCE_S, wait_until

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.schemas.errors import (
    BacklogError,
    ContextLimitError,
)
from vcpipe.schemas.events import TERMINAL_KINDS, Event

# -- chunks and frames


def test_push_audio_buffers_arbitrary_chunk_boundaries(pipeline: Pipeline) -> None:
    with pipeline.open_session() as session:
        pushed = [audio_frames(session.push_audio(np.zeros(n))) for n in (300, 1000, 1280, 2000)]
        flushed = session.flush(pad_partial=True)
    assert pushed == [[], [0], [1], [2]]
    assert audio_frames(flushed) == [3]
    assert flushed[-1] == Event("done", 4)


def test_flush_without_padding_drops_partial_frame(pipeline: Pipeline) -> None:
    with pipeline.open_session() as session:
        assert audio_frames(session.push_audio(silence(1.5))) == [0]
        assert session.flush(pad_partial=False) == [Event("done", 1)]


def test_a_partial_frame_is_padded_with_zeros(pipeline: Pipeline) -> None:
    tail = np.full(500, 0.5, np.float32)
    padded = np.concatenate([tail, np.zeros(780, np.float32)])
    assert facts(run(pipeline, tail)) == facts(run(pipeline, padded))


@pytest.mark.parametrize("chunk", [1, 159, 1280, 8000])
def test_results_do_not_depend_on_the_chunking(pipeline: Pipeline, chunk: int) -> None:
    """Half a second: six frames and a quarter, the last one padded."""
    pcm = np.random.default_rng(0).integers(-3, 4, 8000).astype(np.float32)
    whole = run(pipeline, pcm, seed=5)
    assert audio_frames(whole) == list(range(7))
    assert facts(run(pipeline, pcm, chunk, seed=5)) == facts(whole)


def test_nothing_in_nothing_out(pipeline: Pipeline) -> None:
    with pipeline.open_session() as session:
        assert session.push_audio([]) == []
        assert session.push_audio(np.zeros((0, 1))) == []
        assert session.flush() == [Event("done", 0)]


def test_events_of_a_frame_and_their_fields(pipeline: Pipeline) -> None:
    events = run(pipeline, sparks(3), seed=7)
    assert [(event.frame_index, event.kind) for event in events] == [
        (0, "user_transcript_delta"),
        (0, "assistant_text_delta"),
        (0, "audio"),
        (1, "assistant_text_delta"),
        (1, "audio"),
        (2, "user_transcript_delta"),
        (2, "assistant_text_delta"),
        (2, "audio"),
        (3, "done"),
    ]
    transcript, text, audio = events[5:8]
    assert (transcript.delta, transcript.text) == (" w2", "w0 w2")
    assert (text.token_id, text.delta, text.text) == (102, "<102>", "<100><101><102>")
    assert audio.samples is not None and audio.audio_codes is not None
    assert (audio.samples.shape, audio.samples.dtype, audio.sample_rate) == ((1764,), np.float32, 22050)
    np.testing.assert_array_equal(audio.audio_codes, np.full(31, 109, np.int32))
    assert audio.audio_codes.dtype == np.int32


def test_one_audio_event_a_frame_always(pipeline: Pipeline) -> None:
    """500 frames through every window and buffer; then the next session is as good."""
    for frames in (500, 3):
        events = run(pipeline, silence(frames))
        assert audio_frames(events) == list(range(frames))
        assert events[-1] == Event("done", frames)


# -- input that is refused


@pytest.mark.parametrize(
    ("samples", "rate", "complaint"),
    [
        (np.zeros(FRAME), 24000, "sample_rate must be 16000 Hz, not 24000; resample first"),
        (np.zeros(FRAME), -1, "not -1"),
        (np.zeros((FRAME, 2)), None, r"samples must be mono, \(n,\) or \(n, 1\), not of shape \(1280, 2\)"),
        (np.zeros((1, FRAME, 1)), None, r"not of shape \(1, 1280, 1\)"),
        (np.float32(0.5), None, r"not of shape \(\)"),
        (np.array([0.0, 1.0, np.nan]), None, "samples must be finite; sample 2 is not"),
        (np.array([0.0, -np.inf]), None, "sample 1 is not"),
        (["a", "b"], None, "could not convert"),
    ],
)
@pytest.mark.parametrize("method", ["push_audio", "feed"])
def test_bad_input_is_refused_and_the_session_goes_on(
    pipeline: Pipeline, method: str, samples: Any, rate: int | None, complaint: str
) -> None:
    with pipeline.open_session() as session:
        session.push_audio(np.zeros(100))
        with pytest.raises(ValueError, match=complaint):
            getattr(session, method)(samples, rate)
        assert audio_frames(session.push_audio(np.zeros(1180), 16000)) == [0]


@pytest.mark.parametrize("shape", [(FRAME, 1), (1, FRAME)])
def test_a_second_axis_of_one_is_taken(pipeline: Pipeline, shape: tuple[int, int]) -> None:
    with pipeline.open_session() as session:
        assert audio_frames(session.push_audio(np.zeros(shape, np.float64))) == [0]


def test_the_callers_array_may_change_after_the_call(pipeline: Pipeline) -> None:
    pcm = np.ones(FRAME, np.float32)
    with pipeline.open_session(clock="stepped") as session:
        session.feed(pcm)
        pcm[:] = 0
        session.step()
        session.end()
        assert text_ids(list(session.events())) == [100 + FRAME]


def test_bad_options_open_nothing(pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match="max_streaming_seconds"):
        pipeline.open_session(max_streaming_seconds=-1.0)
    with pytest.raises(TypeError):
        pipeline.open_session(temperature=1.0)


# -- the limit


def test_the_limit_ends_the_input_but_not_the_session(pipeline: Pipeline) -> None:
    """2.32 s are 28 frames, not 29: the error carries the events of the same push."""
    with pipeline.open_session(max_streaming_seconds=2.32) as session:
        assert audio_frames(session.push_audio(silence(20))) == list(range(20))
        with pytest.raises(ContextLimitError, match=r"limited to 2.32 s \(28 frames\)") as caught:
            session.push_audio(silence(20.5))
        assert audio_frames(caught.value.events) == list(range(20, 28))
        with pytest.raises(ContextLimitError) as again:
            session.push_audio(silence(1))
        assert again.value.events == []
        assert session.flush() == [Event("done", 28)]


def test_the_limit_is_reached_without_an_error(pipeline: Pipeline) -> None:
    with pipeline.open_session(max_streaming_seconds=0.4) as session:
        assert audio_frames(session.push_audio(silence(5))) == list(range(5))
        assert session.flush() == [Event("done", 5)]


def test_a_padded_frame_counts_against_the_limit(pipeline: Pipeline) -> None:
    with pipeline.open_session(max_streaming_seconds=0.4) as session:
        session.push_audio(silence(5.5))
        with pytest.raises(ContextLimitError):
            session.flush()
        assert session.flush() == [Event("done", 5)]


def test_feed_past_the_limit_keeps_what_was_within(pipeline: Pipeline) -> None:
    with pipeline.open_session(max_streaming_seconds=0.4) as session:
        with pytest.raises(ContextLimitError):
            session.feed(silence(8))
        session.end()
        events = list(session.events())
    assert audio_frames(events) == list(range(5))
    assert events[-1] == Event("done", 5)


def test_stream_past_the_limit_gives_all_frames_first(pipeline: Pipeline) -> None:
    seen: list[Event] = []
    with pipeline.open_session(max_streaming_seconds=4.0) as session:
        with pytest.raises(ContextLimitError):
            seen.extend(session.stream([silence(7.3)] * 10))
        seen += session.flush()
    assert audio_frames(seen) == list(range(50))
    assert [event.kind for event in seen if event.kind in TERMINAL_KINDS] == ["done"]


# -- feed and events


def test_stream_equals_push(pipeline: Pipeline) -> None:
    pcm = sparks(60)
    chunks = np.split(pcm, [5, 700, 30_000, 70_001])
    with pipeline.open_session(seed=3) as session:
        streamed = list(session.stream(chunks))
    assert facts(streamed) == facts(run(pipeline, pcm, seed=3))


def test_consecutive_frames_overlap_in_the_stages(pipeline: Pipeline, shared: Any) -> None:
    """Perception steps frame t+1 before the codec is done with frame t, and events come before all is fed."""
    with pipeline.open_session(system_prompt="codec:sleep=0.15") as session:
        session.feed(silence(6))
        session.end()
        assert audio_frames(list(session.events())) == list(range(6))
    timings = [delivery for delivery in shared.heard_of(session.id) if isinstance(delivery, FrameTiming)]
    overlaps = [
        after.stages["perception"].started_ns < before.stages["codec"].finished_ns
        for before, after in zip(timings, timings[1:], strict=False)
    ]
    # A process that had to wait for a processor may have missed one.
    assert len(overlaps) == 5 and sum(overlaps) >= 3


def test_one_thread_may_feed_while_another_reads(pipeline: Pipeline) -> None:
    events: list[Event] = []
    with pipeline.open_session() as session:
        reader = threading.Thread(target=lambda: events.extend(session.events(timeout_s=PATIENCE_S)))
        reader.start()
        for chunk in np.split(sparks(40), 64):
            session.feed(chunk)
        session.end()
        reader.join(PATIENCE_S)
        assert not reader.is_alive()
    assert text_ids(events) == [100 + frame for frame in range(40)]
    assert events[-1] == Event("done", 40)


def test_poll_gives_what_is_there_and_never_waits(pipeline: Pipeline) -> None:
    with pipeline.open_session(clock="stepped") as session:
        session.feed(silence(3))
        assert session.poll() == []
        session.step(2)
        events: list[Event] = []
        wait_until(lambda: events.extend(session.poll()) or session.frames_done == 2)  # type: ignore[func-returns-value]
        assert audio_frames(events) == [0, 1]
        assert (session.frames_fed, session.frames_done) == (3, 2)


def test_only_a_stepped_clock_can_be_stepped(pipeline: Pipeline) -> None:
    with pipeline.open_session() as session, pytest.raises(ValueError, match="clock='stepped'"):
        session.step()


def test_the_wall_clock_keeps_real_time(pipeline: Pipeline, shared: Any) -> None:
    with pipeline.open_session(clock="wall", profile=True) as session:
        session.push_audio(silence(4))
        assert session.profiler is not None and session.profiler.frames == 4
    timings = [delivery for delivery in shared.heard_of(session.id) if isinstance(delivery, FrameTiming)]
    assert [timing.due_ns - timings[0].due_ns for timing in timings] == [index * 80_000_000 for index in range(4)]
    assert all(timing.sent_ns >= timing.due_ns for timing in timings)


def test_more_than_30_s_may_not_wait_and_nothing_of_the_chunk_is_taken(pipeline: Pipeline) -> None:
    with pipeline.open_session(clock="stepped") as session:
        session.feed(silence(375.5))
        with pytest.raises(BacklogError, match=r"375 frames wait and 1 more .* \(375 frames\) may wait. Nothing"):
            session.feed(silence(0.5))
        assert session.frames_fed == 375
        session.step(1)
        # Its events and the word that it is done may come in two polls.
        wait_until(lambda: (session.poll(), session.frames_done == 1)[1])
        session.feed(silence(0.5))
        assert session.frames_fed == 376
        assert session.cancel() == [Event("cancelled", 1)]
