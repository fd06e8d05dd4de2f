"""The voice of one client: a thread that speaks turn after turn. The event loop waits for nothing of that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import Protocol, cast

from vcpipe.actors.speech.turns import SpeechTurns
from vcpipe.launch.server.engine import Engine
from vcpipe.launch.server.loop_calls import LoopCalls, LoopEnded
from vcpipe.launch.server.speech_turn import SpokenTurn
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.geometry import FrameGeometry
from vcpipe.schemas.speech import SpeechChunk, SpeechOptions

#: Frames under way at which no more text is taken: what waits as text can still be dropped for nothing.
_AHEAD = 64
#: So long before a listener runs out of sound the voice stops waiting for text; it waits so long at least.
_LEAD_S, _LEAST_S = 0.3, 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SpeechLimits:
    """Bounds of the speech routes.

    ``turn_s``: sound of a turn. ``pause_s``: without text at a turn's beginning, before the words that are there are spoken.
    ``stall_s``: without a sign that the client takes its sound. ``window``: messages with sound that are not acknowledged yet.
    ``characters``, ``turns``: that wait to be spoken.
    """

    turn_s: float = 600.0
    pause_s: float = 0.5
    stall_s: float = 30.0
    window: int = 125
    characters: int = 65_536
    turns: int = 16


class TurnLimitError(VcpipeError):
    """A turn's sound reached its limit."""


class SpeakingPipeline(Protocol):
    """What the speech routes ask of a pipeline."""

    geometry: FrameGeometry

    @property
    def failure(self) -> VcpipeError | None:
        """What ended it."""

    def open_speech(self, options: SpeechOptions) -> SpeechTurns:
        """A voice of its own."""


class SpeechListener(Protocol):
    """Whom the thread tells; all of it runs on the event loop, and the thread waits for it."""

    async def take_sound(self, turn: SpokenTurn, chunk: SpeechChunk) -> None:
        """Sound of the turn; to be ignored where that was cancelled. May take as long as the client wants no more."""

    async def turn_ended(self, turn: SpokenTurn, error: Exception | None) -> None:
        """The last word about a turn. ``error``: what ended it early, None for a cancel too."""


class SpeechThread:
    """Speaks turns in the order of :meth:`put` until :meth:`finish`; ``done`` is set when the stages have freed the last.

    The voice is opened with the first turn, or as soon as :meth:`start` for ``early``; anew where the pipeline was lost.
    """

    def __init__(self, engine: Engine, listener: SpeechListener, limits: SpeechLimits, name: str) -> None:
        self._engine = engine
        self._listener = listener
        self._limits = limits
        self._name = name
        self._call = LoopCalls()
        self._turns: queue.SimpleQueue[SpokenTurn | None] = queue.SimpleQueue()
        #: Guards ``_spoken``: a cancel must not reach the turn after.
        self._lock = threading.Lock()
        self._spoken: tuple[SpokenTurn, SpeechTurns] | None = None
        self._finished = False
        self._pipeline: SpeakingPipeline | None = None
        self._speech: SpeechTurns | None = None
        self._first_sound_s = 0.0
        self.done = asyncio.Event()

    # -- for the event loop

    def start(self, early: bool = False) -> None:
        """Begin. A daemon: a stage that hangs must not keep the server from ending."""
        threading.Thread(target=self._run, args=[early], name=self._name, daemon=True).start()

    def put(self, turn: SpokenTurn) -> None:
        """The turn after those that wait."""
        self._turns.put(turn)

    def cancel(self, turn: SpokenTurn) -> None:
        """Drop a turn at once, spoken or waiting."""
        turn.cancel()
        with self._lock:
            if self._spoken is not None and self._spoken[0] is turn:
                self._spoken[1].cancel()

    def finish(self) -> None:
        """No more turns."""
        self._turns.put(None)

    def abandon(self) -> None:
        """Nobody listens any more; what was put must be cancelled by the caller."""
        self._finished = True
        self.finish()
        self._call.end()

    # -- the thread

    def _run(self, early: bool) -> None:
        with contextlib.suppress(LoopEnded):
            if early:
                with contextlib.suppress(VcpipeError, ValueError):  # told to the first turn
                    self._open()
            while not self._finished and (turn := self._turns.get()) is not None:
                self._speak(turn)
        self._close()
        self._call.tell(self.done)

    def _open(self) -> SpeechTurns:
        if self._pipeline is not None and self._pipeline.failure is not None:
            self._close()
        if self._speech is None:
            self._pipeline = cast(SpeakingPipeline, self._call(self._engine.pipeline()))
            self._speech = self._pipeline.open_speech(SpeechOptions())
        return self._speech

    def _close(self) -> None:
        speech, self._speech = self._speech, None
        try:
            if speech is not None:
                with speech:  # drops what is not over, unlike close()
                    pass
        except Exception as error:
            _log.info("%s: %s", self._name, error)

    def _speak(self, turn: SpokenTurn) -> None:
        error: Exception | None = None
        try:
            if not turn.cancelled:
                self._say(turn, self._open())
        except LoopEnded:
            raise
        except Exception as caught:
            error = None if turn.cancelled else caught
            if not isinstance(caught, (VcpipeError, ValueError)):
                _log.error("%s: the turn failed", self._name, exc_info=caught)
        finally:
            with self._lock:
                self._spoken = None
            if self._speech is not None and (turn.cancelled or error is not None):
                self._speech.cancel()
        self._call(self._listener.turn_ended(turn, error))

    def _say(self, turn: SpokenTurn, speech: SpeechTurns) -> None:
        speech.reset_turn(seed=turn.seed)
        with self._lock:
            if turn.cancelled:
                return
            self._spoken = turn, speech
        while (chunks := self._next(turn, speech)) is not None:
            self._deliver(turn, chunks)
        if not turn.cancelled:
            self._deliver(turn, speech.end_text())
            for chunk in speech.audio():
                self._deliver(turn, [chunk])

    def _next(self, turn: SpokenTurn, speech: SpeechTurns) -> list[SpeechChunk] | None:
        """Take text or wait for a frame; None at the end of the text."""
        if speech.frames_waiting >= _AHEAD:
            return speech.wait()
        text = turn.take()
        if text == "" and speech.frames_waiting:
            return speech.wait()
        if text == "":
            text = turn.take(self._patience_s(turn))
        if text == "":
            chunks = speech.rest()
            turn.resting = not speech.frames_waiting
            return chunks
        turn.resting = False
        return None if text is None else speech.push_text(text)

    def _patience_s(self, turn: SpokenTurn) -> float | None:
        """How long more text may be waited for: until a listener would notice, for ever where it is silent anyway."""
        if turn.resting:
            return None
        if not turn.frames:
            return self._limits.pause_s
        heard_until = self._first_sound_s + turn.frames * FrameGeometry().frame_duration_s
        return max(heard_until - time.monotonic() - _LEAD_S, _LEAST_S)

    def _deliver(self, turn: SpokenTurn, chunks: list[SpeechChunk]) -> None:
        for chunk in chunks:
            if not turn.frames:
                self._first_sound_s = time.monotonic()
            frame_s = FrameGeometry().frame_duration_s
            if (turn.frames + chunk.frames) * frame_s > self._limits.turn_s:
                raise TurnLimitError(f"the turn is limited to {self._limits.turn_s:g} s of sound; it ends here")
            self._call(self._listener.take_sound(turn, chunk))
            turn.frames += chunk.frames
