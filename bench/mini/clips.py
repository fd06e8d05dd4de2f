"""What is done to a synthesiser's sound before it is a clip: another rate, no silence around it, one loudness."""

from __future__ import annotations

import numpy as np
import soxr

from vcpipe.bench.mini.sound import Word

_FADE_S = 0.005

#: Kokoro's word times are late by so much (seen at starts of words after pauses).
_LATE_S = 0.04


def resample(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """(n,) float32 at another rate."""
    return samples if rate == wanted else np.asarray(soxr.resample(samples, rate, wanted), np.float32)


def block(rate: int) -> int:
    """Samples in what is taken for 10 ms."""
    return rate // 100


def loudness(samples: np.ndarray, rate: int) -> np.ndarray:
    """Root mean square of every 10 ms (:func:`block` samples)."""
    hop = block(rate)
    blocks = samples[: len(samples) // hop * hop].reshape(-1, hop)
    return np.asarray(np.sqrt(np.mean(np.square(blocks, dtype=np.float64), axis=1)))


def speech_span(samples: np.ndarray, rate: int, floor_db: float = -40) -> tuple[float, float]:
    """Start and end in seconds of what is no more than ``floor_db`` below the loudest 10 ms; (0, 0) of silence."""
    loud = loudness(samples, rate)
    if not loud.size or loud.max() == 0:
        return 0.0, 0.0
    on = np.flatnonzero(loud > loud.max() * 10 ** (floor_db / 20))
    seconds = block(rate) / rate
    return float(on[0]) * seconds, float(on[-1] + 1) * seconds


def level(samples: np.ndarray, rms_db: float = -23, peak: float = 0.89) -> np.ndarray:
    """The same loudness for every clip, unless its peak would pass ``peak``."""
    gain = 10 ** (rms_db / 20) / (np.sqrt(np.mean(np.square(samples))) + 1e-9)
    return np.asarray(samples * min(gain, peak / (np.abs(samples).max() + 1e-9)), np.float32)


def trim(
    samples: np.ndarray, rate: int, words: list[Word] | None, before: float, after: float
) -> tuple[np.ndarray, list[Word] | None]:
    """Cut to ``before`` s ahead of the first sound and ``after`` s past the last; the words' times with it, in ms steps."""
    onset, end = speech_span(samples, rate)
    start = max(0.0, onset - before)
    cut = samples[int(start * rate) : int((end + after) * rate)].copy()
    ramp = np.linspace(0, 1, min(int(_FADE_S * rate), len(cut) // 2), dtype=np.float32)
    cut[: len(ramp)] *= ramp
    cut[len(cut) - len(ramp) :] *= ramp[::-1]
    if words is None:
        return cut, None
    starts = [word[1] - _LATE_S for word in words]
    ends = [word[2] - _LATE_S for word in words]
    # The first start and the last end are heard better than they are predicted.
    if abs(starts[0] - onset) < 0.12:
        starts[0] = onset
    ends[-1] = max(end, starts[-1] + 0.03)
    times = np.clip(np.array([starts, ends]) - start, 0, len(cut) / rate).round(3)
    return cut, [(word[0], float(begin), float(stop)) for word, begin, stop in zip(words, *times, strict=True)]
