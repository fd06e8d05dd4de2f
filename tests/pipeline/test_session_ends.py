"""How a session ends, and how it fails, on a pipeline of fakes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sessions import FRAME, audio_frames, facts, run, silence, sparks, text_ids
from waiting import PATIENCE_S, wait_until

from vcpipe.pipeline.clock import make_clock
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.session import SessionCommands, VoiceChatSession
from vcpipe.pipeline.tracks import Delivery, FrameTrack
from vcpipe.schemas.config import SessionOptions
from vcpipe.schemas.errors import (
    FrameContractError,
    PipelineClosedError,
    SessionClosedError,
    StageTimeoutError,
    VcpipeError,
)
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import STAGES, FrameGeometry

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
        session.feed(silence(300))
        if end_first:
            session.end()
        reading = session.events()
        while next(reading).kind != "audio":
            pass
        last = session.cancel()
        assert [event.kind for event in last] == ["cancelled"]
        assert 1 <= last[0].frame_index < 300
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
    assert shared.all_heard_of(session.id)[-2:] == [Event("cancelled", 2), "ended"]


def test_leaving_the_block_after_flush_says_nothing_more(pipeline: Pipeline, shared: Any) -> None:
    with pipeline.open_session() as session:
        session.flush()
    assert shared.all_heard_of(session.id) == ["opened", Event("done", 0), "ended"]


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


def test_the_error_of_a_lost_pipeline_is_not_raised_again_by_the_close() -> None:
    """Whoever feeds may hear of it before it is delivered."""
    alone = Alone()
    error = VcpipeError("tts: no")

    def lost(session: str, *more: Any) -> None:
        raise error

    alone.feed = alone.cancel = lost  # type: ignore[method-assign]
    with pytest.raises(VcpipeError, match="tts: no"):
        alone.session.push_audio(silence(1))
    alone.session.close()
    alone.deliveries.put(error)
    with pytest.raises(VcpipeError, match="tts: no"):
        next(alone.session.events())


# -- a closed pipeline


def test_a_closed_pipeline_ends_its_sessions_and_opens_no_more(start: Callable[..., Pipeline]) -> None:
    pipeline = start("perception")
    session = pipeline.open_session(clock="stepped")
    session.feed(silence(2))
    heard: list[BaseException] = []

    def read() -> None:
        try:
            list(session.events(timeout_s=PATIENCE_S))
        except VcpipeError as error:
            heard.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    pipeline.close()
    reader.join(PATIENCE_S)
    assert not reader.is_alive()
    assert [type(error) for error in heard] == [PipelineClosedError]
    with pytest.raises(PipelineClosedError, match="the pipeline is closed; start another one"):
        pipeline.open_session()
    pipeline.close()


def test_a_close_that_is_quicker_than_the_coordinator_ends_the_sessions_too(
    start: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = start("perception")
    session = pipeline.open_session()
    runtime, held = pipeline._runtime, threading.Event()

    def hold() -> None:
        held.set()
        wait_until(lambda: runtime._finished)

    monkeypatch.setattr(runtime, "_turn", hold)
    pipeline._submit(lambda: None)
    assert held.wait(PATIENCE_S)
    pipeline.close(graceful_s=0.0)
    with pytest.raises(PipelineClosedError):
        list(session.events(PATIENCE_S))


def test_a_pipeline_of_perception_alone_transcribes(start: Callable[..., Pipeline]) -> None:
    with start("perception").open_session() as session:
        events = session.push_audio(silence(3)) + session.flush()
    assert [(event.kind, event.text) for event in events] == [
        ("user_transcript_delta", "w0"),
        ("user_transcript_delta", "w0 w2"),
        ("done", None),
    ]
