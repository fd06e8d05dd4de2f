"""Live transcription across pipes: the interface of a session in the model's process, for any thread of any caller."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Lock
from types import TracebackType
from typing import Any

import numpy as np

from vcpipe.pipeline.session import SessionCommands
from vcpipe.pipeline.tracks import Delivery, FrameTiming, FrameTrack
from vcpipe.pipeline.turn import Turn
from vcpipe.schemas.errors import BacklogError, FrameContractError, SessionClosedError, StageTimeoutError, VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import MAX_BACKLOG_S, FrameGeometry
from vcpipe.schemas.reports import Transcribed, Transcript
from vcpipe.schemas.streaming import TranscriptDelta, check_decode_tokens, checked_pcm

#: Silence to hear after a turn's end, in seconds: a causal recogniser says a word up to half a second after its end.
TAIL_SILENCE_S = 0.64

#: Longest wait of a step for what is on its way.
_STEP_WAIT_S = 0.05


class TranscriptionTrack(FrameTrack):
    """Frames here are messages of samples. Text comes under its encoder frame, which may have another index."""

    _last_frame = -1
    _encoded_frames: int | None = None

    def collect(self, frame_index: int, report: Any, now_ns: int) -> None:
        if isinstance(report, Transcript):
            if frame_index <= self._last_frame:
                raise FrameContractError(
                    f"perception sent text of encoder frame {frame_index} after that of frame {self._last_frame}"
                )
            self._last_frame = frame_index
            self._deliver(Event("user_transcript_delta", frame_index, delta=report.delta))
        elif isinstance(report, Transcribed):
            self._encoded_frames = report.frames
        else:
            super().collect(frame_index, report, now_ns)

    def finish(self) -> None:
        if self._encoded_frames is None:
            raise FrameContractError("perception ended a transcription without its number of encoder frames")
        self._deliver(Event("done", self._encoded_frames))


class LiveTranscription:
    """A :class:`vcpipe.schemas.streaming.StreamingSession`. Made by ``Pipeline.open_transcription``.

    ``feed``, ``close`` and ``cancel`` never wait and may run on any thread; ``step``, ``deltas``, ``poll`` and ``reset``
    belong to one consumer. It keeps no text. A context manager that cancels what has not ended.
    """

    def __init__(
        self,
        open_turn: Callable[[], Turn[TranscriptionTrack]],
        commands: SessionCommands,
        geometry: FrameGeometry,
        first_chunk_samples: int,
        step_timeout_s: float,
        tail_s: float,
    ) -> None:
        """``first_chunk_samples``: of the first message. With every other one, of a frame's samples, a frame is complete."""
        self.input_sample_rate = geometry.input_sample_rate
        self._open_turn = open_turn
        self._commands = commands
        self._geometry = geometry
        self._first_chunk = first_chunk_samples
        self._timeout_s = step_timeout_s
        self._tail_samples = int(tail_s * geometry.input_sample_rate)
        self._max_queued = int(MAX_BACKLOG_S * geometry.input_sample_rate)
        self._lock = Lock()  # guards what the producer and the consumer share, never a wait
        self._begin(open_turn())

    def _begin(self, turn: Turn[TranscriptionTrack]) -> None:
        self._turn = turn
        self._pending = np.zeros(0, np.float32)
        self._chunks_fed = 0
        self._samples_fed = 0
        self._audio_samples = 0  # of them, those that are no silence of the tail
        self._closed = False
        self._done = False
        self._error: VcpipeError | None = None
        self._frames: int | None = None
        self._heard_at = time.monotonic()

    # -- the producer's side

    def feed(self, samples: Any) -> None:
        """See StreamingSession. SessionClosedError (a RuntimeError) after close, BacklogError (a BufferError) beyond 30 s."""
        pcm = checked_pcm(samples)
        with self._lock:
            if self._closed:
                raise SessionClosedError("the transcription is closed; reset it or open another one") from self._error
            queued = self._queued()
            if queued + pcm.size > self._max_queued:
                raise BacklogError(
                    f"{queued} samples wait and {pcm.size} more were fed; at most {self._max_queued} "
                    f"({MAX_BACKLOG_S:.0f} s) may wait. Nothing of this chunk was taken"
                )
            self._samples_fed += pcm.size
            self._audio_samples += pcm.size
            self._pending = np.concatenate([self._pending, pcm])
            if chunks := self._cut():
                self._commands.feed(self._turn.id, chunks)

    @property
    def room(self) -> int:
        """So many samples :meth:`feed` would take now."""
        with self._lock:
            return self._max_queued - self._queued()

    def _queued(self) -> int:
        return self._samples_fed - self._samples_in(self._turn.track.frames_done)

    def close(self) -> None:
        """See StreamingSession."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            tail = np.zeros(self._tail_samples if self._samples_fed else 0, np.float32)
            self._samples_fed += tail.size
            self._pending = np.concatenate([self._pending, tail])
            chunks = self._cut()
            if self._pending.size:
                chunks.append(self._pending)
                self._pending = self._pending[:0]
            if chunks:
                self._commands.feed(self._turn.id, chunks)
            self._commands.finish(self._turn.id)

    # -- the consumer's side

    @property
    def id(self) -> str:
        """Of the present turn: the tap and the listeners of the pipeline name it so."""
        return self._turn.id

    @property
    def done(self) -> bool:
        """See StreamingSession."""
        return self._done

    @property
    def frames(self) -> int | None:
        """Encoder frames of the turn, once it is done; None for one that was cancelled."""
        return self._frames

    @property
    def heard_s(self) -> float:
        """Seconds of input whose texts have all been given: no later one begins before. For the consumer's thread."""
        frames = min(self._turn.track.frames_taken, self._last_frame)
        return max(frames - 1, 0) * self._geometry.frame_duration_s

    def step(self, *, max_decode_tokens: int = 4) -> list[str]:
        """The next texts that came, at most ``max_decode_tokens``: one an encoder frame at most, its tokens joined.

        Waits at most 50 ms, and only where something is on its way. Raises the error that ended the turn, once, and
        StageTimeoutError where the stage does not answer within its bound.
        """
        check_decode_tokens(max_decode_tokens)
        wait_s = _STEP_WAIT_S if self._on_the_way() else 0.0
        return [delta.text for delta in self._receive(max_decode_tokens, wait_s)]

    def deltas(self) -> Iterator[TranscriptDelta]:
        """Texts with their times, as they come, until the turn is done. Errors as :meth:`step`."""
        while not self._done:
            yield from self._receive(1, _STEP_WAIT_S)

    def poll(self, wait_s: float = 0.0) -> list[TranscriptDelta]:
        """The texts that are there now, with their times; where there is none, the first that comes within ``wait_s``.

        Errors as :meth:`step`.
        """
        return self._receive(sys.maxsize, wait_s)

    def cancel(self) -> None:
        """Drop everything at once: closed and done, without a last word."""
        with self._lock:
            self._closed = self._done = True
            self._pending = self._pending[:0]
        self._commands.cancel(self._turn.id)

    def reset(self) -> None:
        """Drop what has not ended and begin the next turn. Waits (bounded) until the stage has opened it."""
        if not self._done:
            self.cancel()
        turn = self._open_turn()
        with self._lock:
            self._begin(turn)

    def __enter__(self) -> LiveTranscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._done:
                self.cancel()
        except VcpipeError:
            if error is None:
                raise

    def _receive(self, max_deltas: int, wait_s: float) -> list[TranscriptDelta]:
        """Texts that are there; where there is none, what comes within ``wait_s``."""
        found: list[TranscriptDelta] = []
        deadline = time.monotonic() + wait_s
        while not self._done and len(found) < max_deltas:
            left = 0.0 if found else deadline - time.monotonic()
            try:
                delivery = self._turn.deliveries.get(timeout=max(left, 0.0))
            except queue.Empty:
                self._check_alive()
                break
            if found and isinstance(delivery, VcpipeError):
                # The texts before it first. It was the last delivery, and is so again.
                self._turn.deliveries.put(delivery)
                break
            if (delta := self._take(delivery)) is not None:
                found.append(delta)
        return found

    def _on_the_way(self) -> bool:
        return self._closed or self._turn.track.frames_taken < self._chunks_fed

    def _check_alive(self) -> None:
        now = time.monotonic()
        if not self._on_the_way():
            self._heard_at = now
        elif now - self._heard_at > self._timeout_s:
            waits = self._turn.track.describe_wait()
            raise StageTimeoutError(f"transcription {self.id}: nothing came within {self._timeout_s:g} s; {waits}")

    def _take(self, delivery: Delivery) -> TranscriptDelta | None:
        self._heard_at = time.monotonic()
        if isinstance(delivery, FrameTiming):
            self._turn.track.frames_taken += 1
        elif isinstance(delivery, VcpipeError):
            self._error = delivery
            self._closed = self._done = True
            raise delivery
        elif isinstance(delivery, Event) and delivery.kind == "user_transcript_delta":
            assert delivery.delta is not None
            return self._delta(delivery.delta, delivery.frame_index)
        elif isinstance(delivery, Event) and delivery.kind == "done":
            self._frames = delivery.frame_index
            self._done = True
        return None

    def _delta(self, text: str, frame_index: int) -> TranscriptDelta:
        """Text of an encoder frame. What comes only in the silence after the end was said in the last frame of the input."""
        said = TranscriptDelta.of_frame(text, min(frame_index, self._last_frame), self._geometry.frame_duration_s)
        return replace(
            said, frame_index=frame_index, end_s=min(said.end_s, self._audio_samples / self.input_sample_rate)
        )

    @property
    def _last_frame(self) -> int:
        """The encoder frame whose time holds the last sample that was fed so far."""
        return -(-self._audio_samples // self._geometry.frame_samples)

    # -- PCM to messages

    def _samples_in(self, chunks: int) -> int:
        """Samples of so many messages, but for a shorter last one."""
        return self._first_chunk + (chunks - 1) * self._geometry.frame_samples if chunks else 0

    def _cut(self) -> list[np.ndarray]:
        """Whole messages from what is pending: each of them completes an encoder frame."""
        chunks = []
        while self._pending.size >= (size := self._geometry.frame_samples if self._chunks_fed else self._first_chunk):
            chunks.append(self._pending[:size])
            self._pending = self._pending[size:]
            self._chunks_fed += 1
        self._pending = self._pending.copy()
        return chunks
