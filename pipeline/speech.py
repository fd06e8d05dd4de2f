"""Speech turns across pipes: text is paced here, tts and codec make the frames. Each turn is a session of the pipeline."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence
from typing import Literal

from vcpipe.pipeline.session import SessionCommands
from vcpipe.pipeline.tracks import Delivery, FrameTiming, FrameTrack
from vcpipe.pipeline.turn import Turn
from vcpipe.schemas.errors import StageTimeoutError, VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.messages import TextStep
from vcpipe.schemas.speech import SpeechChunk

#: What the codec decodes in its own process is always exact.
WINDOWED_REASON = (
    "overlap_frames must be 0 here: the codec's process decodes every frame with its whole past; "
    "the windowed decode is for speech in one process"
)


class SpeechTrack(FrameTrack):
    """Frames here are text ids; they leave as the credit allows, however fast that is."""

    message = TextStep


class PipeEngine:
    """Has frames made by the pipeline. See :class:`vcpipe.actors.speech.turns.SpeechEngine`.

    What tts and codec are given runs ahead of the caller, within the session's credit.
    """

    def __init__(
        self,
        open_turn: Callable[[int], Turn[SpeechTrack]],
        commands: SessionCommands,
        window: int,
        step_timeout_s: float,
    ) -> None:
        """``open_turn``: seed -> a session that tts and codec hold."""
        self._open_turn = open_turn
        self._commands = commands
        self._window = window
        self._timeout_s = step_timeout_s
        self._turn: Turn[SpeechTrack] | None = None
        self._stopped = True
        #: Id of the last turn that is known to be freed.
        self._freed = ""

    @property
    def ahead(self) -> int:
        return self._window

    def start(self, seed: int) -> None:
        self._turn = self._open_turn(seed)
        self._stopped = False

    def queue(self, ids: Sequence[int]) -> None:
        if not self._stopped:
            self._commands.feed(self._current.id, list(ids))

    def take(self) -> list[SpeechChunk]:
        turn = self._current
        frames = []
        while not (self._stopped or turn.deliveries.empty()):
            if isinstance(frame := self._take(turn, turn.deliveries.get()), SpeechChunk):
                frames.append(frame)
        return frames

    def wait(self) -> SpeechChunk | None:
        turn = self._current
        while True:
            try:
                delivery = turn.deliveries.get(timeout=self._timeout_s)
            except queue.Empty:
                waits = turn.track.describe_wait()
                raise StageTimeoutError(f"speech {turn.id}: no frame within {self._timeout_s:g} s; {waits}") from None
            taken = self._take(turn, delivery)
            if isinstance(taken, SpeechChunk):
                return taken
            if taken == "over":
                return None

    def finish(self) -> None:
        """Nothing: no frame waits for another one."""

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            # Where the pipeline is lost, the turn is too. A wait in another thread gets "cancelled".
            with contextlib.suppress(VcpipeError):
                self._commands.cancel(self._current.id)

    def close(self) -> None:
        """Return once both stages have freed the last turn (bounded)."""
        self.stop()
        turn, self._turn = self._turn, None
        while turn is not None and turn.id != self._freed:
            try:
                if turn.deliveries.get(timeout=self._timeout_s) == "ended":
                    return
            except queue.Empty:
                raise StageTimeoutError(f"speech {turn.id} was not freed within {self._timeout_s:g} s") from None

    @property
    def _current(self) -> Turn[SpeechTrack]:
        assert self._turn is not None, "start() comes first"
        return self._turn

    def _take(self, turn: Turn[SpeechTrack], delivery: Delivery) -> SpeechChunk | Literal["over"] | None:
        if isinstance(delivery, VcpipeError):
            raise delivery
        if isinstance(delivery, FrameTiming):
            turn.track.frames_taken += 1
        elif delivery == "ended":
            self._freed = turn.id
            return "over"
        elif isinstance(delivery, Event) and delivery.kind == "cancelled":
            return "over"
        elif isinstance(delivery, Event) and delivery.kind == "audio":
            assert delivery.samples is not None and delivery.audio_codes is not None
            return SpeechChunk(delivery.frame_index, delivery.samples, delivery.audio_codes[None])
        return None
