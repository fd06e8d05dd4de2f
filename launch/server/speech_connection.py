"""``/v1/audio/speech/stream``: text in pieces -> sound, turn after turn over one WebSocket.

Beside the tasks of every connection, the voice's *thread* speaks. Each message with sound has a number, and the client
acknowledges numbers: so the voice is never further ahead than the client allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.websockets import WebSocket

from vcpipe.launch.server.client_connection import ClientConnection, End, Limits, to_text
from vcpipe.launch.server.engine import Engine
from vcpipe.launch.server.native import error_message
from vcpipe.launch.server.protocol import (
    ClientError,
    JsonObject,
    audio_to_base64,
    shown,
    stamped,
    whole_number,
)
from vcpipe.launch.server.session_thread import first_line
from vcpipe.launch.server.speech_metrics import SpeechMetrics
from vcpipe.launch.server.speech_request import check_model, check_voice, checked_text, ignored_of, seed_of
from vcpipe.launch.server.speech_thread import SpeechLimits, SpeechThread, TurnLimitError
from vcpipe.launch.server.speech_turn import SpokenTurn
from vcpipe.launch.server.speech_window import AckWindow
from vcpipe.schemas.geometry import FrameGeometry
from vcpipe.schemas.speech import SpeechChunk

_STATUS = {"done": "completed", "cancelled": "cancelled"}
_FIELDS = frozenset({"model", "seed", "window", "speed"})


@dataclass(slots=True)
class _Watched:
    """A turn, and what stops the watch at its first sound."""

    turn: SpokenTurn
    hear: Callable[[], None]


class SpeechConnection(ClientConnection):
    """One client that holds a slot."""

    def __init__(
        self,
        websocket: WebSocket,
        session_id: str,
        engine: Engine,
        metrics: SpeechMetrics,
        limits: Limits,
        speech_limits: SpeechLimits,
    ) -> None:
        super().__init__(websocket, session_id, limits)
        self._engine = engine
        self._metrics = metrics
        self._speech_limits = speech_limits
        self._thread = SpeechThread(engine, self, speech_limits, session_id)
        self._seed = 0
        self._window = AckWindow(speech_limits.window)
        #: Turns that are written, wait or are spoken, oldest first.
        self._turns: dict[str, _Watched] = {}
        #: A turn that failed while its text was still coming: the rest of it is refused.
        self._lost: SpokenTurn | None = None
        self._handlers: dict[str, Callable[[JsonObject], Coroutine[Any, Any, None]]] = {
            "session.update": self._configure,
            "session.ping": self._ping,
            "input_text.append": self._append,
            "input_text.done": self._end_text,
            "input_text.commit": self._end_text,
            "speech.cancel": self._cancel,
            "response.cancel": self._cancel,
            "speech.audio.ack": self._acknowledge,
        }

    # -- as every connection

    async def _greet(self) -> None:
        self._thread.start(early=True)
        await self._say("session.created", session=self._session())

    async def _take(self, message: JsonObject, event_id: str | None) -> None:
        kind = message.get("type")
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        if handler is None:
            raise ClientError("invalid_request", f"unsupported event type {shown(kind)}", param="type")
        await handler(message)

    async def _tell(self, error: ClientError, turn: SpokenTurn | None = None) -> None:
        self._metrics.error(error.code)
        message = error_message(error) | ({} if turn is None else {"turn_id": turn.id})
        await self._outbox.put(to_text(message))
        self._close_by(error)

    @property
    def _working(self) -> bool:
        watched = next(iter(self._turns.values()), None)
        return watched is not None and not watched.turn.resting

    def _count_end(self, end: End) -> None:
        self._drop_turns(end.name)

    def _abort(self) -> None:
        self._drop_turns("disconnected")
        self._thread.abandon()

    @property
    def _freed(self) -> asyncio.Event:
        return self._thread.done

    def _drop_turns(self, end: str) -> None:
        """Cancel every turn; the client is told nothing more of them."""
        for watched in self._turns.values():
            self._thread.cancel(watched.turn)
            self._metrics.turn_ended(end)
        self._turns.clear()
        self._window.wake()

    async def _say(self, kind: str, *, stale_on_cancel: bool = False, **fields: Any) -> None:
        await self._outbox.put(to_text(stamped(kind, **fields)), stale_on_cancel=stale_on_cancel)

    # -- what a client sends

    def _session(self, ignored: tuple[str, ...] = ()) -> JsonObject:
        geometry = FrameGeometry()
        return {
            "id": self._id,
            "type": "speech",
            "model": self._engine.model,
            "output_audio_format": {"type": "pcm16", "sample_rate": geometry.output_sample_rate},
            "frame_samples": geometry.output_samples,
            "seed": self._seed,
            "window": self._window.size,
            "max_seconds": self._speech_limits.turn_s,
            "ignored_fields": list(ignored),
        }

    async def _configure(self, message: JsonObject) -> None:
        """For the turns that are begun from now on."""
        session = message.get("session", {})
        if not isinstance(session, dict):
            raise ClientError("invalid_request", "session must be an object", param="session")
        most = self._speech_limits.window
        try:
            check_model(session, self._engine.model)
            check_voice(session)
            seed = seed_of(session, self._seed)
            window = whole_number(session.get("window", self._window.size))
            if window is None or not 1 <= window <= most:
                text = f"window must be a whole number from 1 to {most}, not {shown(session['window'])}"
                raise ClientError("invalid_request", text, param="window")
        except ClientError as error:
            error.param = f"session.{error.param}"
            raise
        self._seed, self._window.size = seed, window
        self._window.wake()
        await self._say("session.updated", session=self._session(ignored_of(session, _FIELDS)))

    async def _ping(self, message: JsonObject) -> None:
        await self._say("session.pong")

    async def _append(self, message: JsonObject) -> None:
        text = checked_text(message.get("text"), "text")
        if self._lost is not None:
            wrong = "the turn has failed; send input_text.done or speech.cancel, then the next turn's text"
            raise ClientError("invalid_request", wrong, param="type")
        open_turn = self._open_turn
        expected = 0 if open_turn is None else open_turn.appends
        sequence = message.get("sequence", expected)
        if whole_number(sequence) != expected:
            wrong = f"sequence must be {expected}, not {shown(sequence)}; nothing of this append was taken"
            raise ClientError("invalid_request", wrong, param="sequence")
        waiting = sum(watched.turn.characters_waiting for watched in self._turns.values())
        if waiting + len(text) > (most := self._speech_limits.characters):
            wrong = f"{waiting} characters wait, at most {most} may; nothing of this append was taken"
            raise ClientError("inference_error", wrong, param="text")
        turn = self._new_turn() if open_turn is None else open_turn
        turn.append(text)
        if open_turn is None:
            self._thread.put(turn)
        await self._say(
            "input_text.appended",
            turn_id=turn.id,
            sequence=expected,
            characters_waiting=waiting + len(text),
        )

    async def _end_text(self, message: JsonObject) -> None:
        turn, self._lost = self._lost or self._open_turn, None
        if turn is None:
            raise ClientError("invalid_request", "no text was appended since the last input_text.done", param="type")
        turn.end()
        await self._say("input_text.committed", turn_id=turn.id, appends=turn.appends)

    async def _cancel(self, message: JsonObject) -> None:
        """Drop every turn, that which is spoken and those that wait."""
        if not self._turns and self._lost is None:
            raise ClientError("invalid_request", "nothing is being spoken", param="type")
        self._lost = None
        await self._drop_all("cancelled")

    async def _acknowledge(self, message: JsonObject) -> None:
        sequence = whole_number(message.get("sequence"))
        sent = self._window.sent
        if sequence is None or not 0 <= sequence < sent:
            known = f"the last number sent is {sent - 1}" if sent else "no audio was sent yet"
            text = f"sequence {shown(message.get('sequence'))} cannot be acknowledged; {known}"
            raise ClientError("invalid_request", text, param="sequence")
        self._window.acknowledge(sequence)

    # -- turns

    @property
    def _open_turn(self) -> SpokenTurn | None:
        """The turn that text is appended to."""
        watched = next(reversed(self._turns.values()), None)
        return None if watched is None or watched.turn.ended else watched.turn

    def _new_turn(self) -> SpokenTurn:
        if len(self._turns) >= (most := self._speech_limits.turns):
            text = f"{most} turns wait to be spoken; nothing of this append was taken"
            raise ClientError("inference_error", text, param="text")
        turn = SpokenTurn(self._seed)
        self._turns[turn.id] = _Watched(turn, self._metrics.first_sound())
        return turn

    async def _drop_all(self, end: str) -> None:
        dropped = list(self._turns.values())
        for watched in dropped:
            self._thread.cancel(watched.turn)
        self._turns.clear()
        self._outbox.drop_stale()
        self._window.forget()
        for watched in dropped:
            await self._tell_end(watched, end)

    async def _tell_end(self, watched: _Watched, end: str) -> None:
        self._metrics.turn_ended(end)
        turn = watched.turn
        status = _STATUS.get(end, "failed")
        if status == "failed" and not turn.ended:
            self._lost = turn
        await self._say("speech.audio.done", turn_id=turn.id, status=status, frames=turn.frames)

    # -- what the thread tells

    async def take_sound(self, turn: SpokenTurn, chunk: SpeechChunk) -> None:
        """Send it as soon as the client has room."""
        watched = self._turns.get(turn.id)
        if watched is None or not await self._has_room(turn):
            return
        watched.hear()
        await self._say(
            "speech.audio.delta",
            stale_on_cancel=True,
            turn_id=turn.id,
            sequence=self._window.number(),
            frame_index=chunk.frame_index,
            delta=audio_to_base64(chunk.samples),
            format="pcm16",
            sample_rate=FrameGeometry().output_sample_rate,
            channels=1,
        )

    async def _has_room(self, turn: SpokenTurn) -> bool:
        """Wait until the window has room; False where the turn is over. Who acknowledges nothing for long loses its turns."""
        try:
            return await self._window.room(lambda: turn.cancelled or self._ended, self._speech_limits.stall_s)
        except asyncio.TimeoutError:
            await self._give_up(turn)
            return False

    async def _give_up(self, turn: SpokenTurn) -> None:
        text = (
            f"{self._window.unacknowledged} messages with audio are not acknowledged and none was for "
            f"{self._speech_limits.stall_s:g} s; send speech.audio.ack. The speech was dropped"
        )
        await self._tell(ClientError("inference_error", text), turn)
        await self._drop_all("limit")

    async def turn_ended(self, turn: SpokenTurn, error: Exception | None) -> None:
        """Tell the turn's end; that of a cancelled one was told."""
        watched = self._turns.pop(turn.id, None)
        if watched is None or self._ended:
            return
        if error is not None:
            await self._tell(ClientError("inference_error", first_line(error)), turn)
        limit = isinstance(error, TurnLimitError)
        await self._tell_end(watched, "done" if error is None else "limit" if limit else "fault")
