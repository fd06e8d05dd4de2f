"""Transcription over a WebSocket: turns one after the other on one live session of the perception stage.

A turn is an item: it begins with its first audio, its text comes while it is spoken, a commit ends it, and the audio of the
next one may follow at once. The session hears some silence after it, for the last word.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from vcpipe.launch.server.client_connection import End
from vcpipe.launch.server.connection import Connection
from vcpipe.launch.server.engine import ServedPipeline
from vcpipe.launch.server.pcm_buffer import PcmBuffer
from vcpipe.launch.server.protocol import (
    CLOSE_DONE,
    CLOSE_FAULT,
    Append,
    Clear,
    Cleared,
    ClientError,
    Command,
    Commit,
    Phase,
    TranscriptionReady,
    TurnBegan,
    TurnCommitted,
    TurnDone,
    TurnFailed,
    TurnText,
)
from vcpipe.launch.server.session_input import MAX_WAITING_S
from vcpipe.launch.server.session_thread import SessionThread, Work, first_line
from vcpipe.pipeline.transcription import TAIL_SILENCE_S, LiveTranscription
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.streaming import TranscriptDelta

#: Most turns that a client may have under way.
_MAX_TURNS = 64
#: How often a session is looked at where no text comes, in seconds.
_GLANCE_S = 0.05


@dataclass(slots=True)
class _Turn:
    """``audio``: what the session was not given yet; ``samples``: of the whole turn so far."""

    item_id: str
    previous_id: str | None
    audio: PcmBuffer = field(default_factory=PcmBuffer)
    samples: int = 0
    committed: bool = False
    closed: bool = False
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _TurnOver:
    """The session has worked off its turn, of so many encoder frames, or dropped it (None)."""

    frames: int | None


class _NextTurn:
    """The session is ready for another turn."""


_FromThread = TranscriptDelta | _TurnOver | _NextTurn


class TranscriptionConnection(Connection):
    """The client of a transcription, and the listener of its session's thread."""

    task = "transcription"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._session: LiveTranscription | None = None
        self._turns: deque[_Turn] = deque()  # the first one is the session's, if it is ready; the last one the client's
        self._ready = False
        self._hungry = False  # audio waits for room; the thread reads this and the next one
        self._stopped = False
        self._last_committed: str | None = None
        self._frames_done = 0

    @property
    def _session_phase(self) -> Phase | None:
        return None if self._session is None else "open"

    @property
    def _is_worked_on(self) -> bool:
        return bool(self._turns) and (self._turns[0].committed or len(self._turns[0].audio) > 0)

    def _abort(self) -> None:
        self._stopped = True
        self._drop_turn()

    def _drop_turn(self) -> None:
        """Let the session forget its turn. Where that fails its thread tells why."""
        self._ready = False
        if self._session is not None and not self._session.done:
            with contextlib.suppress(VcpipeError):
                self._session.cancel()

    # -- commands

    async def _drive(self, command: Command, event_id: str | None) -> None:
        if isinstance(command, Append):
            await self._append(command.pcm)
        elif isinstance(command, Clear):
            if self._turns and not self._turns[-1].committed:
                self._turns.pop()
                # Unless it is ready the session has nothing of that turn, and another one must not be hit.
                if self._ready and not self._turns:
                    self._drop_turn()
            await self._say(Cleared())
        elif isinstance(command, Commit):
            turn = await self._begun_turn()
            await self._say(TurnCommitted(turn.item_id, turn.previous_id))
            # Only now, or the end of the turn might be told first.
            self._last_committed, turn.committed = turn.item_id, True
        self._feed()

    async def _append(self, pcm: np.ndarray) -> None:
        if not len(pcm):
            return
        session = self._session
        assert session is not None
        rate = session.input_sample_rate
        if sum(len(turn.audio) for turn in self._turns) + len(pcm) > MAX_WAITING_S * rate:
            text = f"more than {MAX_WAITING_S:g} s of audio would wait; nothing of this append was taken"
            raise ClientError("inference_error", text, param="audio")
        turn = await self._begun_turn()
        taken = pcm[: max(int(self._limit_s * rate) - turn.samples, 0)]
        turn.audio.put(taken)
        turn.samples += len(taken)
        if len(taken) < len(pcm):
            self._feed()
            raise ClientError("inference_error", f"a turn is limited to {self._limit_s:g} s; commit or clear it")

    async def _begun_turn(self) -> _Turn:
        """The turn that was not committed yet; a new one where there is none."""
        if not self._turns or self._turns[-1].committed:
            if len(self._turns) >= _MAX_TURNS:
                raise ClientError("inference_error", f"{_MAX_TURNS} turns wait already; wait for their transcripts")
            turn = _Turn(f"item_{secrets.token_hex(8)}", self._last_committed)
            self._turns.append(turn)
            await self._say(TurnBegan(turn.item_id, turn.previous_id))
        return self._turns[-1]

    async def _cancel(self) -> None:
        if self._ended:
            return
        self._abort()
        self._outbox.drop_stale()
        await self._say(Event("cancelled", self._frames_done))
        self._finish(End("cancelled", CLOSE_DONE))

    def _feed(self) -> None:
        """Hand the session what it has room for, and the end of its turn."""
        session, self._hungry = self._session, False
        if session is None or not self._ready or not self._turns or self._turns[0].closed:
            return
        turn = self._turns[0]
        # Where the session has ended, its thread tells what happened.
        with contextlib.suppress(VcpipeError):
            while len(turn.audio) and (room := session.room):
                session.feed(turn.audio.take(room))
            if turn.committed and not len(turn.audio):
                session.close()
                turn.closed = True
        self._hungry = len(turn.audio) > 0

    # -- the session's thread

    def _make_thread(self, pipeline: ServedPipeline) -> SessionThread[LiveTranscription, _FromThread]:
        open_session = partial(pipeline.open_transcription, tail_s=TAIL_SILENCE_S)
        work = Work(open_session, self._read_turns, lambda session: session.cancel())
        return SessionThread(work, self, self._id)

    def _read_turns(self, session: LiveTranscription) -> Iterator[Sequence[_FromThread]]:
        """On the thread. Texts as they come; nothing at all from time to time while audio waits for room."""
        while not self._stopped:
            while not session.done and not self._stopped:
                deltas = session.poll(_GLANCE_S)
                if deltas or self._hungry:
                    yield deltas
            if not self._stopped:
                yield [_TurnOver(session.frames)]
            if not self._stopped:
                session.reset()
                yield [_NextTurn()]

    async def opened(self, session: LiveTranscription) -> None:
        """Tell the effective values, then take what came meanwhile."""
        if self._ended:
            return
        await self._say(TranscriptionReady(self._id, self._engine.model, self._limit_s, self._wish.ignored))
        self._session = session
        self._ready = not self._stopped
        await self._take_early()

    async def take_events(self, events: Sequence[_FromThread]) -> None:
        """Say what came; go on with the next turn."""
        for event in events:
            if self._ended:
                return
            if isinstance(event, _NextTurn):
                self._ready = True
            elif self._ready:  # else it is of a turn that was dropped
                await self._take_of_turn(event)
        self._feed()

    async def _take_of_turn(self, event: TranscriptDelta | _TurnOver) -> None:
        turn = self._turns[0]
        if isinstance(event, TranscriptDelta):
            turn.texts.append(event.text)
            await self._say(TurnText(turn.item_id, event))
            return
        assert event.frames is not None and self._session is not None
        self._ready = False
        self._turns.popleft()
        self._frames_done += event.frames
        seconds = turn.samples / self._session.input_sample_rate
        await self._say(TurnDone(turn.item_id, turn.previous_id, "".join(turn.texts), event.frames, seconds))

    async def failed(self, error: Exception) -> None:
        """The session, or all of them, is lost."""
        self._ready = False
        lost = ClientError("inference_error", first_line(error), close=CLOSE_FAULT)
        turns, self._turns = self._turns, deque()
        for turn in turns:
            await self._say(TurnFailed(turn.item_id, lost))
        await self._say(lost)
