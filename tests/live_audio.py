"""Sound for live transcriptions: samples of a frame, of a turn's first message, and of a second."""

from __future__ import annotations

import numpy as np

FRAME = 1280
FIRST = 256
RATE = 16000


def samples(messages: int) -> np.ndarray:
    """As many as fill so many messages to the actor."""
    return np.zeros(FIRST + (messages - 1) * FRAME, np.float32)
