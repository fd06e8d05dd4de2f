"""Between the rates of a device and those of the model: one resampler for a whole stream, so that no seam is heard."""

from __future__ import annotations

import numpy as np
import soxr


class Resampler:
    """Mono float32 at ``source_hz`` in, at ``target_hz`` out, in pieces of any size; its state goes on over the seams."""

    def __init__(self, source_hz: float, target_hz: float) -> None:
        self._stream = None if source_hz == target_hz else soxr.ResampleStream(source_hz, target_hz, 1, dtype="float32")

    def push(self, samples: np.ndarray) -> np.ndarray:
        """What can be said so far after (n,) more samples."""
        return samples if self._stream is None else self._stream.resample_chunk(samples)

    def finish(self) -> np.ndarray:
        """The rest; afterwards another stream may begin."""
        if self._stream is None:
            return np.zeros(0, np.float32)
        rest = self._stream.resample_chunk(np.zeros(0, np.float32), last=True)
        self._stream.clear()
        return rest

    def clear(self) -> None:
        """Forget what was pushed."""
        if self._stream is not None:
            self._stream.clear()


class FrameCutter:
    """Cuts pieces of any size into frames of ``size`` samples."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rest = np.zeros(0, np.float32)

    def push(self, samples: np.ndarray) -> list[np.ndarray]:
        """The frames that (n,) more samples complete."""
        pcm = np.concatenate([self._rest, samples])
        count = len(pcm) // self._size
        self._rest = pcm[count * self._size :]
        return [pcm[i * self._size : (i + 1) * self._size] for i in range(count)]

    def finish(self) -> np.ndarray:
        """What fills no frame, perhaps nothing."""
        rest, self._rest = self._rest, self._rest[:0]
        return rest
