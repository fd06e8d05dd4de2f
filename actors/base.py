"""The loop that every actor shares: poll, step, report, stop. It knows sessions and epochs, no network and no MLX."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vcpipe.actors.stage import Stage, StageSession
from vcpipe.actors.wire import Sender, StageWire
from vcpipe.schemas.control import Cancel, Shutdown
from vcpipe.schemas.envelope import Header, Message
from vcpipe.schemas.errors import ProtocolError, VcpipeError
from vcpipe.schemas.messages import CloseSession, EndOfStream, OpenSession
from vcpipe.schemas.reports import Opened, SessionFailed, StageEnded, StageTiming, Stopped

#: The loop looks up at least this often, so that nothing waits without a bound.
_IDLE_MS = 1000

#: Cancels that arrive after a session's last message are recognised among this many ended sessions.
_ENDED_KEPT = 256


class _SessionCancelled(Exception):
    """Unwinds a step whose session was cancelled while it sent its results."""


class _ShutdownRequested(Exception):
    """Unwinds whatever the loop is doing."""


@dataclass
class _Held:
    """A session as the loop sees it; ``state`` is None once it was cancelled or has failed.

    ``out``: the way to the next stage of its route, None where it ends here.
    """

    state: StageSession | None
    epoch: int
    out: Sender | None = None
    frames: int = 0


class ActorLoop:
    """Steps one stage for any number of sessions. ``free_memory`` is called after sessions were dropped."""

    def __init__(self, stage: Stage, wire: StageWire, free_memory: Callable[[], None]) -> None:
        self._stage = stage
        self._wire = wire
        self._free_memory = free_memory
        self._sessions: dict[str, _Held] = {}
        self._ended: deque[str] = deque(maxlen=_ENDED_KEPT)
        self.busy_since_ns = 0

    @property
    def open_sessions(self) -> int:
        """Sessions whose state is held. Asked by the beat's thread too, hence the copy."""
        return sum(held.state is not None for held in list(self._sessions.values()))

    def run(self) -> None:
        """Until Shutdown. An exception other than VcpipeError in a step leaves the loop: the caches are unsure then."""
        try:
            while True:
                has_control, has_data = self._wire.wait(_IDLE_MS)
                if has_control:
                    self.drain_control()
                if has_data:
                    self.busy_since_ns = time.monotonic_ns()
                    self._take(*self._wire.next_data())
                    self.busy_since_ns = 0
        except _ShutdownRequested:
            self._sessions.clear()
            self._free_memory()
            self._wire.reports.send(Stopped(self._stage.name))

    def drain_control(self) -> None:
        """Act on everything that may overtake data."""
        while (received := self._wire.next_control()) is not None:
            header, message = received
            if isinstance(message, Shutdown):
                raise _ShutdownRequested
            if isinstance(message, Cancel):
                self._cancel(header)

    def _cancel(self, header: Header) -> None:
        if header.session in self._ended:
            return
        # A session that is still on its way here leaves a mark, so that its messages are dropped when they arrive.
        held = self._sessions.setdefault(header.session, _Held(None, header.epoch))
        held.state, held.epoch = None, header.epoch
        self._free_memory()

    def _take(self, header: Header, message: Message) -> None:
        if isinstance(message, OpenSession):
            self._open(header, message)
        elif isinstance(message, (EndOfStream, CloseSession)):
            self._end(header, message)
        else:
            self._step(header, message)

    def _open(self, header: Header, request: OpenSession) -> None:
        started = time.monotonic()
        held = self._sessions.setdefault(header.session, _Held(None, header.epoch))
        held.out = self._next_on(request.route)
        if header.epoch < held.epoch:
            self._forward(header, request, held.out)
            return
        if held.state is not None:
            raise ProtocolError(f"{self._stage.name}: session {header.session!r} was opened twice")
        passed_on = request
        with self._failing_session_only(header, held):
            try:
                held.state, passed_on = self._stage.open(request)
            finally:
                # A session that is refused here visits the other stages too: each of them has to close it.
                self._forward(header, passed_on, held.out)
            held.state.prefill()
            self._report(header, Opened(self._stage.name, (time.monotonic() - started) * 1e3))

    def _next_on(self, route: tuple[str, ...]) -> Sender | None:
        name = self._stage.name
        if name not in route:
            raise ProtocolError(f"{name} is not on the session's route {route}")
        return None if name == route[-1] else self._wire.out

    def _step(self, header: Header, message: Message) -> None:
        held = self._sessions.get(header.session)
        if held is None:
            raise ProtocolError(f"{self._stage.name}: {message.KIND} for session {header.session!r}, which is not open")
        if held.state is None or header.epoch < held.epoch:
            return
        emit = _LoopEmitter(self, self._wire, held.out, header)
        started_ns = time.monotonic_ns()
        with self._failing_session_only(header, held):
            held.state.step(message, emit)
            held.frames += 1
            finished_ns = time.monotonic_ns()
            timing = StageTiming(self._stage.name, header.sent_ns, started_ns, finished_ns, emit.spans)
            self._report(header, timing)

    def _end(self, header: Header, message: EndOfStream | CloseSession) -> None:
        held = self._sessions.get(header.session, _Held(None, header.epoch))
        if held.state is not None and isinstance(message, EndOfStream):
            with self._failing_session_only(header, held):
                held.state.end(_LoopEmitter(self, self._wire, held.out, header))
        self._sessions.pop(header.session, None)
        self._ended.append(header.session)
        frames, out = held.frames, held.out
        del held
        self._free_memory()
        self._report(header, StageEnded(self._stage.name, frames))
        self._forward(header, message, out)

    @contextmanager
    def _failing_session_only(self, header: Header, held: _Held) -> Iterator[None]:
        """A VcpipeError ends the one session; a cancelled one is left quietly."""
        try:
            yield
        except _SessionCancelled:
            pass
        except VcpipeError as error:
            held.state = None
            self._report(header, SessionFailed(self._stage.name, str(error)))

    def check_cancelled(self, session: str, epoch: int) -> None:
        """Between two results of a step: leave it when its session is gone."""
        self.drain_control()
        if self._sessions[session].epoch > epoch:
            raise _SessionCancelled

    def _report(self, header: Header, message: Message) -> None:
        self._wire.reports.send(message, header.session, header.epoch, header.frame_index)

    def _forward(self, header: Header, message: Message, out: Sender | None) -> None:
        if out is not None:
            out.send(message, header.session, header.epoch, header.frame_index)


class _LoopEmitter:
    """The Emitter of one step."""

    def __init__(self, loop: ActorLoop, wire: StageWire, out: Sender | None, header: Header) -> None:
        self._loop = loop
        self._wire = wire
        self._out = out
        self._header = header
        self.spans: list[list[str | int]] = []

    def send(self, message: Message, frame_index: int | None = None) -> None:
        header, out = self._header, self._out
        if out is None:
            return
        index = header.frame_index if frame_index is None else frame_index
        # Offline, a stage makes all its frames at once: it waits for the next one to take them, open to a cancel.
        while not out.try_send(message, header.session, header.epoch, index):
            self._wire.wait_writable()
            self._loop.check_cancelled(header.session, header.epoch)
        # Only now, so that the next stage does not wait for it: of a cancelled session it drops the message.
        self._loop.check_cancelled(header.session, header.epoch)

    def report(self, message: Message, frame_index: int | None = None) -> None:
        header = self._header
        index = header.frame_index if frame_index is None else frame_index
        self._wire.reports.send(message, header.session, header.epoch, index)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        yield
        self.spans.append([name, start_ns, time.monotonic_ns()])
