"""Running a FastConformer: over a whole waveform, or as a stream that gives encoder frames as soon as they are complete."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from vcpipe.actors.perception.config import SUBSAMPLING, EncoderConfig
from vcpipe.actors.perception.fastconformer import (
    HIDDEN,
    MEL_WINDOW,
    FastConformer,
    alive,
    subsampled_length,
    window_mask,
)
from vcpipe.actors.perception.kernels import Position
from vcpipe.schemas.errors import SessionClosedError

#: Encoder frames that go through the blocks at once where a whole waveform is encoded: memory grows with this and the
#: result, not with the square of the length.
WHOLE_CHUNK_FRAMES = 256


def encode_whole(encoder: FastConformer, mel: mx.array) -> mx.array:
    """(1, T, features) -> (1, subsampled_length(T), d_model), evaluated: all frames of a waveform."""
    mel_frames = mel.shape[1]
    frames = subsampled_length(mel_frames)
    chunk_frames = min(frames, WHOLE_CHUNK_FRAMES)
    positions = encoder.project_positions(chunk_frames)
    caches = encoder.empty_caches()
    encoded = []
    for start in range(0, frames, chunk_frames):
        stop = min(start + chunk_frames, frames)
        first = max(start - 2, 0)  # a frame's 15 mel frames begin after the frame two before it
        end = mel_frames if stop == frames else SUBSAMPLING * (stop - 1) + 1
        x = encoder.pre_encode(mel[:, SUBSAMPLING * first : end], start - first, stop - first)
        missing = chunk_frames - (stop - start)
        if missing:
            positions = [layer_positions[:, :, missing:-missing] for layer_positions in positions]
        mask = window_mask(stop - start, encoder.config.left_context, start)
        x, caches = encoder.encode(x, caches, positions, mask)
        mx.eval(x, caches)
        encoded.append(x)
    return mx.concatenate(encoded, axis=1)


class Positions:
    """The :class:`Position` of every frame of any stream, as arrays made once: ``positions[frame]``."""

    def __init__(self, config: EncoderConfig) -> None:
        self._windows = _ring(config.left_context + 1)
        self._taps = _ring(config.conv_kernel_size)
        slots = np.arange(len(self._windows))
        self._masks = [mx.array(np.where(slots > frame, np.float32(HIDDEN), np.float32(0))) for frame in slots]

    def __getitem__(self, frame: int) -> Position:
        window = self._windows[frame % len(self._windows)]
        mask = self._masks[min(frame, len(self._masks) - 1)]
        return Position(*window, mask, *self._taps[frame % len(self._taps)])


class EncoderStream:
    """Incremental encoder of one stream; joined outputs equal :func:`encode_whole` over the whole input.

    Time and memory of a push do not depend on what came before it. ``positions`` may serve many streams.
    """

    def __init__(self, encoder: FastConformer, positions: Positions) -> None:
        self._encoder = encoder
        self._positions = positions
        self._rings = encoder.empty_rings()
        # Mel frames from the first that the next encoder frame reads; before the stream's first there are none.
        self._mel = mx.zeros((MEL_WINDOW - 1, encoder.config.feat_in))
        self._mel_frames = 0
        self._frames = 0
        self._closed = False

    @property
    def state(self) -> list[mx.array]:
        """All arrays the stream holds. To be evaluated with every output, so that no graph outlives its frame."""
        return [self._mel, *(array for ring in self._rings for array in ring)]

    @property
    def nbytes(self) -> int:
        """Size of the state."""
        return sum(array.nbytes for array in self.state)

    def push(self, mel: mx.array, *, final: bool = False, emit_partial: bool = False) -> mx.array:
        """(1, T, features) -> the encoder frames now complete, (1, n, d_model), n may be 0. Not evaluated.

        Frame j is complete with mel frame 8j, but normally emitted with mel frame 8j + 7: mel frames are taken by eights.
        ``emit_partial`` encodes all that was pushed up to the last frame begun: right where it ends on a mel frame 8j.
        ``final`` does the same and closes the stream.
        """
        if self._closed:
            raise SessionClosedError("the encoder stream has had its final push")
        self._closed = final
        self._mel = mx.concatenate([self._mel, mel[0]])
        self._mel_frames += mel.shape[1]
        begun = self._mel_frames and (final or emit_partial)
        due = subsampled_length(self._mel_frames) if begun else self._mel_frames // SUBSAMPLING
        encoded = [self._encode_next() for _ in range(self._frames, due)]
        return mx.stack(encoded, axis=1) if encoded else mx.zeros((1, 0, self._encoder.config.d_model))

    def _encode_next(self) -> mx.array:
        """The next frame, (1, d_model), as if the stream ended with the mel frames pushed."""
        window = self._mel[:MEL_WINDOW]
        window = mx.pad(window, [(0, MEL_WINDOW - len(window)), (0, 0)])
        x = self._encoder.pre_encode.step(window, alive(self._frames, self._mel_frames))
        x, self._rings = self._encoder.step(x, self._rings, self._positions[self._frames])
        self._mel = self._mel[SUBSAMPLING:]
        self._frames += 1
        return x


def _ring(slots: int) -> list[tuple[mx.array, mx.array]]:
    """For every slot, when it is the newest: (slots, 1) bool, true for it, and (slots,) int32, the distances to it."""
    index = np.arange(slots)
    return [
        (mx.array((index == newest)[:, None]), mx.array(((newest - index) % slots).astype(np.int32)))
        for newest in range(slots)
    ]
