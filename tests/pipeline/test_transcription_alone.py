"""A live transcription on its own, without a pipeline: what it bounds, and what it makes of what comes back."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest
from live_audio import FIRST, FRAME, RATE, samples
from waiting import PATIENCE_S

from vcpipe.pipeline.clock import make_clock
from vcpipe.pipeline.session import SessionCommands
from vcpipe.pipeline.tracks import Delivery, FrameTiming
from vcpipe.pipeline.transcription import LiveTranscription, TranscriptionTrack
from vcpipe.pipeline.turn import Turn
from vcpipe.schemas.errors import FrameContractError, StageTimeoutError, VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry
from vcpipe.schemas.reports import StageTiming, Transcribed, Transcript
from vcpipe.schemas.streaming import TranscriptDelta


class Alone:
    """A transcription whose deliveries the test makes; nothing takes what it feeds."""

    def __init__(self, timeout_s: float = 0.05, tail_s: float = 0.0) -> None:
        self.deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.fed: list[np.ndarray] = []
        clock = make_clock("file", FrameGeometry().frame_ns)
        self.track = TranscriptionTrack("s", FrameGeometry(), ("perception",), 8, clock, self.deliveries.put)
        self.session = LiveTranscription(
            lambda: Turn("s", self.track, self.deliveries),
            SessionCommands(lambda call: call(), self),
            FrameGeometry(),
            FIRST,
            timeout_s,
            tail_s,
        )

    def feed(self, session: str, chunks: list[np.ndarray]) -> None:
        self.fed += chunks
        self.track.feed(chunks)

    def finish(self, session: str) -> None:
        pass

    def cancel(self, session: str) -> None:
        pass


def test_30_seconds_may_wait_and_nothing_of_more_is_taken() -> None:
    alone = Alone()
    with pytest.raises(BufferError, match=r"480001 more were fed; at most 480000 \(30 s\)"):
        alone.session.feed(np.zeros(30 * RATE + 1, np.float32))
    assert alone.fed == []
    alone.session.feed(np.zeros(30 * RATE, np.float32))
    with pytest.raises(BufferError, match="480000 samples wait and 1 more were fed"):
        alone.session.feed(np.zeros(1, np.float32))
    alone.session.feed(np.zeros(0, np.float32))
    alone.track.frames_done = 2  # what two messages brought is worked off
    alone.session.feed(np.zeros(FIRST + FRAME, np.float32))
    with pytest.raises(BufferError):
        alone.session.feed(np.zeros(1, np.float32))
    sizes = [chunk.size for chunk in alone.fed]
    assert sizes[0] == FIRST and set(sizes[1:]) == {FRAME}


@pytest.mark.parametrize("end", [False, True])
def test_what_does_not_come_back_is_bounded(end: bool) -> None:
    alone = Alone()
    alone.session.feed(samples(1))
    if end:
        alone.session.close()
    started = time.monotonic()
    with pytest.raises(StageTimeoutError, match=r"transcription s: nothing came within 0.05 s"):
        list(alone.session.deltas())
    assert time.monotonic() - started < PATIENCE_S


def test_silence_follows_what_was_fed_and_nothing_else() -> None:
    """A tail of 0.1 s is 1600 samples; messages are whole frames, but for the last."""
    heard, silent = Alone(tail_s=0.1), Alone(tail_s=0.1)
    heard.session.feed(np.ones(FIRST + 300, np.float32))
    for alone in (heard, silent):
        alone.session.close()
        alone.session.close()
    assert [len(chunk) for chunk in heard.fed] == [FIRST, 1280, 620]
    assert np.concatenate(heard.fed).sum() == FIRST + 300
    assert silent.fed == []


def test_what_is_recognised_after_the_end_was_said_in_the_last_frame() -> None:
    """2660 samples end within frame 3, and so do the times of what comes in the silence behind them."""
    alone = Alone(tail_s=0.64)
    alone.session.feed(np.zeros(2660, np.float32))
    alone.session.close()
    for frame in (2, 3, 9):
        alone.deliveries.put(Event("user_transcript_delta", frame, delta="x"))
    for frame in range(10):
        alone.deliveries.put(FrameTiming("s", frame, 0, 0))
    said = [(delta.frame_index, delta.start_s, delta.end_s) for delta in alone.session.poll()]
    assert said == [(2, 0.08, 0.16), (3, 0.16, 0.16625), (9, 0.16, 0.16625)]
    assert alone.session.heard_s == 0.16


def test_an_idle_consumer_waits_for_a_slow_producer_without_complaint() -> None:
    alone = Alone(timeout_s=0.001)
    found: list[TranscriptDelta] = []
    consumer = threading.Thread(target=lambda: found.extend(alone.session.deltas()))
    consumer.start()
    threading.Event().wait(0.15)
    alone.deliveries.put(Event("user_transcript_delta", 3, delta="hi"))
    alone.deliveries.put(Event("done", 4))
    consumer.join(PATIENCE_S)
    assert [delta.text for delta in found] == ["hi"] and alone.session.frames == 4


def test_the_error_that_ended_a_turn_is_raised_once() -> None:
    alone = Alone()
    alone.deliveries.put(VcpipeError("perception: no"))
    with pytest.raises(VcpipeError, match="perception: no"):
        alone.session.step()
    assert (alone.session.done, alone.session.step(), list(alone.session.deltas())) == (True, [], [])


def test_text_out_of_order_and_an_end_without_a_count_break_the_contract() -> None:
    track = Alone().track
    track.collect(3, Transcript("a"), 0)
    with pytest.raises(FrameContractError, match="text of encoder frame 3 after that of frame 3"):
        track.collect(3, Transcript("b"), 0)
    with pytest.raises(FrameContractError, match="without its number of encoder frames"):
        track.finish()
    with pytest.raises(FrameContractError, match="frame 0, which is not in flight"):
        track.collect(0, StageTiming("perception", 0, 1, 2, []), 0)
    track.collect(-1, Transcribed(9), 0)
    track.finish()


def test_many_turns_of_work_leave_nothing_behind() -> None:
    alone = Alone()
    for index in range(500):
        alone.session.feed(samples(1) if index == 0 else np.zeros(FRAME, np.float32))
        assert alone.track.next_message(0) is not None
        alone.track.collect(index, Transcript("x"), 0)
        alone.track.collect(index, StageTiming("perception", 0, 1, 2, []), 0)
        assert alone.session.step() == ["x"]
    assert alone.session._pending.size == alone.track.backlog == len(alone.track._frames) == 0
    assert alone.session.step() == [] and alone.deliveries.empty()


def test_a_poll_waits_for_the_first_text_only() -> None:
    alone = Alone(timeout_s=PATIENCE_S)
    alone.session.feed(samples(4))
    text = Event("user_transcript_delta", 3, delta="hi")
    assert alone.session.poll() == []
    threading.Timer(0.05, alone.deliveries.put, [text]).start()
    started = time.monotonic()
    assert alone.session.poll(2 * PATIENCE_S) == [TranscriptDelta.of_frame("hi", 3, 0.08)]
    assert time.monotonic() - started < PATIENCE_S
    assert alone.session.poll(0.01) == []


def test_what_was_heard_is_told_with_the_last_text_of_it() -> None:
    alone = Alone()
    alone.session.feed(samples(5))
    assert alone.session.heard_s == 0
    for frame in range(4):
        alone.deliveries.put(FrameTiming("s", frame, 0, 0))
    alone.deliveries.put(Event("user_transcript_delta", 4, delta="hi"))
    assert alone.session.heard_s == 0
    (delta,) = alone.session.poll()
    assert alone.session.heard_s == pytest.approx(0.24) and delta.start_s >= alone.session.heard_s


def test_texts_before_an_error_come_before_it() -> None:
    alone = Alone()
    alone.deliveries.put(Event("user_transcript_delta", 3, delta="hi"))
    alone.deliveries.put(VcpipeError("perception: no"))
    assert [delta.text for delta in alone.session.poll()] == ["hi"]
    with pytest.raises(VcpipeError, match="perception: no"):
        alone.session.poll()
    assert alone.session.done
