"""A coordinator driven by hand-made reports, without processes and in its own time."""

from __future__ import annotations

from typing import Any

import numpy as np

from vcpipe.pipeline.clock import FrameClock, make_clock
from vcpipe.pipeline.coordinator import Coordinator, Outgoing
from vcpipe.pipeline.tracks import Delivery, FrameTrack
from vcpipe.schemas.envelope import NO_FRAME, Header
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import STAGES, FrameGeometry
from vcpipe.schemas.messages import OpenSession, PcmFrame
from vcpipe.schemas.reports import AudioFrame, Opened, StageEnded, StageTiming, Tokens, Transcript

GEOMETRY = FrameGeometry()


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
