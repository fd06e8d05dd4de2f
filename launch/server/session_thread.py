"""The thread of one session: opens it, reads it to the end, closes it. The event loop waits for nothing of that."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol

from vcpipe.launch.server.engine import ServedPipeline
from vcpipe.pipeline.session import VoiceChatSession
from vcpipe.schemas.config import SessionOptions
from vcpipe.schemas.errors import StageTimeoutError, VcpipeError
from vcpipe.schemas.events import TERMINAL_KINDS, Event

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Whom a session's thread tells; all of it runs on the event loop, and the thread waits for it."""

    async def opened(self, session: VoiceChatSession) -> None:
        """Every stage has the session."""

    async def open_failed(self, error: Exception) -> None:
        """There is no session."""

    async def take_events(self, events: list[Event]) -> None:
        """The events of one frame, or of the session's end."""

    async def failed(self, error: Exception) -> None:
        """The session ended by an error."""


class SessionThread:
    """Runs from :meth:`start` until the stages have freed the session; ``done`` is set then."""

    def __init__(self, pipeline: ServedPipeline, options: SessionOptions, listener: Listener, name: str) -> None:
        self._pipeline = pipeline
        self._options = options
        self._listener = listener
        self._name = name
        self._loop = asyncio.get_running_loop()
        self.done = asyncio.Event()

    def start(self) -> None:
        """Begin. A daemon: a stage that hangs must not keep the server from ending."""
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(_LoopEnded):
            try:
                session = self._pipeline.open_session(self._options)
            except Exception as error:
                self._log_bug(error)
                self._on_loop(self._listener.open_failed(error))
            else:
                self._hold(session)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.done.set)

    def _hold(self, session: VoiceChatSession) -> None:
        try:
            self._on_loop(self._listener.opened(session))
            for events in _frames(session):
                self._on_loop(self._listener.take_events(events))
        except _LoopEnded:
            pass
        except Exception as error:
            self._log_bug(error)
            self._on_loop(self._listener.failed(error))
        finally:
            try:
                session.close()
            except Exception as error:
                _log.info("%s: %s", self._name, error)

    def _log_bug(self, error: Exception) -> None:
        if not isinstance(error, (VcpipeError, ValueError)):
            _log.error("%s: the session failed", self._name, exc_info=error)

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        """Run on the event loop and wait for it: a client that does not read holds its own session back."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise _LoopEnded from None
        try:
            future.result()
        except concurrent.futures.CancelledError:
            raise _LoopEnded from None


class _LoopEnded(Exception):
    """The server has ended."""


def _frames(session: VoiceChatSession) -> Iterator[list[Event]]:
    """The events of each frame, its audio last, until the session's end; a client that sends nothing for long is no error.

    They come at once, so nothing waits for its frame's end, and a frame costs one change of threads.
    """
    events: list[Event] = []
    while True:
        try:
            for event in session.events():
                events.append(event)
                if event.kind == "audio" or event.kind in TERMINAL_KINDS:
                    yield events
                    events = []
            return
        except StageTimeoutError:
            if session.closed or session.frames_fed > session.frames_done:
                raise
