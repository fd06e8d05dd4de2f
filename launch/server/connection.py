"""The life of one WebSocket that holds a session: commands in, notices out. What kind of session, a subclass says.

Four things run at a time. The *reader* takes every message at once, so that a ping or a cancel never waits behind work; the
*writer* sends what the outbox holds; a *thread* opens the session and reads it; the *watchdog* keeps the time
limits. Whichever sees an end first sets it, and :meth:`Connection.run` takes the rest down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from starlette.websockets import WebSocket, WebSocketDisconnect

from vcpipe.launch.server.engine import Engine, ServedPipeline
from vcpipe.launch.server.metrics import Metrics, Task
from vcpipe.launch.server.outbox import Outbox
from vcpipe.launch.server.protocol import (
    CLOSE_FAULT,
    CLOSE_LIMIT,
    Append,
    Cancel,
    ClientError,
    Command,
    Configure,
    Created,
    Dialect,
    JsonObject,
    Notice,
    Phase,
    Ping,
    Pong,
    TurnText,
    event_id_of,
    parse_message,
    shown,
)
from vcpipe.launch.server.reservation import Slot
from vcpipe.launch.server.session_thread import SessionThread, first_line
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry

#: Most seconds of PCM that wait while a session opens.
_MAX_EARLY_S = 30.0
#: Most messages that wait while a session opens.
_MAX_EARLY = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every connection, in seconds and messages.

    ``session_s``: audio of a session. ``configure_s``: until the session is configured. ``idle_s``: without a message of the
    client while nothing is worked on. ``send_s``: for the client to take one message. ``teardown_s``: for the stages to free
    a session. ``outbox``: messages that wait for the client.
    """

    session_s: float = 600.0
    configure_s: float = 30.0
    idle_s: float = 120.0
    send_s: float = 10.0
    teardown_s: float = 10.0
    outbox: int = 256


@dataclass(frozen=True, slots=True)
class End:
    """How a connection ended; ``code`` None: the client is gone."""

    name: str
    code: int | None = None
    reason: str = ""


_GONE = End("disconnected")


class Connection(ABC):
    """One client that holds a slot. ``model``: the query's, None for none.

    A subclass is the listener of its session's thread too, which calls :meth:`open_failed` here and the rest there.
    """

    #: What the metrics call its sessions.
    task: ClassVar[Task]

    def __init__(
        self,
        websocket: WebSocket,
        session_id: str,
        dialect: Dialect,
        engine: Engine,
        metrics: Metrics,
        limits: Limits,
        model: str | None = None,
    ) -> None:
        self._websocket = websocket
        self._id = session_id
        self._dialect = dialect
        self._engine = engine
        self._metrics = metrics
        self._limits = limits
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(limits.outbox)
        self._end: asyncio.Future[End] = self._loop.create_future()
        self._opening: asyncio.Task[None] | None = None
        self._wish = Configure()
        self._update_id: str | None = None
        self._open_started = 0.0
        self._thread: SessionThread[Any, Any] | None = None
        self._early: deque[tuple[Command, str | None]] = deque()
        self._early_samples = 0
        self._configure_by = self._loop.time() + limits.configure_s
        self._heard = self._loop.time()

    # -- what a subclass says

    @property
    @abstractmethod
    def _session_phase(self) -> Phase | None:
        """Where the open session stands; None while there is none."""

    @property
    @abstractmethod
    def _is_worked_on(self) -> bool:
        """Whether the open session has something to do without the client."""

    @abstractmethod
    def _make_thread(self, pipeline: ServedPipeline) -> SessionThread[Any, Any]:
        """The thread that opens what ``_wish`` asks for. VcpipeError or ValueError for what cannot be."""

    @abstractmethod
    async def _drive(self, command: Command, event_id: str | None) -> None:
        """A command for the open session. Raises ClientError."""

    @abstractmethod
    async def _cancel(self) -> None:
        """The client wants no more, wherever the session stands."""

    @abstractmethod
    def _abort(self) -> None:
        """Let the session's thread come to its end, wherever it stands. Idempotent, never waits."""

    # -- the end

    async def run(self, slot: Slot) -> None:
        """Until the end, whichever way; the slot is free before the client sees the close."""
        tasks = [self._loop.create_task(self._guard(work)) for work in (self._read(), self._watch())]
        writer = self._loop.create_task(self._guard(self._write()))
        try:
            await self._say(Created(self._id, self._engine.model))
            end = await self._end
            slot.leave()
            self._metrics.session_ended(end.name, self.task)
            await self._free(tasks)
            self._outbox.close()
            if end.code is not None:
                await asyncio.wait([writer])
            slot.release()
            if end.code is not None:
                await self._close(end.code, end.reason)
        finally:
            # Also when the server cancels this task: the thread frees its session by itself.
            self._finish(_GONE)
            self._outbox.close()
            self._abort()
            slot.release()
            for task in (*tasks, writer, self._opening):
                if task is not None:
                    task.cancel()

    def _finish(self, end: End) -> None:
        if not self._end.done():
            self._end.set_result(end)

    @property
    def _ended(self) -> bool:
        return self._end.done()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """A bug in one of the tasks must not leave the others, and the slot, waiting."""
        try:
            await work
        except Exception:
            _log.exception("%s: the connection failed", self._id)
            self._outbox.close()
            self._finish(End("fault", CLOSE_FAULT, "the server failed"))

    async def _free(self, tasks: list[asyncio.Task[None]]) -> None:
        """Take the session down; bounded, so that a stage that hangs does not keep the slot."""
        for task in tasks:
            task.cancel()
        if self._opening is not None:
            self._opening.cancel()  # it may still wait for the model
        self._abort()
        if self._thread is not None:
            try:
                await asyncio.wait_for(self._thread.done.wait(), self._limits.teardown_s)
            except asyncio.TimeoutError:
                _log.warning("%s: its stages have not freed it within %g s", self._id, self._limits.teardown_s)

    async def _close(self, code: int, reason: str) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._websocket.close(code, reason[:120]), 1.0)

    # -- the socket

    async def _read(self) -> None:
        while not self._ended:
            try:
                message = await self._websocket.receive()
            except (WebSocketDisconnect, RuntimeError):
                message = {"type": "websocket.disconnect"}
            if message["type"] == "websocket.disconnect":
                self._finish(_GONE)
                return
            self._heard = self._loop.time()
            await self._take_message(message.get("text"))

    async def _take_message(self, text: str | None) -> None:
        event_id = None
        try:
            if text is None:
                raise ClientError("invalid_request", "binary messages are not understood; send JSON in text messages")
            message = parse_message(text)
            event_id = event_id_of(message)
            for command in self._dialect.read(message, self._phase):
                await self._obey(command, event_id)
        except ClientError as error:
            error.event_id = error.event_id or event_id
            await self._say(error)
        except Exception:
            _log.exception("%s: a message could not be handled", self._id)
            await self._say(ClientError("inference_error", "the server failed", event_id=event_id, close=CLOSE_FAULT))

    async def _write(self) -> None:
        """Send until the outbox is closed and empty. A client that takes nothing for ``send_s`` is given up."""
        try:
            while (message := await self._outbox.get()) is not None:
                await asyncio.wait_for(self._websocket.send_text(message), self._limits.send_s)
        except asyncio.TimeoutError:
            self._outbox.close()
            self._finish(End("limit", CLOSE_LIMIT, f"nothing was read for {self._limits.send_s:g} s"))
        except (WebSocketDisconnect, RuntimeError, OSError):
            self._outbox.close()
            self._finish(_GONE)

    async def _say(self, notice: Notice) -> None:
        """Put a notice's messages into the outbox; waits while it is full."""
        if isinstance(notice, ClientError):
            self._metrics.error(notice.code)
        for message in self._dialect.write(notice):
            # What a dialect says around the deltas must reach the client in any case.
            stale_on_cancel = isinstance(notice, Event | TurnText) and str(message["type"]).endswith(".delta")
            await self._outbox.put(to_text(message), stale_on_cancel=stale_on_cancel)
        if isinstance(notice, ClientError) and notice.close is not None:
            name = "limit" if notice.close == CLOSE_LIMIT else "fault"
            self._finish(End(name, notice.close, notice.message.splitlines()[0]))

    # -- the clock

    async def _watch(self) -> None:
        while True:
            now = self._loop.time()
            if self._working:
                self._heard = now
            by, error = self._configure_by, f"no session.update within {self._limits.configure_s:g} s"
            if self._phase != "configuring":
                by, error = self._heard + self._limits.idle_s, f"no message within {self._limits.idle_s:g} s"
            if now >= by:
                await self._say(ClientError("invalid_request", error, close=CLOSE_LIMIT))
                return
            await asyncio.sleep(min(by - now, 1.0))

    @property
    def _working(self) -> bool:
        """Whether the client has nothing to do but wait."""
        return self._opening is not None if self._session_phase is None else self._is_worked_on

    # -- commands

    @property
    def _phase(self) -> Phase:
        return self._session_phase or ("configuring" if self._opening is None else "opening")

    async def _obey(self, command: Command, event_id: str | None) -> None:
        if isinstance(command, Ping):
            await self._say(Pong())
        elif isinstance(command, Configure):
            self._configure(command, event_id)
        elif isinstance(command, Cancel):
            await self._cancel()
        elif self._session_phase is None or self._early:
            self._keep(command, event_id)
        else:
            await self._drive(command, event_id)

    def _configure(self, wish: Configure, event_id: str | None) -> None:
        if self._opening is not None:
            raise ClientError("invalid_request", "the active session cannot be reconfigured")
        served = self._engine.model
        name = wish.model or self._model or served
        if name != served:
            text = f"this server has one model, {served!r}, not {shown(name)}; leave session.model out or name that one"
            raise ClientError("invalid_request", text, param="session.model")
        limit = self._limits.session_s
        if wish.max_streaming_seconds is not None:
            limit = min(limit, wish.max_streaming_seconds)
        self._wish, self._update_id = replace(wish, max_streaming_seconds=limit), event_id
        self._open_started = self._loop.time()
        self._opening = self._loop.create_task(self._guard(self._open()))

    @property
    def _limit_s(self) -> float:
        """Most seconds of audio, once the session was asked for."""
        assert self._wish.max_streaming_seconds is not None
        return self._wish.max_streaming_seconds

    def _keep(self, command: Command, event_id: str | None) -> None:
        """The session is being opened: later. Bounded."""
        samples = self._early_samples + (len(command.pcm) if isinstance(command, Append) else 0)
        if samples > _MAX_EARLY_S * FrameGeometry().input_sample_rate or len(self._early) >= _MAX_EARLY:
            text = f"the session is being opened and {_MAX_EARLY_S:g} s wait already; wait for session.updated"
            raise ClientError("inference_error", text)
        self._early_samples = samples
        self._early.append((command, event_id))

    # -- the session's opening

    async def _open(self) -> None:
        """Wait for the model, then leave the rest to a thread."""
        try:
            thread = self._make_thread(await self._engine.pipeline())
        except (VcpipeError, ValueError) as error:
            await self.open_failed(error)
            return
        self._thread = thread
        thread.start()

    async def _take_early(self) -> None:
        """The session is open: take what came meanwhile."""
        self._heard = self._loop.time()
        while self._early:
            # Taken out only afterwards: what comes meanwhile must not overtake.
            command, event_id = self._early[0]
            try:
                await self._drive(command, event_id)
            except ClientError as error:
                error.event_id = event_id
                await self._say(error)
            self._early.popleft()

    async def open_failed(self, error: Exception) -> None:
        """Back to where a session.update is waited for; the time this took is not counted."""
        self._configure_by += self._loop.time() - self._open_started
        early, self._early, self._early_samples = self._early, deque(), 0
        self._opening = self._thread = None
        await self._say(ClientError("session_initialization_failed", first_line(error), event_id=self._update_id))
        for _, early_id in early:
            await self._say(ClientError("invalid_request", "send session.update before audio", event_id=early_id))


def to_text(message: JsonObject) -> str:
    """A message as it goes over the wire."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))
