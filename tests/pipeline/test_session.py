"""A session as its user holds it, on a pipeline of fakes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vcpipe.pipeline.clock import make_clock
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.session import SessionCommands, VoiceChatSession
from vcpipe.pipeline.tracks import Delivery, FrameTiming, FrameTrack
from vcpipe.schemas.config import SessionOptions
from vcpipe.schemas.errors import (
    BacklogError,
    ContextLimitError,
    FrameContractError,
    PipelineClosedError,
    SessionClosedError,
    StageTimeoutError,
    VcpipeError,
)
from vcpipe.schemas.events import TERMINAL_KINDS, Event
from vcpipe.schemas.geometry import STAGES, FrameGeometry

FRAME = 1280


def silence(frames: float) -> np.ndarray:
    return np.zeros(round(frames * FRAME), np.float32)


def sparks(frames: int) -> np.ndarray:
    """Frame i sums up to i, so that the fakes' text ids are 100 + i."""
    pcm = silence(frames)
    pcm[::FRAME] = np.arange(frames)
    return pcm


def audio_frames(events: list[Event]) -> list[int]:
    return [event.frame_index for event in events if event.kind == "audio"]


def text_ids(events: list[Event]) -> list[int | None]:
    return [event.token_id for event in events if event.kind == "assistant_text_delta"]


def facts(events: list[Event]) -> list[Any]:
    """Everything about the events, comparable."""
    return [
        (event.to_json(), None if event.samples is None else (event.samples.dtype, event.samples.tobytes()))
        for event in events
    ]


def run(pipeline: Pipeline, pcm: np.ndarray, chunk: int | None = None, **fields: Any) -> list[Event]:
    """All events of a session that is given ``pcm`` in chunks."""
    size = chunk or max(len(pcm), 1)
    with pipeline.open_session(**fields) as session:
        events = [event for i in range(0, len(pcm), size) for event in session.push_audio(pcm[i : i + size])]
        return events + session.flush()


def wait_until(reached: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


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
    slow = " ".join(f"{stage}:sleep=0.02" for stage in STAGES)
    with pipeline.open_session(system_prompt=slow) as session:
        session.feed(silence(6))
        session.end()
        assert audio_frames(list(session.events())) == list(range(6))
    timings = [delivery for delivery in shared.heard_of(session.id) if isinstance(delivery, FrameTiming)]
    for before, after in zip(timings, timings[1:], strict=False):
        assert after.stages["perception"].started_ns < before.stages["codec"].finished_ns


def test_one_thread_may_feed_while_another_reads(pipeline: Pipeline) -> None:
    events: list[Event] = []
    with pipeline.open_session() as session:
        reader = threading.Thread(target=lambda: events.extend(session.events(timeout_s=10.0)))
        reader.start()
        for chunk in np.split(sparks(40), 64):
            session.feed(chunk)
        session.end()
        reader.join(10.0)
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


# -- ends


def _flush(session: VoiceChatSession) -> None:
    session.flush()


def _cancel(session: VoiceChatSession) -> None:
    session.cancel()


def _end(session: VoiceChatSession) -> None:
    session.end()


@pytest.mark.parametrize("end", [_flush, _cancel, _end])
def test_closed_session_rejects_push(pipeline: Pipeline, end: Callable[[VoiceChatSession], None]) -> None:
    with pipeline.open_session() as session:
        assert not session.closed
        end(session)
        assert session.closed
        for push in (session.push_audio, session.feed):
            with pytest.raises(SessionClosedError, match="is closed; open another one"):
                push(np.zeros(0))
            with pytest.raises(RuntimeError):
                push(silence(1))


def test_a_session_ends_once(pipeline: Pipeline) -> None:
    with pipeline.open_session() as flushed:
        flushed.push_audio(silence(2))
        assert flushed.flush() == [Event("done", 2)]
        assert (flushed.flush(), flushed.cancel(), list(flushed.events())) == ([], [], [])
    with pipeline.open_session() as cancelled:
        cancelled.push_audio(silence(2.5))
        assert cancelled.cancel() == [Event("cancelled", 2)]
        assert (cancelled.cancel(), cancelled.flush(), list(cancelled.events())) == ([], [], [])


@pytest.mark.parametrize("end_first", [False, True])
def test_cancel_with_frames_in_flight_gives_one_terminal_event_and_nothing_after(
    pipeline: Pipeline, end_first: bool
) -> None:
    with pipeline.open_session(system_prompt="tts:sleep=0.03") as session:
        session.feed(silence(30))
        if end_first:
            session.end()
        reading = session.events()
        while next(reading).kind != "audio":
            pass
        last = session.cancel()
        assert [event.kind for event in last] == ["cancelled"]
        assert 1 <= last[0].frame_index < 30
        assert list(reading) == []
        session.close()
        assert session.poll() == []


def test_nothing_of_a_cancelled_session_reaches_the_next(pipeline: Pipeline) -> None:
    session = pipeline.open_session(system_prompt="tts:sleep=0.1")
    session.feed(np.ones(8 * FRAME))
    session.cancel()
    assert set(text_ids(run(pipeline, silence(4)))) == {100}
    session.close()


def test_leaving_the_block_cancels_what_was_not_flushed(pipeline: Pipeline, shared: Any) -> None:
    with pytest.raises(ZeroDivisionError), pipeline.open_session() as session:
        session.push_audio(silence(2.5))
        raise ZeroDivisionError
    assert session.closed
    assert shared.heard_of(session.id)[-2:] == [Event("cancelled", 2), "ended"]


def test_leaving_the_block_after_flush_says_nothing_more(pipeline: Pipeline, shared: Any) -> None:
    with pipeline.open_session() as session:
        session.flush()
    assert shared.heard_of(session.id) == ["opened", Event("done", 0), "ended"]


# -- many sessions


def test_two_sessions_interleaved_are_as_if_alone(pipeline: Pipeline) -> None:
    loud, quiet = np.ones(20 * FRAME, np.float32), sparks(20)
    alone = [facts(run(pipeline, loud, seed=1)), facts(run(pipeline, quiet, seed=2))]
    a, b = pipeline.open_session(seed=1), pipeline.open_session(seed=2)
    events: tuple[list[Event], list[Event]] = [], []
    for i in range(0, 20 * FRAME, 1500):
        events[0].extend(a.push_audio(loud[i : i + 1500]))
        events[1].extend(b.push_audio(quiet[i : i + 1500]))
    events[1].extend(b.flush())
    events[0].extend(a.flush())
    assert [facts(events[0]), facts(events[1])] == alone
    a.close()
    b.close()


def test_a_slow_session_does_not_hold_up_the_ends_of_another(pipeline: Pipeline) -> None:
    with pipeline.open_session(clock="stepped") as waiting:
        waiting.feed(silence(5))
        assert run(pipeline, silence(3))[-1] == Event("done", 3)
        waiting.step(5)
        waiting.end()
        assert audio_frames(list(waiting.events())) == list(range(5))


# -- sessions that fail


@pytest.mark.parametrize(
    ("fault", "kind", "complaint"),
    [
        ("perception:fail@2", VcpipeError, "^perception: this frame cannot be$"),
        ("language:fail@0", VcpipeError, "^language: this frame cannot be$"),
        ("codec:fail@5", VcpipeError, "^codec: this frame cannot be$"),
        ("codec:short@4", FrameContractError, "codec returned 1763 samples for frame 4, expected 1764"),
        (
            "tts:mute@2",
            FrameContractError,
            "codec sent audio_frame for frame 3|codec reported frame 3, expected frame 2",
        ),
        ("tts:twice@3", FrameContractError, "codec .* frame 3"),
    ],
)
@pytest.mark.parametrize("method", ["push_audio", "stream"])
def test_a_session_that_fails_is_named_and_the_next_one_works(
    pipeline: Pipeline, method: str, fault: str, kind: type[VcpipeError], complaint: str
) -> None:
    with pipeline.open_session(system_prompt=fault) as session:
        with pytest.raises(kind, match=complaint) as caught:
            list(session.stream([silence(10)]) if method == "stream" else session.push_audio(silence(10)))
        assert session.closed
        with pytest.raises(SessionClosedError) as closed:
            session.push_audio(silence(1))
        assert closed.value.__cause__ is caught.value
        assert (session.flush(), session.cancel()) == ([], [])
    assert audio_frames(run(pipeline, silence(3))) == [0, 1, 2]


@pytest.mark.parametrize("stage", STAGES)
def test_a_refused_session_says_which_stage_and_why(pipeline: Pipeline, stage: str) -> None:
    with pytest.raises(VcpipeError, match=f"^{stage}: no such prompt; accepted: any other$"):
        pipeline.open_session(system_prompt=f"{stage}:refuse")
    assert run(pipeline, silence(1))[-1] == Event("done", 1)


def test_an_opening_that_is_interrupted_strands_nothing(
    pipeline: Pipeline, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a time limit, while a stage works on the prompt."""

    def interrupted(self: VoiceChatSession, timeout_s: float) -> None:
        raise KeyboardInterrupt

    already = len(shared.heard)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(VoiceChatSession, "wait_opened", interrupted)
        pipeline.open_session(system_prompt="tts:open=0.1")
    wait_until(lambda: "ended" in [delivery for _, delivery in shared.heard[already:]])


# -- on its own, without a pipeline


class Alone:
    """A session whose deliveries the test makes; ``asked`` holds the commands it gave."""

    def __init__(self, timeout_s: float = 0.05) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        clock = make_clock("file", FrameGeometry().frame_ns)
        self.track = FrameTrack("s", FrameGeometry(), STAGES, 8, clock, self.deliveries.put)
        commands = SessionCommands(lambda call: call(), self)
        self.session = VoiceChatSession(
            "s", SessionOptions(), FrameGeometry(), clock, self.track, self.deliveries, commands, timeout_s
        )

    def feed(self, session: str, frames: list[np.ndarray]) -> None:
        self.track.feed(frames)
        while self.track.next_message(0) is not None:
            pass

    def finish(self, session: str) -> None:
        self.asked.append(("finish",))

    def cancel(self, session: str) -> None:
        self.asked.append(("cancel",))


def test_a_push_whose_frame_does_not_come_back_is_bounded_and_says_who_is_behind() -> None:
    alone = Alone()
    with pytest.raises(
        StageTimeoutError, match="session s: no event within 0.05 s; frame 0 waits for perception, language"
    ):
        alone.session.push_audio(silence(1))


def test_an_end_that_nobody_confirms_is_bounded() -> None:
    alone = Alone()
    with pytest.raises(StageTimeoutError, match="no frame is in flight"):
        alone.session.flush()
    assert alone.asked == [("finish",)]
    with pytest.raises(StageTimeoutError):
        alone.session.close()


def test_the_error_that_ended_a_session_is_raised_once_and_then_kept() -> None:
    alone = Alone()
    error = VcpipeError("tts: no")
    alone.deliveries.put(error)
    alone.deliveries.put("ended")
    with pytest.raises(VcpipeError, match="tts: no"):
        next(alone.session.events())
    assert list(alone.session.events()) == []
    alone.session.close()
    assert alone.asked == []


# -- a closed pipeline


def test_a_closed_pipeline_ends_its_sessions_and_opens_no_more(start: Callable[..., Pipeline]) -> None:
    pipeline = start("perception")
    session = pipeline.open_session(clock="stepped")
    session.feed(silence(2))
    heard: list[BaseException] = []

    def read() -> None:
        try:
            list(session.events(timeout_s=10.0))
        except VcpipeError as error:
            heard.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    pipeline.close()
    reader.join(5.0)
    assert not reader.is_alive()
    assert [type(error) for error in heard] == [PipelineClosedError]
    with pytest.raises(PipelineClosedError, match="the pipeline is closed; start another one"):
        pipeline.open_session()
    pipeline.close()


def test_a_pipeline_of_perception_alone_transcribes(start: Callable[..., Pipeline]) -> None:
    with start("perception").open_session() as session:
        events = session.push_audio(silence(3)) + session.flush()
    assert [(event.kind, event.text) for event in events] == [
        ("user_transcript_delta", "w0"),
        ("user_transcript_delta", "w0 w2"),
        ("done", None),
    ]
