"""16-bit PCM, as it goes into files and over the wire."""

from __future__ import annotations

import numpy as np


def pcm16(samples: np.ndarray) -> bytes:
    """Float samples -> little-endian int16: clipped to [-1, 1], times 32767, rounded half to even."""
    return np.rint(np.clip(samples, -1.0, 1.0) * 32767).astype("<i2").tobytes()
