"""The thread of one session: opens it, reads it to the end, frees it. The event loop waits for nothing of that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vcpipe.launch.server.loop_calls import LoopCalls, LoopEnded
from vcpipe.schemas.errors import VcpipeError

S = TypeVar("S")
E = TypeVar("E")
S_in = TypeVar("S_in", contravariant=True)
E_in = TypeVar("E_in", contravariant=True)

_log = logging.getLogger(__name__)


class Listener(Protocol[S_in, E_in]):
    """Whom a session's thread tells; all of it runs on the event loop, and the thread waits for it."""

    async def opened(self, session: S_in) -> None:
        """Every stage has the session."""

    async def open_failed(self, error: Exception) -> None:
        """There is no session."""

    async def take_events(self, events: Sequence[E_in]) -> None:
        """What came at a time."""

    async def failed(self, error: Exception) -> None:
        """The session ended by an error."""


@dataclass(frozen=True, slots=True)
class Work(Generic[S, E]):
    """What a thread does with a session: ``read`` yields what comes until the end, ``free`` comes last in any case."""

    open: Callable[[], S]
    read: Callable[[S], Iterator[Sequence[E]]]
    free: Callable[[S], None]


class SessionThread(Generic[S, E]):
    """Runs from :meth:`start` until the session is freed; ``done`` is set then."""

    def __init__(self, work: Work[S, E], listener: Listener[S, E], name: str) -> None:
        self._work = work
        self._listener = listener
        self._name = name
        self._call = LoopCalls()
        self.done = asyncio.Event()

    def start(self) -> None:
        """Begin. A daemon: a stage that hangs must not keep the server from ending."""
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(LoopEnded):
            try:
                session = self._work.open()
            except Exception as error:
                self._log_bug(error)
                self._call(self._listener.open_failed(error))
            else:
                self._hold(session)
        self._call.tell(self.done)

    def _hold(self, session: S) -> None:
        try:
            self._call(self._listener.opened(session))
            for events in self._work.read(session):
                self._call(self._listener.take_events(events))
        except LoopEnded:
            pass
        except Exception as error:
            self._log_bug(error)
            self._call(self._listener.failed(error))
        finally:
            try:
                self._work.free(session)
            except Exception as error:
                _log.info("%s: %s", self._name, error)

    def _log_bug(self, error: Exception) -> None:
        if not isinstance(error, (VcpipeError, ValueError)):
            _log.error("%s: the session failed", self._name, exc_info=error)


def first_line(error: Exception) -> str:
    """The message without the traceback that may follow it."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
