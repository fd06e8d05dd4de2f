"""Frames of a session as they arrive: 1280 samples in, one encoded frame out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from vcpipe.actors.compiled import compiled
from vcpipe.actors.perception.cache import Positions
from vcpipe.actors.perception.config import SUBSAMPLING, PerceptionConfig
from vcpipe.actors.perception.fastconformer import MEL_WINDOW, BlockCache, alive
from vcpipe.actors.perception.kernels import Position
from vcpipe.actors.perception.mel import LogMel, MelStream
from vcpipe.actors.perception.networks import Perception
from vcpipe.actors.perception.rnnt import Scored, Transducer
from vcpipe.actors.product import product

#: Mel frames that the subsampling reads before those of the present frame.
_MEL_TAIL = MEL_WINDOW - SUBSAMPLING


class Heard(NamedTuple):
    """One frame, evaluated: projected (1, 1, output_dim), encoded (1, d_model), and its score for the transcript."""

    projected: mx.array
    encoded: mx.array
    scored: Scored


class Perceiver(Protocol):
    """Hears one stream."""

    def __call__(self, samples: np.ndarray, from_prediction: mx.array) -> Heard:
        """The next frame's samples, and what the transcript so far contributes to scoring the frame it gives."""


class _State(NamedTuple):
    """What a stream carries from frame to frame; new arrays every time."""

    mel: mx.array  # (7, features)
    rings: list[BlockCache]

    @property
    def nbytes(self) -> int:
        """Size of the arrays."""
        return self.mel.nbytes + sum(array.nbytes for ring in self.rings for array in ring)


class FrameStep:
    """The whole way from windowed samples to a scored frame as one compiled function of arrays, for any number of streams.

    It has one shape: what the first frames of a stream lack is masked, and what its last one lacks.
    """

    def __init__(
        self, config: PerceptionConfig, log_mel: LogMel, perception: Perception, transducer: Transducer
    ) -> None:
        self.config = config
        self.log_mel = log_mel
        self._perception = perception
        self._transducer = transducer
        self._positions = Positions(config.encoder)
        # Frame 0 of a stream hears one mel frame, its newest, the last one those that are left, and frames 0 and 1 the padding
        # before the stream.
        self._first_due = mx.array([[0.0]] * (SUBSAMPLING - 1) + [[1.0]])
        self._due = [mx.array([[1.0]] * count + [[0.0]] * (SUBSAMPLING - count)) for count in range(SUBSAMPLING + 1)]
        self._alive = [alive(frame) for frame in range(3)]
        self._run = compiled(self._frame)
        mx.eval(self._first_due, self._due, self._alive)

    def empty_state(self) -> _State:
        """State before the first frame."""
        mel = mx.zeros((_MEL_TAIL, self.config.mel.features))
        return _State(mel, self._perception.encoder.empty_rings())

    def __call__(
        self, frame: int, segment: np.ndarray, state: _State, from_prediction: mx.array
    ) -> tuple[Heard, _State]:
        """``segment``: of :meth:`MelStream.take`, one mel frame for ``frame`` 0 and eight for every other."""
        rows = self.log_mel.windowed(segment)
        assert len(rows) == (SUBSAMPLING if frame else 1)
        return self.hear(frame, rows, state, from_prediction)

    def hear(
        self, frame: int, rows: np.ndarray, state: _State, from_prediction: mx.array, mel_frames: int | None = None
    ) -> tuple[Heard, _State]:
        """``rows``: of :meth:`LogMel.windowed`, (1, n_fft) for ``frame`` 0 and (8, n_fft) for every other.

        Fewer than eight are the last of a stream of ``mel_frames``.
        """
        count, due, inside = len(rows), self._first_due, self._alive[min(frame, 2)]
        if frame:
            due = self._due[count]
            inside = inside if count == SUBSAMPLING else alive(frame, mel_frames)
        if count < SUBSAMPLING:
            missing = np.zeros((SUBSAMPLING - count, rows.shape[1]), np.float32)
            rows = np.concatenate([rows, missing] if frame else [missing, rows])
        projected, encoded, scored, mel, rings = self._run(
            mx.array(rows),
            due,
            inside,
            self._positions[frame],
            state,
            from_prediction,
        )
        mx.eval(projected, encoded, scored, mel, rings)
        return Heard(projected, encoded, scored), _State(mel, rings)

    def _frame(
        self,
        windowed: mx.array,
        due: mx.array,
        alive: tuple[mx.array, mx.array],
        position: Position,
        state: _State,
        from_prediction: mx.array,
    ) -> tuple[mx.array, mx.array, Scored, mx.array, list[BlockCache]]:
        mel, rings = state
        mel = mx.concatenate([mel, self.log_mel.log_mel(windowed) * due])  # (15, features)
        x = self._perception.encoder.pre_encode.step(mel, alive)
        # A compiled function is given tuples without names.
        encoded, rings = self._perception.encoder.step(x, rings, Position(*position))
        scored = self._transducer.score(encoded, from_prediction)
        return product(encoded, self._perception.proj)[None], encoded, scored, mel[SUBSAMPLING:], rings


class CachedPerception:
    """Hears a stream from the state of the frames before; constant work.

    A frame is heard one frame late: its centre is the beginning of the samples just pushed, which only then are its future.
    """

    def __init__(self, step: FrameStep) -> None:
        self._step = step
        self._mel = MelStream(step.log_mel, lookahead_samples=step.config.frame_samples)
        self._state = step.empty_state()
        self._frames = 0

    def __call__(self, samples: np.ndarray, from_prediction: mx.array) -> Heard:
        """See :class:`Perceiver`."""
        heard, self._state = self._step(self._frames, self._mel.take(samples), self._state, from_prediction)
        self._frames += 1
        return heard

    @property
    def state_bytes(self) -> int:
        """What the stream holds."""
        return self._state.nbytes + 4 * self._mel.buffered_samples


class WindowPerception:
    """Hears a stream from the last frames' samples alone, all recomputed for every frame: diagnostic, slow.

    Not equal to the cached way once the window is full: there the past reaches further, layer by layer.
    ``perceive_whole``: samples -> projected and encoded of all their frames.
    """

    def __init__(
        self,
        config: PerceptionConfig,
        perceive_whole: Callable[[np.ndarray], tuple[mx.array, mx.array]],
        transducer: Transducer,
    ) -> None:
        self._perceive_whole = perceive_whole
        self._transducer = transducer
        self._frames: deque[np.ndarray] = deque(maxlen=max(2, config.encoder.left_context + 1))

    def __call__(self, samples: np.ndarray, from_prediction: mx.array) -> Heard:
        """See :class:`Perceiver`."""
        self._frames.append(samples.copy())  # a received array is a view of its message
        projected, encoded = self._perceive_whole(np.concatenate(self._frames))
        # The last frame is centred on the end of the samples, so half of what it hears is a mirror image.
        projected, encoded = projected[:, -2:-1], encoded[0, -2:-1]
        scored = self._transducer.score(encoded, from_prediction)
        mx.eval(projected, encoded, scored)
        return Heard(projected, encoded, scored)
