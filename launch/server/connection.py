"""A WebSocket that holds a session: commands in, notices out. What kind of session, a subclass says.

Beside the tasks of every connection, a *thread* opens the session and reads it.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from dataclasses import replace
from typing import Any, ClassVar

from starlette.websockets import WebSocket

from vcpipe.launch.server.client_connection import ClientConnection, End, Limits, to_text
from vcpipe.launch.server.engine import Engine, ServedPipeline
from vcpipe.launch.server.metrics import Metrics, Task
from vcpipe.launch.server.protocol import (
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
    shown,
)
from vcpipe.launch.server.session_thread import SessionThread, first_line
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry

#: Most seconds of PCM that wait while a session opens.
_MAX_EARLY_S = 30.0
#: Most messages that wait while a session opens.
_MAX_EARLY = 4096


class Connection(ClientConnection):
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
        super().__init__(websocket, session_id, limits)
        self._dialect = dialect
        self._engine = engine
        self._metrics = metrics
        self._model = model
        self._opening: asyncio.Task[None] | None = None
        self._wish = Configure()
        self._update_id: str | None = None
        self._open_started = 0.0
        self._thread: SessionThread[Any, Any] | None = None
        self._early: deque[tuple[Command, str | None]] = deque()
        self._early_samples = 0
        self._configure_by = self._loop.time() + limits.configure_s

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

    # -- as every connection

    async def _greet(self) -> None:
        await self._say(Created(self._id, self._engine.model))

    async def _take(self, message: JsonObject, event_id: str | None) -> None:
        for command in self._dialect.read(message, self._phase):
            await self._obey(command, event_id)

    async def _tell(self, error: ClientError) -> None:
        await self._say(error)

    @property
    def _working(self) -> bool:
        return self._opening is not None if self._session_phase is None else self._is_worked_on

    @property
    def _due(self) -> tuple[float, str]:
        if self._phase == "configuring":
            return self._configure_by, f"no session.update within {self._limits.configure_s:g} s"
        return super()._due

    def _count_end(self, end: End) -> None:
        self._metrics.session_ended(end.name, self.task)

    @property
    def _freed(self) -> asyncio.Event | None:
        return None if self._thread is None else self._thread.done

    async def _say(self, notice: Notice) -> None:
        """Put a notice's messages into the outbox; waits while it is full."""
        if isinstance(notice, ClientError):
            self._metrics.error(notice.code)
        for message in self._dialect.write(notice):
            # What a dialect says around the deltas must reach the client in any case.
            stale_on_cancel = isinstance(notice, Event | TurnText) and str(message["type"]).endswith(".delta")
            await self._outbox.put(to_text(message), stale_on_cancel=stale_on_cancel)
        if isinstance(notice, ClientError):
            self._close_by(notice)

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
        self._opening = self._start(self._open())

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
