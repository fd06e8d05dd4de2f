"""Routes, credit, order and time: the coordinator driven by hand-made reports."""

from __future__ import annotations

import random

import numpy as np
import pytest
from rig import GEOMETRY, Rig, right_reports

from vcpipe.pipeline.clock import SteppedClock, WallClock, make_clock
from vcpipe.pipeline.tracks import MAX_UNREAD_FRAMES, FrameTiming, FrameTrack
from vcpipe.schemas.control import Cancel
from vcpipe.schemas.envelope import NO_FRAME
from vcpipe.schemas.geometry import STAGES
from vcpipe.schemas.messages import CloseSession, EndOfStream, OpenSession
from vcpipe.schemas.reports import AudioFrame, Opened, SessionFailed, StageTiming, Tokens

MS = 1_000_000


# -- routes


def test_a_session_goes_along_its_own_route() -> None:
    rig = Rig()
    rig.open("chat")
    deliver = rig.got.setdefault("short", []).append
    route = ("tts", "codec")
    track = FrameTrack("short", GEOMETRY, route, 8, make_clock("file", GEOMETRY.frame_ns), deliver)
    rig.coordinator.open("short", OpenSession(route=route), track, deliver)
    rig.feed(1, "short")
    (opening,) = rig.sent()
    assert (opening.pipe, opening.stages, opening.message.route) == ("data", ("tts",), route)
    rig.say(Opened("tts", 1.0), "short")
    assert rig.sent() == []
    rig.say(Opened("codec", 1.0), "short")
    rig.feed(1, "chat")
    assert {out.session: out.stages for out in rig.sent()} == {"short": ("tts",), "chat": ("perception",)}
    for stage in route:
        rig.step(stage, 0, "short")
    assert [event.kind for event in rig.events("short")] == ["audio"]
    rig.coordinator.finish("short")
    (end,) = rig.sent()
    assert (end.stages, end.message) == (("tts",), EndOfStream())
    rig.end(1, "short", route)
    assert rig.got["short"][-1] == "ended" and rig.coordinator.sessions == 1


def test_a_cancel_goes_to_the_stages_of_the_route_alone() -> None:
    rig = Rig()
    deliver = rig.got.setdefault("s", []).append
    track = FrameTrack("s", GEOMETRY, ("perception",), 8, make_clock("file", GEOMETRY.frame_ns), deliver)
    rig.coordinator.open("s", OpenSession(route=("perception",)), track, deliver)
    rig.say(Opened("perception", 1.0))
    rig.sent()
    rig.coordinator.cancel("s")
    assert [(out.pipe, out.stages) for out in rig.sent()] == [("control", ("perception",)), ("data", ("perception",))]
    rig.end(0, stages=("perception",))
    assert rig.got["s"][-1] == "ended"


# -- opening


def test_nothing_leaves_before_every_stage_has_the_session() -> None:
    rig = Rig()
    rig.request()
    rig.feed(2)
    (opening,) = rig.sent()
    assert (opening.pipe, opening.message, opening.frame_index) == ("data", OpenSession(), NO_FRAME)
    for stage in STAGES[:-1]:
        rig.say(Opened(stage, 1.0))
        assert rig.sent() == []
    rig.say(Opened(STAGES[-1], 1.0))
    assert rig.got["s"] == ["opened"]
    assert rig.sent_frames() == [0, 1]


def test_a_refused_session_is_closed_in_every_stage() -> None:
    rig = Rig()
    rig.request()
    rig.say(Opened("perception", 1.0))
    rig.say(SessionFailed("language", "prompt too long; accepted: 100 ids"))
    assert str(rig.error()) == "language: prompt too long; accepted: 100 ids"
    assert [type(out.message) for out in rig.sent()] == [OpenSession, Cancel, CloseSession]
    rig.end(0)
    assert rig.got["s"][-1] == "ended"
    assert rig.coordinator.sessions == 0


# -- credit and time


@pytest.mark.parametrize("window", [1, 3, 8])
def test_never_more_than_the_window_in_flight(window: int) -> None:
    rig = Rig()
    rig.open(window=window)
    rig.feed(20)
    assert rig.sent_frames() == list(range(window))
    for frame in range(20):
        for stage in STAGES:
            assert rig.sent_frames() == []
            rig.step(stage, frame)
        assert rig.sent_frames() == [frame + window][: 20 - window - frame]


@pytest.mark.parametrize("seed", range(20))
def test_release_is_in_order_whatever_order_the_stages_report_in(seed: int) -> None:
    """The reports of different stages arrive in any interleaving; credit holds all the while."""
    rng = random.Random(seed)
    rig = Rig()
    track = rig.open(window=4)
    rig.feed(30)
    sent = len(rig.sent_frames())
    queues = {stage: [(f, r) for f in range(30) for r in right_reports(stage, f)] for stage in STAGES}
    while any(queues.values()):
        stage = rng.choice([stage for stage, queue in queues.items() if queue and queue[0][0] < sent])
        frame, report = queues[stage].pop(0)
        rig.say(report, frame=frame)
        sent += len(rig.sent_frames())
        assert sent - track.frames_done <= 4
    expected = [
        (frame, kind)
        for frame in range(30)
        for kind in (["user_transcript_delta"] if frame % 2 == 0 else [])
        + ["assistant_text_delta", "function_delta", "audio"]
    ]
    assert [(event.frame_index, event.kind) for event in rig.events()] == expected
    timings = [delivery for delivery in rig.got["s"] if isinstance(delivery, FrameTiming)]
    assert [timing.frame_index for timing in timings] == list(range(30))
    assert all(set(timing.stages) == set(STAGES) for timing in timings)


def test_the_codec_may_be_done_before_the_transcript_of_the_same_frame() -> None:
    rig = Rig()
    rig.open()
    rig.feed(1)
    rig.sent()
    for stage in ("language", "tts", "codec"):
        rig.step(stage, 0)
    assert rig.events() == []
    rig.step("perception", 0)
    assert [event.kind for event in rig.events()] == [
        "user_transcript_delta",
        "assistant_text_delta",
        "function_delta",
        "audio",
    ]


def test_texts_are_cumulative_and_edits_replace_their_end() -> None:
    rig = Rig()
    rig.open()
    rig.feed(3)
    rig.sent()
    tokens = [
        Tokens(5, 12, "caf", 0, "caf"),
        Tokens(6, 12, "\ufffd", 0, "\ufffd"),
        Tokens(7, 20, "é", 1, "é", "[", 0, "["),
    ]
    for frame, report in enumerate(tokens):
        rig.step("perception", frame)
        rig.say(report, frame=frame)
        rig.say(StageTiming("language", 0, 1, 2, []), frame=frame)
        rig.step("tts", frame)
        rig.step("codec", frame)
    seen = [(e.kind, e.token_id, e.delta, e.text) for e in rig.events() if e.token_id is not None]
    assert seen == [
        ("assistant_text_delta", 5, "caf", "caf"),
        ("assistant_text_delta", 6, "\ufffd", "caf\ufffd"),
        ("assistant_text_delta", 7, "é", "café"),
        ("function_delta", 20, "[", "["),
    ]


def test_events_own_their_arrays() -> None:
    """What the codec reported lies in a received buffer that is about to go."""
    rig = Rig()
    rig.open()
    rig.feed(1)
    rig.sent()
    samples, codes = np.ones(1764, np.float32), np.ones(31, np.int32)
    for stage in STAGES[:-1]:
        rig.step(stage, 0)
    rig.say(AudioFrame(samples, codes), frame=0)
    rig.say(StageTiming("codec", 0, 1, 2, []), frame=0)
    samples[:], codes[:] = 7, 7
    audio = rig.events()[-1]
    assert audio.samples is not None and audio.audio_codes is not None
    assert (audio.samples.max(), audio.audio_codes.max()) == (1, 1)


def test_wall_clock_sends_a_frame_every_80_ms() -> None:
    rig = Rig()
    rig.open(clock=WallClock(GEOMETRY.frame_ns))
    rig.feed(10)
    rig.now_ns = 1000 * MS
    assert rig.sent_frames() == [0]
    assert rig.coordinator.pump(rig.now_ns) == 1080 * MS
    rig.now_ns = 1080 * MS - 1
    assert rig.sent_frames() == []
    rig.now_ns = 1080 * MS
    assert rig.sent_frames() == [1]


def test_a_late_wall_clock_catches_up_to_its_absolute_deadlines() -> None:
    rig = Rig()
    rig.open(clock=WallClock(GEOMETRY.frame_ns))
    rig.feed(10)
    assert rig.sent_frames() == [0]
    rig.now_ns = 250 * MS
    assert rig.sent_frames() == [1, 2, 3]
    assert rig.coordinator.pump(rig.now_ns) == 320 * MS
    for frame in range(4):
        rig.step_all(frame)
    timings = [delivery for delivery in rig.got["s"] if isinstance(delivery, FrameTiming)]
    assert [timing.due_ns for timing in timings] == [0, 80 * MS, 160 * MS, 240 * MS]


def test_the_wall_clock_waits_for_credit_too() -> None:
    rig = Rig()
    rig.open(clock=WallClock(GEOMETRY.frame_ns), window=2)
    rig.feed(10)
    rig.now_ns = 1
    assert rig.sent_frames() == [0]
    rig.now_ns = 800 * MS
    assert rig.sent_frames() == [1]
    assert rig.coordinator.pump(rig.now_ns) is None


def test_stepped_clock_sends_what_it_was_allowed() -> None:
    rig = Rig()
    clock = SteppedClock()
    rig.open(clock=clock)
    rig.feed(5)
    assert rig.sent_frames() == []
    clock.allow(2)
    assert rig.sent_frames() == [0, 1]


def test_a_reader_that_does_not_read_stops_its_own_session_only() -> None:
    rig = Rig()
    track = rig.open("deaf")
    rig.open("good")
    rig.feed(MAX_UNREAD_FRAMES + 10, "deaf")
    sent: list[int] = []
    while frames := rig.sent_frames():
        sent += frames
        for frame in frames:
            rig.step_all(frame, "deaf")
    assert sent == list(range(len(sent)))
    assert MAX_UNREAD_FRAMES <= len(sent) < MAX_UNREAD_FRAMES + 8
    wake_ns = rig.coordinator.pump(rig.now_ns)
    assert wake_ns is not None and 0 < wake_ns - rig.now_ns <= 100 * MS
    rig.feed(1, "good")
    assert rig.sent_frames() == [0]
    track.frames_taken = 8
    assert rig.sent_frames()[0] == len(sent)


def test_a_session_may_not_starve_another_of_its_credit() -> None:
    rig = Rig()
    rig.open("a", window=2)
    rig.open("b", window=2)
    rig.feed(5, "a")
    rig.feed(5, "b")
    assert [(out.session, out.frame_index) for out in rig.sent()] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
