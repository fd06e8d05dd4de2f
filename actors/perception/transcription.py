"""Live transcription: PCM of any chunk size in, text out, in bounded steps and bounded memory.

Beside a voice-chat session, which hears a frame 80 ms late and ends where its caller ends it, a transcription hears a frame as
soon as its last mel frame is complete, and its end is flushed, so that the last words are decoded. Both run the same compiled
step.

The text does not depend on how the samples were cut. The encoder frames of the tail are encoded one at a time, so that none
sees one after it: with them the stream equals the encoder over the whole waveform.
"""

from __future__ import annotations

from collections import deque
from threading import Lock

import mlx.core as mx
import numpy as np

from vcpipe.actors.perception.config import SUBSAMPLING
from vcpipe.actors.perception.live import FrameStep
from vcpipe.actors.perception.mel import MelStream
from vcpipe.actors.perception.rnnt import GreedyDecoder, Scored, Transducer
from vcpipe.actors.perception.transcript import PieceTable
from vcpipe.actors.stage import Emitter
from vcpipe.schemas.errors import BacklogError, FrameContractError, SessionClosedError
from vcpipe.schemas.geometry import MAX_BACKLOG_S
from vcpipe.schemas.messages import PcmFrame
from vcpipe.schemas.reports import Transcribed, Transcript
from vcpipe.schemas.streaming import TranscriptDelta, check_decode_tokens, checked_pcm


class FlushedStream:
    """Samples in, scored encoder frames out, one at a time and each as soon as it is complete; the end can be flushed.

    T mel frames give as many encoder frames as the encoder over the whole waveform, 1 + ceil((T - 1) / 8).
    """

    def __init__(self, step: FrameStep) -> None:
        self._step = step
        self._log_mel = step.log_mel
        self._mel = MelStream(step.log_mel)
        self._start: list[np.ndarray] | None = []  # samples of the first two mel frames, until they are complete
        self._rows = np.zeros((0, step.log_mel.config.n_fft), np.float32)  # windowed samples of mel frames not used yet
        self._mel_frames = 0
        self._state = step.empty_state()
        self.frames = 0
        self.flushed = False

    @property
    def due(self) -> bool:
        """Whether an encoder frame is complete: frame j with mel frame 8j, the last one with the end."""
        return len(self._rows) >= (SUBSAMPLING if self.frames else 1) or (self.flushed and len(self._rows) > 0)

    @property
    def state_bytes(self) -> int:
        """What the stream holds."""
        return self._state.nbytes + self._rows.nbytes + 4 * self._mel.buffered_samples

    def push(self, samples: np.ndarray, *, final: bool) -> None:
        """Take samples, (n,) float32; ``final`` closes the stream. Without any sample in all its time it gives no frame."""
        if self._start is not None:
            # The mel stream gives its first frame other last bits where that is due alone: no cut shall change a bit.
            self._start.append(samples)
            samples = np.concatenate(self._start)
            mel = self._log_mel.config
            if samples.size < mel.half_samples + mel.hop_samples and not final:
                return
            self._start = None
        segment = self._mel.take(samples, final=final)
        if segment.size:
            rows = self._log_mel.windowed(segment)
            self._rows = np.concatenate([self._rows, rows])
            self._mel_frames += len(rows)
        self.flushed = final

    def next_frame(self, from_prediction: mx.array) -> Scored:
        """Encode the frame that is due and score it beside a prediction."""
        taken = SUBSAMPLING if self.frames else 1
        rows, self._rows = self._rows[:taken], self._rows[taken:]
        heard, self._state = self._step.hear(self.frames, rows, self._state, from_prediction, self._mel_frames)
        self.frames += 1
        return heard.scored


class TranscriptionSession:
    """A :class:`vcpipe.schemas.streaming.StreamingSession` in the process of the model.

    ``feed`` and ``close`` may run on a producer's thread; everything else belongs to the thread that loaded the model. It keeps
    at most 30 s of queued samples, the state of the encoder and of the decoder, and no text.
    """

    def __init__(self, step: FrameStep, transducer: Transducer, pieces: PieceTable) -> None:
        config = step.config
        self.input_sample_rate = config.mel.sample_rate
        self._step = step
        self._transducer = transducer
        self._pieces = pieces
        self._chunk_samples = config.frame_samples
        self._frame_duration_s = config.frame_samples / config.mel.sample_rate
        self._max_queued = int(MAX_BACKLOG_S * config.mel.sample_rate)
        self._lock = Lock()  # guards the queue and the flags, never a step of the model
        self.reset()

    def reset(self) -> None:
        """Back to the initial state, for the next turn. Not while a step runs."""
        with self._lock:
            self._queue: deque[np.ndarray] = deque()
            self._queued = 0
            self._closed = False
            self._done = False
        self._stream = FlushedStream(self._step)
        self._decoder = GreedyDecoder(self._transducer)
        self._has_text = False

    # -- the producer's side

    def feed(self, samples: np.ndarray) -> None:
        """See StreamingSession. SessionClosedError (a RuntimeError) after close, BacklogError (a BufferError) beyond 30 s."""
        pcm = checked_pcm(samples)
        with self._lock:
            if self._closed:
                raise SessionClosedError("the transcription is closed; reset it or create another one")
            if self._queued + pcm.size > self._max_queued:
                raise BacklogError(
                    f"{self._queued} samples wait and {pcm.size} more were fed; at most {self._max_queued} "
                    f"({MAX_BACKLOG_S:.0f} s) may wait. Nothing of this chunk was taken"
                )
            if pcm.size:
                self._queue.append(pcm.copy())
                self._queued += pcm.size

    def close(self) -> None:
        """See StreamingSession."""
        with self._lock:
            self._closed = True

    # -- the model's side

    @property
    def done(self) -> bool:
        """See StreamingSession."""
        return self._done

    @property
    def waiting(self) -> bool:
        """Whether a step would have something to do now."""
        if self._done:
            return False
        return self._queued > 0 or self._closed or self._stream.due or not self._decoder.finished

    @property
    def frames(self) -> int:
        """Encoder frames so far."""
        return self._stream.frames

    @property
    def state_bytes(self) -> int:
        """What the session holds, the queue among it."""
        return self._stream.state_bytes + 4 * self._queued

    def step(self, *, max_decode_tokens: int = 4) -> list[str]:
        """Take in at most one encoder frame's samples, then decode at most one encoder frame; see :meth:`advance`."""
        return [delta.text for delta in self.advance(max_decode_tokens)]

    def advance(self, max_decode_tokens: int) -> list[TranscriptDelta]:
        """As :meth:`step`, with the frames. ``max_decode_tokens``: evaluations of the joint network, blanks among them.

        So a step of silence is bounded like one of speech; the encoder's work, one frame, comes on top.
        """
        check_decode_tokens(max_decode_tokens)
        if self._done:
            return []
        if self._decoder.finished:
            if not self._stream.due and not self._stream.flushed:
                self._ingest()
            if self._stream.due:
                self._decoder.begin(self._stream.next_frame(self._decoder.from_prediction))
        deltas = self._decode(max_decode_tokens)
        if self._stream.flushed and not self._stream.due and self._decoder.finished:
            self._done = True
        return deltas

    def cancel(self) -> None:
        """Drop everything: closed and done, without a last word. Not while a step runs."""
        self.reset()
        with self._lock:
            self._closed = self._done = True

    def _ingest(self) -> None:
        """Push what is queued, at most one encoder frame's samples."""
        parts, room = [], self._chunk_samples
        with self._lock:
            while self._queue and room:
                head = self._queue.popleft()
                if head.size > room:
                    self._queue.appendleft(head[room:])
                    head = head[:room]
                parts.append(head)
                room -= head.size
                self._queued -= head.size
            final = self._closed and not self._queue
        if parts or final:
            self._stream.push(np.concatenate([np.zeros(0, np.float32), *parts]), final=final)

    def _decode(self, evaluations: int) -> list[TranscriptDelta]:
        deltas = []
        while evaluations and not self._decoder.finished:
            token = self._decoder.evaluate()
            evaluations -= 1
            text = None if token is None else self._pieces.text(token)
            if text and not self._has_text:
                text = text.lstrip()
            if text:
                self._has_text = True
                deltas.append(TranscriptDelta.of_frame(text, self._stream.frames - 1, self._frame_duration_s))
        return deltas


class ActorTranscription:
    """A :class:`TranscriptionSession` as the session of an actor: the loop feeds it, and it reports to the coordinator.

    One message of samples, at most one encoder frame's, is one unit of work.
    """

    def __init__(self, session: TranscriptionSession, frame_samples: int, max_symbols: int) -> None:
        self._session = session
        self._frame_samples = frame_samples
        self._evaluations = max_symbols + 1  # a whole frame

    def prefill(self) -> None:
        """Nothing comes before the first frame."""

    def step(self, message: PcmFrame, emit: Emitter) -> None:
        """Decode the frames that are complete with these samples. FrameContractError for too many samples."""
        if message.samples.size > self._frame_samples:
            raise FrameContractError(
                f"perception got {message.samples.size} samples of a transcription, expected at most {self._frame_samples}"
            )
        self._session.feed(message.samples)
        self._work(emit)

    def end(self, emit: Emitter) -> None:
        """Decode the tail and say how many encoder frames there were."""
        self._session.close()
        self._work(emit)
        emit.report(Transcribed(self._session.frames))

    def _work(self, emit: Emitter) -> None:
        with emit.span("perception"):
            while self._session.waiting:
                deltas = self._session.advance(self._evaluations)
                if deltas:
                    text = "".join(delta.text for delta in deltas)
                    emit.report(Transcript(text), frame_index=deltas[0].frame_index)
