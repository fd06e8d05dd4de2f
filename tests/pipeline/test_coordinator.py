"""Credit, order, contract and epochs: the coordinator driven by hand-made reports, without processes and in its own time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from vcpipe.pipeline.clock import FrameClock, SteppedClock, WallClock, make_clock
from vcpipe.pipeline.coordinator import Coordinator, Outgoing
from vcpipe.pipeline.tracks import MAX_UNREAD_FRAMES, Delivery, FrameTiming, FrameTrack, OfflineResult, OfflineTrack
from vcpipe.schemas.control import Cancel
from vcpipe.schemas.envelope import NO_FRAME, Header
from vcpipe.schemas.errors import ActorDiedError, FrameContractError, VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import STAGES, FrameGeometry
from vcpipe.schemas.messages import CloseSession, EndOfStream, OpenSession, PcmFrame
from vcpipe.schemas.reports import AudioFrame, Opened, SessionFailed, StageEnded, StageTiming, Tokens, Transcript

GEOMETRY = FrameGeometry()
MS = 1_000_000


class Rig:
    """One coordinator over the four stages; sessions by name, what they were given in ``got``."""

    def __init__(self) -> None:
        self.coordinator = Coordinator()
        self.got: dict[str, list[Delivery]] = {}
        self.now_ns = 0

    def open(self, session: str = "s", *, clock: FrameClock | None = None, window: int = 8) -> FrameTrack:
        """A session that every stage has opened."""
        track = self.request(session, clock=clock, window=window)
        for stage in STAGES:
            self.say(Opened(stage, 1.0), session)
        self.sent()
        return track

    def request(self, session: str = "s", *, clock: FrameClock | None = None, window: int = 8) -> FrameTrack:
        deliver = self.got.setdefault(session, []).append
        clock = make_clock("file", GEOMETRY.frame_ns) if clock is None else clock
        track = FrameTrack(session, GEOMETRY, STAGES, window, clock, deliver)
        self.coordinator.open(session, OpenSession(), track, deliver)
        return track

    def feed(self, frames: int, session: str = "s") -> None:
        self.coordinator.feed(session, [np.full(1280, i, np.float32) for i in range(frames)])

    def sent(self) -> list[Outgoing]:
        """Everything that leaves now."""
        self.coordinator.pump(self.now_ns)
        sent = list(self.coordinator.outgoing)
        self.coordinator.outgoing.clear()
        return sent

    def sent_frames(self) -> list[int]:
        return [out.frame_index for out in self.sent() if isinstance(out.message, PcmFrame)]

    def say(self, report: Any, session: str = "s", frame: int = NO_FRAME, epoch: int = 0) -> None:
        self.coordinator.handle(Header(session, epoch, frame, 0, 0), report, self.now_ns)

    def step(self, stage: str, frame: int, session: str = "s", epoch: int = 0) -> None:
        """The stage does a frame as it should."""
        for report in right_reports(stage, frame):
            self.say(report, session, frame, epoch)

    def step_all(self, frame: int, session: str = "s") -> None:
        for stage in STAGES:
            self.step(stage, frame, session)

    def end(self, frames: int, session: str = "s", stages: tuple[str, ...] = STAGES) -> None:
        for stage in stages:
            self.say(StageEnded(stage, frames), session)

    def events(self, session: str = "s") -> list[Event]:
        return [delivery for delivery in self.got[session] if isinstance(delivery, Event)]

    def error(self, session: str = "s") -> VcpipeError:
        """The one error that the session was given."""
        (error,) = [delivery for delivery in self.got[session] if isinstance(delivery, VcpipeError)]
        return error


def right_reports(stage: str, frame: int) -> list[Any]:
    reports: list[Any] = [StageTiming(stage, 0, 1, 2, [])]
    if stage == "perception" and frame % 2 == 0:
        reports.insert(0, Transcript(f" w{frame}"))
    if stage == "language":
        reports.insert(0, Tokens(frame, 9, "t", 0, "t", "f", 0, "f"))
    if stage == "codec":
        reports.insert(0, AudioFrame(np.full(1764, frame, np.float32), np.full(31, frame, np.int32)))
    return reports


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


# -- the frame contract


def _break(frame: int, stage: str, *reports: Any) -> str:
    """Right frames up to ``frame``, in which ``stage`` says ``reports`` instead; returns the session's error."""
    rig = Rig()
    rig.open()
    rig.feed(8)
    rig.sent()
    for before in range(frame):
        rig.step_all(before)
    for upstream in STAGES[: STAGES.index(stage)]:
        rig.step(upstream, frame)
    for index, report in reports:
        rig.say(report, frame=index)
    error = rig.error()
    assert isinstance(error, FrameContractError)
    assert {event.frame_index for event in rig.events()} == set(range(frame))
    assert [type(out.message) for out in rig.sent()] == [Cancel, CloseSession]
    rig.end(frame)
    assert rig.got["s"][-1] == "ended"
    return str(error)


DONE = {stage: StageTiming(stage, 0, 1, 2, []) for stage in STAGES}
GOOD_AUDIO = AudioFrame(np.zeros(1764, np.float32), np.zeros(31, np.int32))


def test_missing_audio_is_a_breach() -> None:
    error = _break(4, "codec", (4, DONE["codec"]))
    assert error == "codec returned no samples for frame 4, expected 1764"


def test_a_missing_sample_is_a_breach() -> None:
    short = AudioFrame(np.zeros(1763, np.float32), np.zeros(31, np.int32))
    assert _break(2, "codec", (2, short)) == "codec returned 1763 samples for frame 2, expected 1764"


def test_a_missing_code_is_a_breach() -> None:
    short = AudioFrame(np.zeros(1764, np.float32), np.zeros(30, np.int32))
    assert _break(2, "codec", (2, short)) == "codec returned 30 codes for frame 2, expected 31"


def test_missing_ids_are_a_breach() -> None:
    assert _break(0, "language", (0, DONE["language"])) == "language returned no ids for frame 0, expected 2"


def test_a_skipped_frame_is_a_breach() -> None:
    assert _break(3, "tts", (4, DONE["tts"])) == "tts reported frame 4, expected frame 3"


def test_a_frame_reported_twice_is_a_breach() -> None:
    assert _break(3, "tts", (3, DONE["tts"]), (3, DONE["tts"])) == "tts reported frame 3, expected frame 4"


def test_audio_of_one_frame_given_twice_is_a_breach() -> None:
    error = _break(3, "codec", (3, GOOD_AUDIO), (3, GOOD_AUDIO))
    assert error == "codec returned audio_frame of frame 3 twice"


@pytest.mark.parametrize(
    ("stage", "report"),
    [("perception", Transcript("x")), ("language", Tokens(1, 2)), ("tts", DONE["tts"]), ("codec", GOOD_AUDIO)],
)
@pytest.mark.parametrize("frame", [1, 40])
def test_a_report_of_a_frame_that_is_not_in_flight_is_a_breach(stage: str, report: Any, frame: int) -> None:
    """Frame 1 has left, frame 40 was never sent."""
    error = _break(2, stage, (frame, report))
    assert error == f"{stage} sent {report.KIND} for frame {frame}, which is not in flight"


def _finish(rig: Rig, frames: int) -> None:
    rig.open()
    rig.feed(frames)
    rig.coordinator.finish("s")
    sent = rig.sent()
    assert [type(out.message) for out in sent] == [PcmFrame] * frames + [EndOfStream]


def test_done_comes_when_every_stage_stepped_every_frame() -> None:
    rig = Rig()
    _finish(rig, 3)
    for frame in range(3):
        rig.step_all(frame)
    rig.end(3, stages=STAGES[:-1])
    assert rig.events()[-1].kind == "audio"
    rig.end(3, stages=STAGES[-1:])
    assert rig.got["s"][-2:] == [Event("done", 3), "ended"]
    assert rig.coordinator.sessions == 0


def test_a_stage_that_stepped_fewer_frames_is_named_at_the_end() -> None:
    rig = Rig()
    _finish(rig, 3)
    for frame in range(3):
        rig.step_all(frame)
    rig.end(3, stages=("perception", "language"))
    rig.end(2, stages=("tts",))
    assert str(rig.error()) == "tts stepped 2 frames, expected 3"
    rig.end(3, stages=("codec",))
    assert rig.got["s"][-1] == "ended"
    assert [event.kind for event in rig.events() if event.kind == "done"] == []


def test_an_end_without_the_last_frames_is_a_breach() -> None:
    rig = Rig()
    _finish(rig, 3)
    rig.step_all(0)
    rig.end(3)
    assert str(rig.error()) == "1 frames came out, expected 3"
    assert rig.got["s"][-1] == "ended"


def test_the_end_waits_for_the_backlog() -> None:
    rig = Rig()
    rig.open(window=2)
    rig.feed(3)
    rig.coordinator.finish("s")
    assert rig.sent_frames() == [0, 1]
    rig.step_all(0)
    assert [type(out.message) for out in rig.sent()] == [PcmFrame, EndOfStream]
    rig.feed(1)
    assert rig.sent() == []


# -- cancel, failure, late reports


def test_cancel_raises_the_epoch_and_drops_what_was_queued() -> None:
    rig = Rig()
    rig.open(window=2)
    rig.feed(10)
    rig.sent()
    rig.step_all(0)
    rig.coordinator.cancel("s")
    assert rig.got["s"][-1] == Event("cancelled", 1)
    cancel, close = rig.sent()
    assert (cancel.pipe, cancel.message, cancel.epoch) == ("control", Cancel(), 1)
    assert (close.pipe, close.message, close.epoch) == ("data", CloseSession(), 1)


def test_late_reports_of_a_cancelled_session_are_counted_and_dropped() -> None:
    rig = Rig()
    rig.open()
    rig.feed(4)
    rig.sent()
    rig.step_all(0)
    rig.coordinator.cancel("s")
    before = list(rig.got["s"])
    rig.step_all(1)
    assert rig.got["s"] == before
    assert rig.coordinator.late_reports == 6
    rig.say(SessionFailed("tts", "too late"))
    assert rig.got["s"] == before
    rig.end(2)
    assert rig.got["s"] == [*before, "ended"]
    rig.step("codec", 2)
    assert rig.coordinator.late_reports == 9


def test_the_session_is_over_only_when_every_stage_said_so() -> None:
    rig = Rig()
    rig.open()
    rig.coordinator.cancel("s")
    rig.end(0, stages=STAGES[:-1])
    assert rig.coordinator.sessions == 1
    rig.end(0, stages=STAGES[-1:])
    assert rig.coordinator.sessions == 0


def test_a_second_cancel_does_nothing() -> None:
    rig = Rig()
    rig.open()
    rig.coordinator.cancel("s")
    rig.sent()
    rig.coordinator.cancel("s")
    rig.coordinator.cancel("never opened")
    assert rig.sent() == []
    assert rig.events() == [Event("cancelled", 0)]


def test_a_session_cancelled_while_it_drains_is_not_closed_twice() -> None:
    """Its last message, the end of stream, is already on its way through the stages."""
    rig = Rig()
    _finish(rig, 3)
    rig.coordinator.cancel("s")
    assert [type(out.message) for out in rig.sent()] == [Cancel]
    rig.end(1)
    assert rig.got["s"] == ["opened", Event("cancelled", 0), "ended"]


def test_a_session_cancelled_before_it_is_open_ends_too() -> None:
    rig = Rig()
    rig.request()
    rig.coordinator.cancel("s")
    assert [type(out.message) for out in rig.sent()] == [OpenSession, Cancel, CloseSession]
    rig.say(Opened("perception", 1.0))
    rig.end(0)
    assert rig.got["s"] == [Event("cancelled", 0), "ended"]


def test_a_failed_session_leaves_the_others_alone() -> None:
    rig = Rig()
    rig.open("bad")
    rig.open("good")
    rig.feed(2, "bad")
    rig.feed(2, "good")
    rig.sent()
    rig.say(SessionFailed("tts", "no"), "bad", frame=0)
    rig.step_all(0, "good")
    rig.step_all(1, "good")
    assert str(rig.error("bad")) == "tts: no"
    assert [event.frame_index for event in rig.events("good") if event.kind == "audio"] == [0, 1]


def test_a_lost_pipeline_ends_every_session_once() -> None:
    rig = Rig()
    rig.open("a")
    rig.open("b")
    rig.coordinator.cancel("b")
    error = ActorDiedError("tts ended while it was needed (signal SIGKILL)")
    rig.coordinator.fail_all(error)
    assert rig.got["a"] == ["opened", error, "ended"]
    assert rig.got["b"] == ["opened", Event("cancelled", 0), "ended"]
    assert rig.coordinator.sessions == 0


def test_a_session_opened_after_the_pipeline_was_lost_hears_why() -> None:
    """Its request may have been under way when a stage died."""
    rig = Rig()
    error = ActorDiedError("codec ended while it was needed (signal SIGKILL)")
    rig.coordinator.fail_all(error)
    rig.request()
    assert rig.got["s"] == [error, "ended"]
    assert rig.coordinator.sessions == 0
    assert rig.sent() == []


# -- a run over a whole waveform


class OfflineRig(Rig):
    def run(self, chunks: int = 2) -> None:
        deliver = self.got.setdefault("s", []).append
        self.coordinator.open("s", OpenSession(offline=True), OfflineTrack(GEOMETRY, deliver), deliver)
        self.coordinator.feed("s", [np.zeros(16000, np.float32)] * chunks)
        self.coordinator.finish("s")
        for stage in STAGES:
            self.say(Opened(stage, 1.0))
        assert [type(out.message) for out in self.sent()] == [OpenSession, *[PcmFrame] * chunks, EndOfStream]

    def codes(self, frame: int) -> None:
        self.say(AudioFrame(np.zeros(0, np.float32), np.full(31, frame, np.int32)), frame=frame)

    def waveform(self, first: int, frames: int) -> None:
        samples = np.repeat(np.arange(first, first + frames, dtype=np.float32), 1764)
        self.say(AudioFrame(samples, np.zeros(0, np.int32)), frame=first)


def test_an_offline_run_collects_everything() -> None:
    rig = OfflineRig()
    rig.run()
    rig.say(Transcript("hello you"), frame=0)
    for frame in range(3):
        rig.say(Tokens(frame, 12, "t", 0, "t"), frame=frame)
        rig.codes(frame)
    rig.waveform(0, 2)
    rig.waveform(2, 1)
    rig.end(0)
    result = rig.got["s"][-2]
    assert isinstance(result, OfflineResult)
    assert (result.text, result.user_transcript, result.text_tokens, result.function_tokens) == (
        "ttt",
        "hello you",
        [0, 1, 2],
        [12, 12, 12],
    )
    np.testing.assert_array_equal(result.audio_codes[:, 0], [0, 1, 2])
    np.testing.assert_array_equal(result.audio[::1764], [0, 1, 2])
    assert (result.audio.shape, result.audio.dtype, result.sample_rate) == ((3 * 1764,), np.float32, 22050)


def test_an_offline_run_without_transcript_says_none() -> None:
    rig = OfflineRig()
    rig.run()
    rig.end(0)
    result = rig.got["s"][-2]
    assert isinstance(result, OfflineResult)
    assert result.user_transcript is None
    assert (result.audio_codes.shape, result.audio.shape) == ((0, 31), (0,))


def test_an_offline_run_checks_that_audio_and_text_have_the_same_length() -> None:
    rig = OfflineRig()
    rig.run()
    for frame in range(3):
        rig.say(Tokens(frame, 12), frame=frame)
        rig.codes(frame)
    rig.waveform(0, 2)
    rig.end(0)
    assert str(rig.error()) == ("codec returned 3 frames of codes and 3528 samples for 3 frames, expected 5292 samples")
    assert rig.got["s"][-1] == "ended"


def test_an_offline_run_refuses_a_skipped_frame() -> None:
    rig = OfflineRig()
    rig.run()
    rig.codes(0)
    rig.codes(2)
    assert str(rig.error()) == "codec reported frame 2, expected frame 1"
