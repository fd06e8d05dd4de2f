"""Speech turns: ``reset_turn -> push_text / push_text_tokens -> end_text -> drain -> next``, and ``close``.

:class:`SpeechTurns` knows the order of calls, the pacing of text and when a turn is over. Where frames are made, in this
process or in others, is the business of its :class:`SpeechEngine`: the calls and the sound are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from vcpipe.actors.speech.frames import FrameText, TextFrames
from vcpipe.schemas.config import check_seed
from vcpipe.schemas.errors import BacklogError, SessionClosedError, TurnError, VcpipeError
from vcpipe.schemas.speech import SpeechChunk, SpeechOptions, check_rejected

#: ``speak`` takes text in pieces of so many characters and no further one while so many frames wait.
_PIECE, _WAITING = 100, 64

#: Frames after the text at which a turn ends that does not fall silent (4 s).
MAX_STEPS = 50


class SpeechEngine(Protocol):
    """Makes the frames of one turn at a time, in order."""

    @property
    def ahead(self) -> int:
        """Frames that should be queued for the next one to come soon."""

    def start(self, seed: int) -> None:
        """Begin a turn: the voice prompt is taken in, random numbers begin with ``seed``."""

    def queue(self, ids: Sequence[int]) -> None:
        """Text ids of the next frames."""

    def take(self) -> list[SpeechChunk]:
        """The frames that are there without waiting for others, one a chunk. In one process: all that can be made."""

    def wait(self) -> SpeechChunk | None:
        """The next frame; None where the turn was stopped. Bounded: StageTimeoutError."""

    def finish(self) -> None:
        """Nothing more is queued in this turn: let no frame wait for others."""

    def stop(self) -> None:
        """Drop the turn with everything that is queued, at once. From any thread; idempotent."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class _Turn:
    """One turn on its way."""

    def __init__(self, text: FrameText, options: SpeechOptions, silence_level: float) -> None:
        self.text = text
        self._options = options
        self._silence_level = silence_level
        self.queued = 0
        self.read = 0
        #: Frame of EOS, once the text has ended.
        self.end: int | None = None
        #: Whether no more frames are to be queued.
        self.finished = False
        self.stopped = False
        self._silent = 0
        self._joined: list[SpeechChunk] = []

    @property
    def fell_silent(self) -> bool:
        return self._silent >= self._options.silence_frames

    def accept(self, frame: SpeechChunk) -> list[SpeechChunk]:
        """Count a frame; the chunk that it fills."""
        self.read += 1
        if self.end is not None and frame.frame_index >= self.end:
            level = float(np.sqrt(np.mean(np.square(frame.samples, dtype=np.float64))))
            self._silent = self._silent + 1 if level <= self._silence_level else 0
        self._joined.append(frame)
        return self.tail() if len(self._joined) == self._options.chunk_frames else []

    def tail(self) -> list[SpeechChunk]:
        """The frames that do not fill a chunk yet, as one."""
        parts, self._joined = self._joined, []
        if len(parts) <= 1:
            return parts
        samples, codes = (np.concatenate([getattr(part, name) for part in parts]) for name in ("samples", "codes"))
        return [SpeechChunk(parts[0].frame_index, samples, codes)]


class SpeechTurns:
    """Text in, sound out, turn by turn. A context manager that drops an unfinished turn and closes.

    For one thread; :meth:`cancel` may come from any. Every call returns the chunks that became available; a call out of
    order is a TurnError, every call after :meth:`close` a SessionClosedError.
    """

    def __init__(self, engine: SpeechEngine, new_text: TextFrames, options: SpeechOptions) -> None:
        self.options = options
        self._engine = engine
        self._new_text = new_text
        self._pad = new_text.pad
        level = options.silence_level
        self._silence_level = new_text.pacing.silence_level if level is None else level
        self._turn: _Turn | None = None
        self._closed = False

    # -- the order of calls

    def reset_turn(self, *, seed: int | None = None, **rejected: Any) -> None:
        """Begin a turn. The same seed (default: that of the options) and text give the same bytes.

        TurnError while a turn is not drained; ValueError for options this model has not, with the reason.
        """
        self._check_open()
        if self._turn is not None and not self._turn.stopped:
            raise TurnError("the turn before is not drained; drain() or cancel() it first")
        check_rejected(rejected)
        if rejected:
            raise TypeError(f"reset_turn() has no option {next(iter(rejected))!r}; accepted: seed")
        seed = self.options.seed if seed is None else seed
        check_seed(seed)
        self._engine.start(seed)
        self._turn = _Turn(self._new_text(), self.options, self._silence_level)

    def push_text(self, text: str) -> list[SpeechChunk]:
        """Text to speak, in pieces of any size: how it is cut makes no difference to what is said.

        BacklogError (a BufferError) where more than ``max_pending_frames`` would wait: nothing of ``text`` was taken.
        """
        return self._push(lambda words: words.push_text(text))

    def push_text_tokens(self, ids: Iterable[int], *, paced: bool = True) -> list[SpeechChunk]:
        """Ids of the checkpoint's tokenizer, past the segmenter. ``paced=False``: one a frame, PAD included, as they are.

        ValueError for ids outside the vocabulary; BacklogError as :meth:`push_text`.
        """
        return self._push(lambda words: words.push_ids(ids, paced))

    def rest(self) -> list[SpeechChunk]:
        """No text for the moment: what was said so far is spoken to its end, and the voice waits in silence.

        Complete words are let go, PAD is fed until their sound is over. The start of a word is kept. A second call without new
        text does nothing. BacklogError as :meth:`push_text`.
        """
        return self._push(lambda words: words.rest())

    def end_text(self) -> list[SpeechChunk]:
        """No more text in this turn. A second call does nothing."""
        turn = self._active("end_text")
        if turn.end is None:
            self._queue(turn, lambda words: words.end(), bounded=False)
            turn.end = turn.queued - 1
        return self._taken(turn)

    def drain(self, max_steps: int = MAX_STEPS) -> list[SpeechChunk]:
        """The rest of the turn's sound, see :meth:`audio`."""
        return list(self.audio(max_steps))

    def audio(self, max_steps: int = MAX_STEPS) -> Iterator[SpeechChunk]:
        """Yield the rest of the turn's sound as it comes.

        After its text a turn goes on until it has been silent for ``silence_frames``, ``max_steps`` frames at most.
        TurnError before :meth:`end_text`.
        """
        turn = self._active("drain")
        if turn.end is None:
            raise TurnError("the turn's text has not ended; call end_text() before drain()")
        if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 0:
            raise ValueError(f"max_steps must be an integer from 0 on, not {max_steps!r}")
        return self._audio(turn, turn.end + 1 + max_steps)

    def speak(self, texts: Iterable[str], max_steps: int = MAX_STEPS) -> Iterator[SpeechChunk]:
        """Text of any length, no faster than it is spoken, to the end of the turn; yields the sound as it comes.

        ``texts`` is asked for more where little waits. Where it has none yet, an empty text lets the sound that is there out.
        """
        for text in texts:
            for start in range(0, max(len(text), 1), _PIECE):
                yield from self.push_text(text[start : start + _PIECE])
                yield from self._until_few_wait()
        yield from self.end_text()
        yield from self.audio(max_steps)

    def poll(self) -> list[SpeechChunk]:
        """What became available since the last call; never waits for a frame."""
        return self._taken(self._active("poll"))

    @property
    def frames_waiting(self) -> int:
        """Frames of the turn that are under way; 0 outside a turn."""
        turn = self._turn
        return 0 if turn is None or turn.stopped else turn.queued - turn.read

    def wait(self) -> list[SpeechChunk]:
        """Wait for the next frame that is under way. Nothing where none is, or where the turn was cancelled meanwhile."""
        turn = self._active("wait")
        if self.options.overlap_frames:
            return self._taken(turn)  # in this process, and by whole chunks: nothing to wait for
        frame = self._failing(turn, self._engine.wait) if turn.queued > turn.read else None
        return [] if frame is None else turn.accept(frame)

    def cancel(self) -> None:
        """Drop the turn at once: a drain on its way ends, the next turn may begin. Without a turn nothing happens."""
        self._check_open()
        turn = self._turn  # which another thread may just be done with
        if turn is not None:
            turn.stopped = True
            self._engine.stop()

    def close(self) -> list[SpeechChunk]:
        """Drain an unfinished turn, then free everything. Idempotent."""
        if self._closed:
            return []
        try:
            if self._turn is None or self._turn.stopped:
                return []
            return self.end_text() + self.drain()
        finally:
            self._close()

    def __enter__(self) -> SpeechTurns:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed:
            return
        try:
            self.cancel()
            self._close()
        except VcpipeError:
            if error is None:
                raise

    # -- inside

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("the speech session is closed; open another one")

    def _active(self, call: str) -> _Turn:
        self._check_open()
        if self._turn is None:
            raise TurnError(f"{call}() outside a turn; call reset_turn() first")
        if self._turn.stopped:
            raise TurnError(f"{call}() in a turn that was cancelled or failed; call reset_turn() first")
        return self._turn

    def _push(self, lay: Callable[[FrameText], list[int]]) -> list[SpeechChunk]:
        turn = self._active("push_text")
        if turn.end is not None:
            raise TurnError("the turn's text has ended; drain() it and call reset_turn() for the next one")
        self._queue(turn, lay)
        return self._taken(turn)

    def _queue(self, turn: _Turn, lay: Callable[[FrameText], list[int]], bounded: bool = True) -> None:
        """Lay text on frames and queue them: all of it or, where too much would wait, nothing."""
        text = turn.text.copy()
        ids = lay(text)
        waiting, most = turn.queued - turn.read, self.options.max_pending_frames
        if bounded and waiting + len(ids) > most:
            raise BacklogError(
                f"{waiting} frames wait and {len(ids)} more were pushed; at most {most} (max_pending_frames) may wait. "
                "Nothing of this text was taken"
            )
        turn.text = text
        self._send(turn, ids)

    def _send(self, turn: _Turn, ids: Sequence[int]) -> None:
        if ids:
            turn.queued += len(ids)
            self._engine.queue(ids)

    def _taken(self, turn: _Turn) -> list[SpeechChunk]:
        return [chunk for frame in self._failing(turn, self._engine.take) for chunk in turn.accept(frame)]

    def _until_few_wait(self) -> Iterator[SpeechChunk]:
        turn = self._active("speak")
        while turn.queued - turn.read > max(_WAITING, self._engine.ahead):
            if (frame := self._failing(turn, self._engine.wait)) is None:
                return
            yield from turn.accept(frame)

    def _audio(self, turn: _Turn, most: int) -> Iterator[SpeechChunk]:
        while not (turn.stopped or turn.fell_silent or turn.read >= most):
            ahead = min(most, turn.read + self._engine.ahead) - turn.queued
            self._send(turn, [self._pad] * ahead)
            if turn.queued >= most and not turn.finished:
                turn.finished = True
                self._engine.finish()
            frame = self._failing(turn, self._engine.wait)
            if frame is None or turn.stopped:
                break
            yield from turn.accept(frame)
        if not turn.stopped:
            # Over, before the last chunk is out of hand: its reader may stop reading.
            self._engine.stop()
            self._turn = None
            yield from turn.tail()

    def _failing(self, turn: _Turn, call: Callable[[], Any]) -> Any:
        """What ``call`` returns; where it fails, the turn is over."""
        try:
            return call()
        except BaseException:
            turn.stopped = True
            self._engine.stop()
            raise

    def _close(self) -> None:
        self._closed = True
        self._turn = None
        self._engine.close()
