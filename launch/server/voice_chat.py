"""A conversation over a WebSocket: one session, from the first frame to the commit or the cancel."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from vcpipe.launch.server.client_connection import End, to_text
from vcpipe.launch.server.connection import Connection
from vcpipe.launch.server.engine import ServedPipeline
from vcpipe.launch.server.protocol import (
    CLOSE_DONE,
    CLOSE_FAULT,
    Append,
    Clear,
    Cleared,
    ClientError,
    Command,
    Commit,
    Committed,
    CreateResponse,
    Notice,
    Phase,
    ResponseRequested,
    Updated,
)
from vcpipe.launch.server.reservation import Slot
from vcpipe.launch.server.session_input import SessionInput
from vcpipe.launch.server.session_thread import SessionThread, Work, first_line
from vcpipe.pipeline.session import VoiceChatSession
from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.schemas.config import SessionOptions
from vcpipe.schemas.errors import StageTimeoutError, VcpipeError
from vcpipe.schemas.events import TERMINAL_KINDS, Event


class VoiceChatConnection(Connection):
    """The client of a conversation, and the listener of its session's thread."""

    task = "conversation"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._session: VoiceChatSession | None = None
        self._session_ended = False
        self._input: SessionInput | None = None
        self._cancelled = False
        self._frames_out = 0
        self._deferred: deque[tuple[int, Notice]] = deque()

    async def run(self, slot: Slot) -> None:
        """See :class:`Connection`."""
        try:
            await super().run(slot)
        finally:
            if self._session is not None:
                self._engine.watch_timings(self._session.id, None)

    @property
    def _session_phase(self) -> Phase | None:
        if self._input is None:
            return None
        return "open" if self._input.commit is None else "committed"

    @property
    def _is_worked_on(self) -> bool:
        return self._input is not None and self._input.is_worked_on(self._frames_out)

    def _abort(self) -> None:
        """Cancel the session unless it has ended; where that fails its thread tells why."""
        if self._session is not None and not self._session_ended:
            with contextlib.suppress(VcpipeError):
                self._session.abort()

    # -- commands

    async def _drive(self, command: Command, event_id: str | None) -> None:
        session_input = self._input
        assert session_input is not None
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

    def _make_thread(self, pipeline: ServedPipeline) -> SessionThread[VoiceChatSession, Event]:
        options = SessionOptions(
            system_prompt=self._wish.system_prompt, seed=self._wish.seed, max_streaming_seconds=self._limit_s
        )
        work = Work(lambda: pipeline.open_session(options), _frames, lambda session: session.close())
        return SessionThread(work, self, self._id)

    async def opened(self, session: VoiceChatSession) -> None:
        """Tell the effective values, then take what came meanwhile."""
        if self._ended or self._cancelled:
            session.abort()
            return
        self._session = session
        wish = self._wish
        updated = Updated(
            session_id=self._id,
            model=self._engine.model,
            system_prompt=wish.system_prompt,
            seed=wish.seed,
            max_streaming_seconds=self._limit_s,
            timings=wish.timings,
            geometry=session.geometry,
            ignored=wish.ignored,
        )
        await self._say(updated)
        if wish.timings:
            self._engine.watch_timings(session.id, self._take_timing)
        self._input = SessionInput(session)
        await self._take_early()

    async def take_events(self, events: Sequence[Event]) -> None:
        """Say a frame's events, make room for the next."""
        for event in events:
            if self._ended:
                return
            if event.kind in TERMINAL_KINDS:
                self._session_ended = True
                await self._say(event)
                self._finish(End(event.kind, CLOSE_DONE))
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
                self._outbox.put_now(to_text(message), stale_on_cancel=True)

    async def failed(self, error: Exception) -> None:
        """The session, or all of them, is lost."""
        self._session_ended = True
        await self._say(ClientError("inference_error", first_line(error), close=CLOSE_FAULT))


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
