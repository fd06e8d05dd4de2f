"""Sessions and epochs: commands and reports in, messages and deliveries out. No sockets, no threads, no clock of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from vcpipe.pipeline.tracks import Deliver, Track
from vcpipe.schemas.control import Cancel
from vcpipe.schemas.envelope import NO_FRAME, Header, Message
from vcpipe.schemas.errors import FrameContractError, VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.messages import CloseSession, EndOfStream, OpenSession
from vcpipe.schemas.reports import Opened, SessionFailed, StageEnded


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for the "data" or "control" pipe of each of the ``stages``."""

    pipe: Literal["data", "control"]
    stages: tuple[str, ...]
    session: str
    epoch: int
    frame_index: int
    message: Message


@dataclass(slots=True)
class _Record:
    """One session. ``state``: open -> finishing (no more input) -> draining (end sent) -> gone, or dropped."""

    id: str
    route: tuple[str, ...]
    track: Track
    deliver: Deliver
    state: Literal["open", "finishing", "draining", "dropped"] = "open"
    epoch: int = 0
    opened: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)


class Coordinator:
    """Drives any number of sessions over one pipeline, each along its own route.

    ``outgoing`` fills with what has to be sent; each session's ``deliver`` is called with what its reader gets, "ended" last.
    Times are given by the caller, in monotonic nanoseconds.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Record] = {}
        self.outgoing: deque[Outgoing] = deque()
        self.late_reports = 0
        self._lost: VcpipeError | None = None

    @property
    def sessions(self) -> int:
        """Sessions that some stage still holds."""
        return len(self._sessions)

    # -- commands

    def open(self, session: str, request: OpenSession, track: Track, deliver: Deliver) -> None:
        """Send OpenSession along its route; "opened" is delivered once all stages there have the session."""
        if self._lost is not None:
            deliver(self._lost)
            deliver("ended")
            return
        record = _Record(session, request.route, track, deliver)
        self._sessions[session] = record
        self._send_data(record, NO_FRAME, request)

    def feed(self, session: str, chunks: list[Any]) -> None:
        """Queue input of the session's track; it leaves by clock and credit."""
        record = self._sessions.get(session)
        if record is not None and record.state == "open":
            record.track.feed(chunks)

    def finish(self, session: str) -> None:
        """End of stream after what was fed; the last word follows the last frame."""
        record = self._sessions.get(session)
        if record is not None and record.state == "open":
            record.state = "finishing"

    def cancel(self, session: str) -> None:
        """Drop the session: ``cancelled`` is delivered at once, "ended" when every stage has freed it."""
        record = self._sessions.get(session)
        if record is not None and record.state != "dropped":
            record.deliver(Event("cancelled", record.track.frames_done))
            self._drop(record)

    def fail_all(self, error: VcpipeError) -> None:
        """The pipeline is lost: every session, also one that is still to come, gets the error and ends."""
        self._lost = error
        records = list(self._sessions.values())
        self._sessions.clear()
        for record in records:
            if record.state != "dropped":
                record.deliver(error)
            record.deliver("ended")

    # -- time and credit

    def pump(self, now_ns: int) -> int | None:
        """Send all that clock and credit allow. Returns when to call again; None: not before something happens."""
        wakes = [wake for record in self._sessions.values() if (wake := self._pump(record, now_ns)) is not None]
        return min(wakes, default=None)

    def _pump(self, record: _Record, now_ns: int) -> int | None:
        if record.state not in ("open", "finishing") or len(record.opened) < len(record.route):
            return None
        while (due := record.track.next_message(now_ns)) is not None:
            self._send_data(record, *due)
        if record.state == "finishing" and not record.track.backlog:
            record.state = "draining"
            self._send_data(record, NO_FRAME, EndOfStream())
        return record.track.wake_ns

    # -- reports

    def handle(self, header: Header, report: Any, now_ns: int) -> None:
        """Take one report of a stage about a session."""
        record = self._sessions.get(header.session)
        if record is None or (header.epoch < record.epoch and not isinstance(report, StageEnded)):
            self.late_reports += 1
            return
        try:
            if isinstance(report, StageEnded):
                self._stage_ended(record, report)
            elif isinstance(report, Opened):
                self._stage_opened(record, report)
            elif isinstance(report, SessionFailed):
                raise VcpipeError(f"{report.stage}: {report.error}")
            else:
                record.track.collect(header.frame_index, report, now_ns)
        except VcpipeError as error:
            self._fail(record, error)

    def _stage_opened(self, record: _Record, report: Opened) -> None:
        record.opened.add(report.stage)
        if len(record.opened) == len(record.route):
            record.deliver("opened")

    def _stage_ended(self, record: _Record, report: StageEnded) -> None:
        record.ended.add(report.stage)
        last = len(record.ended) == len(record.route)
        try:
            if record.state == "draining":
                record.track.check_ended(report)
                if last:
                    record.track.finish()
        except FrameContractError as error:
            self._fail(record, error)
        if last:
            # Forgotten first: who hears "ended" finds nothing of the session left.
            del self._sessions[record.id]
            record.deliver("ended")

    def _fail(self, record: _Record, error: VcpipeError) -> None:
        if record.state != "dropped":
            record.deliver(error)
            self._drop(record)

    def _drop(self, record: _Record) -> None:
        """Raise the epoch, so that no stage steps what is still queued, and send the session's last message."""
        end_is_sent = record.state == "draining"
        record.state = "dropped"
        record.epoch += 1
        self.outgoing.append(Outgoing("control", record.route, record.id, record.epoch, NO_FRAME, Cancel()))
        if not end_is_sent:
            self._send_data(record, NO_FRAME, CloseSession())

    def _send_data(self, record: _Record, frame_index: int, message: Message) -> None:
        self.outgoing.append(Outgoing("data", record.route[:1], record.id, record.epoch, frame_index, message))
