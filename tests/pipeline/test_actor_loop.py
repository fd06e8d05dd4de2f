"""The loop that all actors share, in this process: a wire of lists, a stage of plain arithmetic."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes import FakeStage

from vcpipe.actors.base import ActorLoop
from vcpipe.schemas.control import Cancel, Shutdown
from vcpipe.schemas.envelope import NO_FRAME, Header
from vcpipe.schemas.errors import ProtocolError
from vcpipe.schemas.messages import CloseSession, EndOfStream, OpenSession, Projected, TextStep
from vcpipe.schemas.reports import Opened, SessionFailed, StageEnded, StageTiming, Stopped, Tokens


class ListSender:
    """What a Sender was given; ``full`` makes it refuse, as if the peer had no room. ``when_sent`` is told every message."""

    def __init__(self) -> None:
        self.messages: list[tuple[Header, Any]] = []
        self.full = False
        self.when_sent: Callable[[Any], None] = lambda message: None

    def send(self, message: Any, session: str = "", epoch: int = 0, frame_index: int = NO_FRAME) -> None:
        assert self.try_send(message, session, epoch, frame_index)

    def try_send(self, message: Any, session: str = "", epoch: int = 0, frame_index: int = NO_FRAME) -> bool:
        if not self.full:
            self.messages.append((Header(session, epoch, frame_index, 0, 0), message))
            self.when_sent(message)
        return not self.full

    def kinds(self, session: str) -> list[type]:
        return [type(message) for header, message in self.messages if header.session == session]


class ListWire:
    """Data and control as lists; Shutdown once all is read.

    The next stage has no room for what frame ``full_at_frame`` gives; ``when_full`` is called while the loop waits for it.
    """

    def __init__(self) -> None:
        self.data: deque[tuple[Header, Any]] = deque()
        self.control: deque[tuple[Header, Any]] = deque()
        self.reports = ListSender()
        self.out = ListSender()
        self.full_at_frame: int | None = None
        self.when_full: Callable[[], None] = lambda: None

    def say(self, message: Any, session: str = "s", frame: int = NO_FRAME, epoch: int = 0) -> None:
        pipe = self.control if isinstance(message, (Cancel, Shutdown)) else self.data
        pipe.append((Header(session, epoch, frame, 0, 7), message))

    def frames(self, *indices: int, session: str = "s") -> None:
        for index in indices:
            self.say(Projected(np.full((1, 1, 4), index, np.float32)), session, index)

    def wait(self, timeout_ms: int) -> tuple[bool, bool]:
        if not self.control and not self.data:
            self.say(Shutdown())
        return bool(self.control), bool(self.data)

    def wait_writable(self) -> None:
        self.when_full()

    def next_control(self) -> tuple[Header, Any] | None:
        return self.control.popleft() if self.control else None

    def next_data(self) -> tuple[Header, Any]:
        received = self.data.popleft()
        self.out.full = received[0].frame_index == self.full_at_frame
        return received


class Run:
    """A language actor over ``wire``, run until everything was read."""

    def __init__(self, wire: ListWire) -> None:
        self.freed = 0
        self.loop = ActorLoop(FakeStage("language"), wire, self._free)  # type: ignore[arg-type]
        self.loop.run()

    def _free(self) -> None:
        self.freed += 1


def ended_frames(wire: ListWire, session: str = "s") -> list[int]:
    reports = wire.reports.messages
    return [m.frames for header, m in reports if isinstance(m, StageEnded) and header.session == session]


def test_a_session_from_open_to_end() -> None:
    wire = ListWire()
    wire.say(OpenSession())
    wire.frames(0, 1)
    wire.say(EndOfStream())
    Run(wire)
    assert wire.out.kinds("s") == [OpenSession, TextStep, TextStep, EndOfStream]
    assert wire.reports.kinds("s") == [Opened, Tokens, StageTiming, Tokens, StageTiming, StageEnded]
    assert ended_frames(wire) == [2]
    assert [header.frame_index for header, m in wire.reports.messages if isinstance(m, StageTiming)] == [0, 1]
    assert isinstance(wire.reports.messages[-1][1], Stopped)


def test_a_session_whose_route_ends_here_goes_no_further() -> None:
    wire = ListWire()
    wire.say(OpenSession(route=("language",)), "here")
    wire.say(OpenSession(route=("language", "tts")), "further")
    for frame in range(2):
        wire.frames(frame, session="here")
        wire.frames(frame, session="further")
    wire.say(EndOfStream(), "here")
    wire.say(EndOfStream(), "further")
    Run(wire)
    assert wire.out.kinds("here") == []
    assert wire.out.kinds("further") == [OpenSession, TextStep, TextStep, EndOfStream]
    assert wire.reports.kinds("here") == wire.reports.kinds("further")
    assert ended_frames(wire, "here") == [2]


@pytest.mark.parametrize("cancel", ["before", "while open"])
def test_a_cancelled_session_whose_route_ends_here_goes_no_further(cancel: str) -> None:
    wire = ListWire()
    if cancel == "before":
        wire.say(Cancel(), epoch=1)
    else:
        wire.reports.when_sent = lambda message: wire.say(Cancel(), epoch=1) if isinstance(message, Tokens) else None
    wire.say(OpenSession(route=("language",)))
    wire.frames(0, 1)
    wire.say(CloseSession(), epoch=1)
    run = Run(wire)
    assert wire.out.kinds("s") == []
    assert wire.reports.kinds("s")[-1] is StageEnded
    assert run.loop.open_sessions == 0


def test_a_session_that_should_not_have_come_here_is_a_bug() -> None:
    wire = ListWire()
    wire.say(OpenSession(route=("tts", "codec")))
    with pytest.raises(ProtocolError, match=r"language is not on the session's route \('tts', 'codec'\)"):
        Run(wire)


def test_what_a_stage_adds_to_the_request_reaches_the_next() -> None:
    wire = ListWire()
    wire.say(OpenSession())
    Run(wire)
    assert wire.out.messages[0][1].prompt_positions == 2


def test_timings_say_when_the_input_was_sent_and_what_the_step_took() -> None:
    wire = ListWire()
    wire.say(OpenSession())
    wire.frames(0)
    Run(wire)
    (timing,) = [m for _, m in wire.reports.messages if isinstance(m, StageTiming)]
    ((name, start_ns, end_ns),) = timing.spans
    assert (name, timing.sent_ns) == ("language", 7)
    assert timing.started_ns <= start_ns <= end_ns <= timing.finished_ns


def test_the_pool_is_not_emptied_by_frames() -> None:
    wire = ListWire()
    wire.say(OpenSession())
    wire.frames(*range(100))
    before_end = Run(wire).freed
    wire = ListWire()
    wire.say(OpenSession())
    wire.frames(*range(100))
    wire.say(EndOfStream())
    assert (before_end, Run(wire).freed) == (1, 2)  # once at Shutdown, once for the session


def test_a_cancel_overtakes_queued_frames_and_a_step_that_waits_for_room() -> None:
    wire = ListWire()
    wire.full_at_frame = 1
    wire.when_full = lambda: wire.say(Cancel(), epoch=1)
    wire.say(OpenSession())
    wire.frames(0, 1, 2, 3)
    wire.say(CloseSession(), epoch=1)
    run = Run(wire)
    assert wire.out.kinds("s") == [OpenSession, TextStep, CloseSession]
    assert wire.reports.kinds("s") == [Opened, Tokens, StageTiming, StageEnded]
    assert ended_frames(wire) == [1]
    assert run.loop.open_sessions == 0


def test_a_cancel_between_two_results_of_a_step_leaves_it() -> None:
    wire = ListWire()
    wire.out.when_sent = lambda message: wire.say(Cancel(), epoch=1) if isinstance(message, TextStep) else None
    wire.say(OpenSession(system_prompt="language:twice@0"))
    wire.frames(0)
    wire.say(CloseSession(), epoch=1)
    Run(wire)
    assert wire.out.kinds("s") == [OpenSession, TextStep, CloseSession]
    assert ended_frames(wire) == [0]


def test_a_cancel_that_overtakes_the_opening_keeps_the_session_out() -> None:
    wire = ListWire()
    wire.say(Cancel(), epoch=1)
    wire.say(OpenSession())
    wire.frames(0, 1)
    wire.say(CloseSession(), epoch=1)
    run = Run(wire)
    assert wire.out.kinds("s") == [OpenSession, CloseSession]
    assert wire.reports.kinds("s") == [StageEnded]
    assert run.loop.open_sessions == 0


def test_a_cancel_that_comes_after_the_end_leaves_nothing_behind() -> None:
    wire = ListWire()
    wire.say(OpenSession())
    wire.say(EndOfStream())
    run = Run(wire)
    wire.say(Cancel(), epoch=1)
    run.loop.run()
    assert run.loop._sessions == {}


def test_messages_of_an_older_epoch_are_not_stepped_but_the_end_is_passed_on() -> None:
    wire = ListWire()
    wire.say(OpenSession(system_prompt="language:raise@0"), epoch=1)
    wire.frames(0, 1)
    wire.say(EndOfStream(), epoch=0)
    Run(wire)
    assert wire.out.kinds("s") == [OpenSession, EndOfStream]
    assert ended_frames(wire) == [0]


def test_an_expected_error_ends_one_session() -> None:
    wire = ListWire()
    wire.say(OpenSession(system_prompt="language:fail@1"), "bad")
    wire.say(OpenSession(), "good")
    for frame in range(3):
        wire.frames(frame, session="bad")
        wire.frames(frame, session="good")
    wire.say(CloseSession(), "bad", epoch=1)
    wire.say(EndOfStream(), "good")
    Run(wire)
    assert wire.reports.kinds("bad") == [Opened, Tokens, StageTiming, SessionFailed, StageEnded]
    assert (ended_frames(wire, "bad"), ended_frames(wire, "good")) == ([1], [3])


def test_a_refused_session_is_passed_on_so_that_all_stages_can_close_it() -> None:
    wire = ListWire()
    wire.say(OpenSession(system_prompt="language:refuse"))
    wire.frames(0)
    wire.say(CloseSession(), epoch=1)
    Run(wire)
    assert wire.out.kinds("s") == [OpenSession, CloseSession]
    assert wire.reports.kinds("s") == [SessionFailed, StageEnded]


def test_a_bug_leaves_the_loop() -> None:
    wire = ListWire()
    wire.say(OpenSession(system_prompt="language:raise@0"))
    wire.frames(0)
    with pytest.raises(RuntimeError, match="a bug in the network"):
        Run(wire)


@pytest.mark.parametrize("first", [Projected(np.zeros((1, 1, 4), np.float32)), TextStep(5)])
def test_a_frame_of_a_session_that_was_never_opened_is_a_bug(first: Any) -> None:
    wire = ListWire()
    wire.say(first, "ghost", 0)
    with pytest.raises(ProtocolError, match="language: .* for session 'ghost', which is not open"):
        Run(wire)


def test_a_session_opened_twice_is_a_bug() -> None:
    wire = ListWire()
    wire.say(OpenSession())
    wire.say(OpenSession())
    with pytest.raises(ProtocolError, match="language: session 's' was opened twice"):
        Run(wire)


def test_shutdown_overtakes_a_step_that_waits_for_room() -> None:
    wire = ListWire()
    wire.full_at_frame = 1
    wire.when_full = lambda: wire.say(Shutdown())
    wire.say(OpenSession())
    wire.frames(0, 1, 2)
    run = Run(wire)
    assert wire.out.kinds("s") == [OpenSession, TextStep]
    assert isinstance(wire.reports.messages[-1][1], Stopped)
    assert run.loop.open_sessions == 0
