"""Input for measurements: deterministic, never silent, of any length."""

from __future__ import annotations

import numpy as np


def noise_frames(count: int, frame_samples: int, seed: int = 0) -> np.ndarray:
    """(count, frame_samples) float32 of quiet noise."""
    rng = np.random.default_rng(seed)
    return (0.05 * rng.standard_normal((count, frame_samples))).astype(np.float32)
