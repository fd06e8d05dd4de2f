"""How sessions end, and their epochs: the coordinator driven by hand-made reports."""

from __future__ import annotations

from rig import Rig

from vcpipe.schemas.control import Cancel
from vcpipe.schemas.errors import ActorDiedError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import STAGES
from vcpipe.schemas.messages import CloseSession, EndOfStream, OpenSession, PcmFrame
from vcpipe.schemas.reports import Opened, SessionFailed

# -- the end of the stream


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
