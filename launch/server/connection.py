"""The life of one WebSocket: commands in, notices out, the session between them.

Four things run at a time. The *reader* takes every message at once, so that a ping or a cancel never waits behind audio; the
*writer* sends what the outbox holds; a *thread* opens the session and reads its events; the *watchdog* keeps the time
limits. Whichever sees an end first sets it, and :meth:`Connection.run` takes the rest down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from vcpipe.launch.server.engine import Engine
from vcpipe.launch.server.metrics import Metrics
from vcpipe.launch.server.outbox import Outbox
from vcpipe.launch.server.protocol import (
    CLOSE_DONE,
    CLOSE_FAULT,
    CLOSE_LIMIT,
    Append,
    Cancel,
    Clear,
    Cleared,
    ClientError,
    Command,
    Commit,
    Committed,
    Configure,
    Created,
    CreateResponse,
    Dialect,
    JsonObject,
    Notice,
    Phase,
    Ping,
    Pong,
    ResponseRequested,
    Updated,
    event_id_of,
    parse_message,
    shown,
)
from vcpipe.launch.server.reservation import Slot
from vcpipe.launch.server.session_input import SessionInput
from vcpipe.launch.server.session_thread import SessionThread
from vcpipe.pipeline.session import VoiceChatSession
from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.schemas.config import SessionOptions
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.events import TERMINAL_KINDS, Event

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
class _End:
    """How a connection ended; ``code`` None: the client is gone."""

    name: str
    code: int | None = None
    reason: str = ""


_GONE = _End("disconnected")


class Connection:
    """One client that holds a slot. ``model``: the query's, None for none."""

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
        self._end: asyncio.Future[_End] = self._loop.create_future()
        self._opening: asyncio.Task[None] | None = None
        self._wish = Configure()
        self._update_id: str | None = None
        self._open_started = 0.0
        self._thread: SessionThread | None = None
        self._session: VoiceChatSession | None = None
        self._session_ended = False
        self._input: SessionInput | None = None
        self._early: deque[tuple[Command, str | None]] = deque()
        self._early_samples = 0
        self._cancelled = False
        self._frames_out = 0
        self._deferred: deque[tuple[int, Notice]] = deque()
        self._configure_by = self._loop.time() + limits.configure_s
        self._heard = self._loop.time()

    async def run(self, slot: Slot) -> None:
        """Until the end, whichever way; the slot is free before the client sees the close."""
        tasks = [self._loop.create_task(self._guard(work)) for work in (self._read(), self._watch())]
        writer = self._loop.create_task(self._guard(self._write()))
        try:
            await self._say(Created(self._id, self._engine.model))
            end = await self._end
            slot.leave()
            self._metrics.session_ended(end.name)
            await self._free(tasks)
            self._outbox.close()
            if end.code is not None:
                await asyncio.wait([writer])
            slot.release()
            if end.code is not None:
                await self._close(end.code, end.reason)
        finally:
            # Also when the server cancels this task: the thread closes its session by itself.
            self._finish(_GONE)
            self._outbox.close()
            self._abort()
            if self._session is not None:
                self._engine.watch_timings(self._session.id, None)
            slot.release()
            for task in (*tasks, writer, self._opening):
                if task is not None:
                    task.cancel()

    def _finish(self, end: _End) -> None:
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
            self._finish(_End("fault", CLOSE_FAULT, "the server failed"))

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

    def _abort(self) -> None:
        """Cancel the session unless it has ended; where that fails its thread tells why."""
        if self._session is not None and not self._session_ended:
            with contextlib.suppress(VcpipeError):
                self._session.abort()

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
            self._finish(_End("limit", CLOSE_LIMIT, f"nothing was read for {self._limits.send_s:g} s"))
        except (WebSocketDisconnect, RuntimeError, OSError):
            self._outbox.close()
            self._finish(_GONE)

    async def _say(self, notice: Notice) -> None:
        """Put a notice's messages into the outbox; waits while it is full."""
        if isinstance(notice, ClientError):
            self._metrics.error(notice.code)
        for message in self._dialect.write(notice):
            # What a dialect says around the deltas must reach the client in any case.
            stale_on_cancel = isinstance(notice, Event) and str(message["type"]).endswith(".delta")
            await self._outbox.put(_to_text(message), stale_on_cancel=stale_on_cancel)
        if isinstance(notice, ClientError) and notice.close is not None:
            name = "limit" if notice.close == CLOSE_LIMIT else "fault"
            self._finish(_End(name, notice.close, notice.message.splitlines()[0]))

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
        if self._input is None:
            return self._opening is not None
        return self._input.is_worked_on(self._frames_out)

    # -- commands

    @property
    def _phase(self) -> Phase:
        if self._input is not None:
            return "open" if self._input.commit is None else "committed"
        return "configuring" if self._opening is None else "opening"

    async def _obey(self, command: Command, event_id: str | None) -> None:
        if isinstance(command, Ping):
            await self._say(Pong())
        elif isinstance(command, Configure):
            self._configure(command, event_id)
        elif isinstance(command, Cancel):
            await self._cancel()
        elif self._input is None or self._early:
            self._keep(command, event_id)
        else:
            await self._drive(self._input, command, event_id)

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

    def _keep(self, command: Command, event_id: str | None) -> None:
        """The session is being opened: later. Bounded."""
        samples = self._early_samples + (len(command.pcm) if isinstance(command, Append) else 0)
        if samples > _MAX_EARLY_S * 16000 or len(self._early) >= _MAX_EARLY:
            text = f"the session is being opened and {_MAX_EARLY_S:g} s wait already; wait for session.updated"
            raise ClientError("inference_error", text)
        self._early_samples = samples
        self._early.append((command, event_id))

    async def _drive(self, session_input: SessionInput, command: Command, event_id: str | None) -> None:
        """A command for the open session."""
        if isinstance(command, CreateResponse):
            await self._say(ResponseRequested())
            return
        if session_input.commit is not None:
            raise ClientError("invalid_request", "the input was committed; the session ends by itself")
        if isinstance(command, Append):
            if not session_input.append(command.pcm):
                await self._after(session_input.max_frames, session_input.limit_error(event_id))
        elif isinstance(command, Clear):
            session_input.clear()
            await self._say(Cleared())
            accepted = session_input.frames_accepted
            self._deferred = deque((min(frames, accepted), notice) for frames, notice in self._deferred)
            await self._say_deferred()
        elif isinstance(command, Commit):
            session_input.commit = command
            await self._after(session_input.frames_accepted, Committed())
        await self._feed()

    async def _cancel(self) -> None:
        if self._cancelled:
            return
        self._cancelled = True
        self._outbox.drop_stale()
        if self._session is None:
            await self.take_events([Event("cancelled", 0)])
        else:
            self._abort()

    async def _feed(self) -> None:
        """Hand the pipeline what it has room for."""
        if self._input is None or self._cancelled or self._ended:
            return
        # Where the session has ended, its thread tells what happened.
        with contextlib.suppress(VcpipeError):
            if not self._input.feed(self._frames_out):
                await self._after(self._input.max_frames, self._input.limit_error())

    # -- what a client is told later

    async def _after(self, frames: int, notice: Notice) -> None:
        """Say something once so many frames came out, so that it stands where a client expects it."""
        if self._frames_out >= frames:
            await self._say(notice)
        else:
            self._deferred.append((frames, notice))

    async def _say_deferred(self) -> None:
        while self._deferred and self._deferred[0][0] <= self._frames_out:
            await self._say(self._deferred.popleft()[1])

    # -- the session's thread tells

    async def take_events(self, events: list[Event]) -> None:
        """Say a frame's events, make room for the next."""
        for event in events:
            if self._ended:
                return
            if event.kind in TERMINAL_KINDS:
                self._session_ended = True
                await self._say(event)
                self._finish(_End(event.kind, CLOSE_DONE))
            elif not self._cancelled:
                await self._say(event)
                if event.kind == "audio":
                    self._frames_out += 1
                    await self._say_deferred()
        await self._feed()

    def _take_timing(self, timing: FrameTiming) -> None:
        """A timing that finds no room is left out."""
        if not self._cancelled and not self._ended:
            for message in self._dialect.write(timing):
                self._outbox.put_now(_to_text(message), stale_on_cancel=True)

    async def opened(self, session: VoiceChatSession) -> None:
        """Tell the effective values, then take what came meanwhile."""
        if self._ended or self._cancelled:
            session.abort()
            return
        self._session = session
        wish = self._wish
        assert wish.max_streaming_seconds is not None
        updated = Updated(
            session_id=self._id,
            model=self._engine.model,
            system_prompt=wish.system_prompt,
            seed=wish.seed,
            max_streaming_seconds=wish.max_streaming_seconds,
            timings=wish.timings,
            geometry=session.geometry,
            ignored=wish.ignored,
        )
        await self._say(updated)
        self._heard = self._loop.time()
        if wish.timings:
            self._engine.watch_timings(session.id, self._take_timing)
        self._input = SessionInput(session)
        while self._early:
            # Taken out only afterwards: what comes meanwhile must not overtake.
            command, event_id = self._early[0]
            try:
                await self._drive(self._input, command, event_id)
            except ClientError as error:
                error.event_id = event_id
                await self._say(error)
            self._early.popleft()

    async def open_failed(self, error: Exception) -> None:
        """Back to where a session.update is waited for; the time this took is not counted."""
        self._configure_by += self._loop.time() - self._open_started
        early, self._early, self._early_samples = self._early, deque(), 0
        self._opening = self._thread = None
        await self._say(ClientError("session_initialization_failed", _first_line(error), event_id=self._update_id))
        for _, early_id in early:
            await self._say(ClientError("invalid_request", "send session.update before audio", event_id=early_id))

    async def failed(self, error: Exception) -> None:
        """The session, or all of them, is lost."""
        self._session_ended = True
        await self._say(ClientError("inference_error", _first_line(error), close=CLOSE_FAULT))

    async def _open(self) -> None:
        """Wait for the model, then leave the rest to a thread."""
        wish = self._wish
        try:
            options = SessionOptions(
                system_prompt=wish.system_prompt,
                seed=wish.seed,
                max_streaming_seconds=wish.max_streaming_seconds,
            )
            pipeline = await self._engine.pipeline()
        except (VcpipeError, ValueError) as error:
            await self.open_failed(error)
            return
        self._thread = SessionThread(pipeline, options, self, self._id)
        self._thread.start()


def _first_line(error: Exception) -> str:
    """The message without the traceback that may follow it."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _to_text(message: JsonObject) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))
