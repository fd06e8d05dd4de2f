"""PCM that a client sent and the model was not given yet."""

from __future__ import annotations

from collections import deque

import numpy as np


class PcmBuffer:
    """A queue of float32 samples; what is put in is not copied until it is taken."""

    def __init__(self) -> None:
        self._pieces: deque[np.ndarray] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def put(self, pcm: np.ndarray) -> None:
        """Append (n,) samples."""
        if len(pcm):
            self._pieces.append(pcm)
            self._length += len(pcm)

    def take(self, count: int) -> np.ndarray:
        """The first ``count`` samples, or as many as there are."""
        taken: list[np.ndarray] = []
        while count > 0 and self._pieces:
            piece = self._pieces.popleft()
            if len(piece) > count:
                self._pieces.appendleft(piece[count:])
                piece = piece[:count]
            taken.append(piece)
            count -= len(piece)
            self._length -= len(piece)
        return np.concatenate(taken) if taken else np.zeros(0, np.float32)

    def drop_tail(self, count: int) -> None:
        """Forget the last ``count`` samples."""
        while count > 0 and self._pieces:
            piece = self._pieces.pop()
            kept = piece[: max(len(piece) - count, 0)]
            count -= len(piece) - len(kept)
            self._length -= len(piece)
            self.put(kept)

    def clear(self) -> int:
        """Forget everything; returns how many samples that were."""
        forgotten = self._length
        self._pieces.clear()
        self._length = 0
        return forgotten
