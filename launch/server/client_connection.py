"""The life of one WebSocket, whatever its client wants of it.

The *reader* takes every message at once, so that a ping or a cancel never waits behind work; the *writer* sends what the outbox
holds; the *watchdog* keeps the time limits. Whichever sees an end first sets it, and :meth:`ClientConnection.run` takes the
rest down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from vcpipe.launch.server.outbox import Outbox
from vcpipe.launch.server.protocol import CLOSE_FAULT, CLOSE_LIMIT, ClientError, JsonObject, event_id_of, parse_message
from vcpipe.launch.server.reservation import Slot

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


class ClientConnection(ABC):
    """One client that holds a slot. For one event loop."""

    def __init__(self, websocket: WebSocket, session_id: str, limits: Limits) -> None:
        self._websocket = websocket
        self._id = session_id
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(limits.outbox)
        self._end: asyncio.Future[End] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard = self._loop.time()  # when the client last sent something, or had nothing to do but wait

    # -- what a subclass says

    @abstractmethod
    async def _greet(self) -> None:
        """The first word."""

    @abstractmethod
    async def _take(self, message: JsonObject, event_id: str | None) -> None:
        """A client's message. Raises ClientError."""

    @abstractmethod
    async def _tell(self, error: ClientError) -> None:
        """Count and say an error, then :meth:`_close_by` it."""

    @property
    @abstractmethod
    def _working(self) -> bool:
        """Whether the client has nothing to do but wait."""

    @abstractmethod
    def _count_end(self, end: End) -> None:
        """For the metrics; called once, before anything is taken down."""

    @abstractmethod
    def _abort(self) -> None:
        """Let the thread that works for this client come to its end, wherever it stands. Idempotent, never waits."""

    @property
    @abstractmethod
    def _freed(self) -> asyncio.Event | None:
        """Set once that thread has freed everything; None where there is no thread."""

    @property
    def _due(self) -> tuple[float, str]:
        """When the watchdog loses patience, and what it says then."""
        return self._heard + self._limits.idle_s, f"no message within {self._limits.idle_s:g} s"

    # -- from the first word to the end

    async def run(self, slot: Slot) -> None:
        """Until the end, whichever way; the slot is free before the client sees the close."""
        writer = self._loop.create_task(self._guard(self._write()))
        self._start(self._read())
        self._start(self._watch())
        try:
            await self._greet()
            end = await self._end
            slot.leave()
            self._count_end(end)
            await self._free()
            self._outbox.close()
            if end.code is not None:
                await asyncio.wait([writer])
            slot.release()
            if end.code is not None:
                await self._close(end.code, end.reason)
        finally:
            # Also when the server cancels this task: the thread frees what it holds by itself.
            self._finish(_GONE)
            self._outbox.close()
            self._abort()
            slot.release()
            self._cancel_tasks()
            writer.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the connection."""
        task = self._loop.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """A bug in one of the tasks must not leave the others, and the slot, waiting."""
        try:
            await work
        except Exception:
            _log.exception("%s: the connection failed", self._id)
            self._outbox.close()
            self._finish(End("fault", CLOSE_FAULT, "the server failed"))

    def _finish(self, end: End) -> None:
        """The first end counts."""
        if not self._end.done():
            self._end.set_result(end)

    def _close_by(self, error: ClientError) -> None:
        """End the connection where the error says so."""
        if error.close is not None:
            name = "limit" if error.close == CLOSE_LIMIT else "fault"
            self._finish(End(name, error.close, error.message.splitlines()[0]))

    @property
    def _ended(self) -> bool:
        return self._end.done()

    async def _free(self) -> None:
        """Bounded, so that a stage that hangs does not keep the slot."""
        self._cancel_tasks()
        self._abort()
        if self._freed is not None:
            try:
                await asyncio.wait_for(self._freed.wait(), self._limits.teardown_s)
            except asyncio.TimeoutError:
                _log.warning("%s: its stages have not freed it within %g s", self._id, self._limits.teardown_s)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _close(self, code: int, reason: str) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._websocket.close(code, reason[:120]), 1.0)

    # -- the socket and the clock

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
            await self._take_text(message.get("text"))

    async def _take_text(self, text: str | None) -> None:
        event_id = None
        try:
            if text is None:
                raise ClientError("invalid_request", "binary messages are not understood; send JSON in text messages")
            message = parse_message(text)
            event_id = event_id_of(message)
            await self._take(message, event_id)
        except ClientError as error:
            error.event_id = error.event_id or event_id
            await self._tell(error)
        except Exception:
            _log.exception("%s: a message could not be handled", self._id)
            await self._tell(ClientError("inference_error", "the server failed", event_id=event_id, close=CLOSE_FAULT))

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

    async def _watch(self) -> None:
        was_working = False
        while True:
            now = self._loop.time()
            # Work that ended since the last look may have ended just now.
            if self._working or was_working:
                self._heard = now
            was_working = self._working
            by, error = self._due
            if now >= by:
                await self._tell(ClientError("invalid_request", error, close=CLOSE_LIMIT))
                return
            await asyncio.sleep(min(by - now, 1.0))


def to_text(message: JsonObject) -> str:
    """A message as it goes over the wire."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))
