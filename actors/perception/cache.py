"""State of one FastConformer stream: mel frames in any portions, encoder frames as soon as they are complete."""

from __future__ import annotations

import mlx.core as mx

from vcpipe.actors.perception.config import SUBSAMPLING
from vcpipe.actors.perception.fastconformer import FastConformer, subsampled_length, window_mask
from vcpipe.schemas.errors import SessionClosedError

#: Mel frames before a chunk that its first encoder frame reaches back to (14), in whole encoder frames.
_MEL_CONTEXT = 2 * SUBSAMPLING

#: Encoder frames that go through the blocks at once where a whole waveform is encoded: memory grows with this and the
#: result, not with the square of the length.
WHOLE_CHUNK_FRAMES = 256


class EncoderStream:
    """Incremental encoder of one stream; joined outputs equal the encoder over the whole input.

    ``chunk_frames``: encoder frames a push computes at once, where it has the mel frames for them. ``positions``: of
    ``encoder.project_positions(chunk_frames)``, to be made once for many streams. Time and memory of a push do not depend on
    what came before it.
    """

    def __init__(
        self, encoder: FastConformer, *, chunk_frames: int = 1, positions: list[mx.array] | None = None
    ) -> None:
        if chunk_frames < 1:
            raise ValueError(f"chunk_frames must be at least 1, not {chunk_frames}")
        config = encoder.config
        self._encoder = encoder
        self._chunk_frames = chunk_frames
        self._positions = encoder.project_positions(chunk_frames) if positions is None else positions
        self._caches = encoder.empty_caches()
        self._pending = mx.zeros((1, 0, config.feat_in))
        self._mel_tail = self._pending  # mel frames that were encoded and are context of the next ones
        self._consumed = 0  # mel frames encoded so far, the tail's included
        self._emitted = 0  # encoder frames so far
        self._seen = 0  # encoder frames in the window, at most left_context
        self._mask_for = (chunk_frames, self._seen)
        self._mask = window_mask(chunk_frames, config.left_context, self._seen)
        self._closed = False

    @property
    def state(self) -> list[mx.array]:
        """All arrays the stream holds. To be evaluated with every output, so that no graph outlives its frame."""
        return [self._pending, self._mel_tail, self._mask, *(array for cache in self._caches for array in cache)]

    @property
    def nbytes(self) -> int:
        """Size of the state."""
        return sum(array.nbytes for array in self.state)

    def push(self, mel: mx.array, *, final: bool = False, emit_partial: bool = False) -> mx.array:
        """(1, T, features) -> the encoder frames now complete, (1, n, d_model), n may be 0. Not evaluated.

        Frame j is complete with mel frame 8j; chunks wait for 8 mel frames a frame, so normally it is emitted with mel frame
        8j + 7. ``emit_partial`` encodes all that was pushed up to the last frame begun: right where it ends on a mel frame 8j.
        ``final`` does the same and closes the stream.
        """
        if self._closed:
            raise SessionClosedError("the encoder stream has had its final push")
        self._closed = final
        pending = mx.concatenate([self._pending, mel], axis=1)
        chunk_mel = self._chunk_frames * SUBSAMPLING
        encoded = []
        while pending.shape[1] >= chunk_mel or (pending.shape[1] and (final or emit_partial)):
            chunk, pending = pending[:, :chunk_mel], pending[:, chunk_mel:]
            to_the_end = (final or emit_partial) and not pending.shape[1]
            encoded += self._encode(self._subsample(chunk, to_the_end))
        self._pending = pending
        if not encoded:
            return mx.zeros((1, 0, self._encoder.config.d_model))
        return encoded[0] if len(encoded) == 1 else mx.concatenate(encoded, axis=1)

    def _subsample(self, chunk: mx.array, to_the_end: bool) -> mx.array:
        """Mel frames -> the subsampled frames, (1, n, d_model), that they complete or, ``to_the_end``, begin."""
        window = mx.concatenate([self._mel_tail, chunk], axis=1)
        window_start = (self._consumed - self._mel_tail.shape[1]) // SUBSAMPLING
        self._consumed += chunk.shape[1]
        end = window_start + subsampled_length(window.shape[1]) if to_the_end else self._consumed // SUBSAMPLING
        frames = self._encoder.pre_encode(window, self._emitted - window_start, end - window_start)
        self._emitted = max(self._emitted, end)
        # The window must begin on the grid of encoder frames, or the strides of the convolutions fall out of step.
        self._mel_tail = window[:, -(_MEL_CONTEXT + (self._consumed - _MEL_CONTEXT) % SUBSAMPLING) :]
        return frames

    def _encode(self, frames: mx.array) -> list[mx.array]:
        """(1, n, d_model) through the blocks, at most ``chunk_frames`` at a time. The last chunk of a stream may need two."""
        encoded = []
        for start in range(0, frames.shape[1], self._chunk_frames):
            x = frames[:, start : start + self._chunk_frames]
            x, self._caches = self._encoder.encode(x, self._caches, *self._window(x.shape[1]))
            encoded.append(x)
        return encoded

    def _window(self, frames: int) -> tuple[list[mx.array], mx.array]:
        """Positions and mask of the next ``frames`` frames, fewer than ``chunk_frames`` in the last chunk."""
        left = self._encoder.config.left_context
        if self._mask_for != (frames, self._seen):
            self._mask_for = (frames, self._seen)
            self._mask = window_mask(frames, left, self._seen)
        self._seen = min(self._seen + frames, left)
        missing = self._chunk_frames - frames
        if not missing:
            return self._positions, self._mask
        return [positions[..., missing:-missing] for positions in self._positions], self._mask


def encode_whole(encoder: FastConformer, mel: mx.array) -> mx.array:
    """(1, T, features) -> (1, subsampled_length(T), d_model), evaluated: all frames of a waveform."""
    length = mel.shape[1]
    chunk_frames = min(subsampled_length(length), WHOLE_CHUNK_FRAMES)
    stream = EncoderStream(encoder, chunk_frames=chunk_frames)
    encoded = []
    for start in range(0, length, chunk_frames * SUBSAMPLING):
        stop = start + chunk_frames * SUBSAMPLING
        encoded.append(stream.push(mel[:, start:stop], final=stop >= length))
        mx.eval(encoded[-1], stream.state)
    return mx.concatenate(encoded, axis=1)
