"""Decoding chunk by chunk without a stream's state: every chunk with some frames before it, which are then discarded."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from vcpipe.actors.codec.model import Codec


class WindowedDecoder:
    """Codes of consecutive frames -> their samples, a chunk at a time, as many samples as frames.

    Only the codes of the last ``overlap_frames`` frames are carried from chunk to chunk. A chunk is decoded behind them, so
    that its first samples have a past. The sound of these frames themselves is discarded, not blended with what the chunk
    before made of them, which is nearer to the full decode. Where the overlap covers the decoder's whole past, the samples
    are those of the stateful decode (the full one, 8 samples late).
    """

    def __init__(self, codec: Codec, chunk_frames: int, overlap_frames: int) -> None:
        if not 0 <= overlap_frames < chunk_frames:
            raise ValueError(
                f"overlap_frames must be from 0 to chunk_frames - 1 ({chunk_frames - 1}), not {overlap_frames}"
            )
        self._codec = codec
        self._chunk_frames = chunk_frames
        self._overlap_frames = overlap_frames
        self._past: list[np.ndarray] = []
        self._waiting: list[np.ndarray] = []

    def push(self, codes: np.ndarray) -> list[np.ndarray]:
        """(Q,) codes of a frame -> the samples of each frame of the chunk that it fills, (samples,) float32 each."""
        self._waiting.append(codes)
        return self.flush() if len(self._waiting) == self._chunk_frames else []

    def flush(self) -> list[np.ndarray]:
        """The samples of the frames that wait, also where they fill no chunk."""
        if not self._waiting:
            return []
        chunk, self._waiting = self._waiting, []
        window = [*self._past, *chunk]
        samples, _ = self._codec.decode_step(mx.array(np.stack(window, axis=-1))[None], {})
        frames = np.array(samples[0, 0]).reshape(len(window), -1)[len(self._past) :]
        self._past = window[len(window) - min(self._overlap_frames, len(window)) :]
        return list(frames)
