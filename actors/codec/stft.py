"""Between waveform and spectrogram. All spectra are (B, frames, bins); windows are periodic Hann; nothing is centred."""

from __future__ import annotations

import math
from functools import reduce

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vcpipe.actors.codec.frames import Tabulated

#: Bound of the magnitudes that the decoder can produce.
_MAX_MAGNITUDE = 100.0

#: Floor of the summed window, where no window reaches.
_MIN_WINDOW_SUM = 1e-10


def hann_window(n_fft: int) -> np.ndarray:
    """Periodic Hann window, (n_fft,) float32."""
    return (0.5 * (1 - np.cos(2 * np.pi * np.arange(n_fft) / n_fft))).astype(np.float32)


def spectral_features(waveform: mx.array, n_fft: int, hop: int) -> mx.array:
    """(B, samples) float32 -> (B, frames, 2 * bins): real parts, then imaginary parts.

    The waveform is padded with zeros so that ``samples / hop`` frames come out; at least one does.
    """
    if waveform.ndim != 2 or waveform.shape[1] == 0:
        raise ValueError(f"a waveform to encode has shape (batch, samples > 0), not {waveform.shape}")
    edge = (n_fft - hop) // 2
    missing = max(0, n_fft - (waveform.shape[1] + 2 * edge))
    padded = mx.pad(waveform.astype(mx.float32), [(0, 0), (edge, edge + missing)])
    blocks = padded[:, : padded.shape[1] // hop * hop].reshape(len(waveform), -1, hop)
    overlaps = n_fft // hop
    frames = blocks.shape[1] - overlaps + 1
    windows = mx.concatenate([blocks[:, k : k + frames] for k in range(overlaps)], axis=-1)  # (B, frames, n_fft)
    spectrum = mx.fft.rfft(windows * mx.array(hann_window(n_fft)))
    return mx.concatenate([spectrum.real, spectrum.imag], axis=-1)


def polar_spectrum(features: mx.array) -> mx.array:
    """(B, frames, 2 * bins) of log-magnitudes, then phases -> real parts, then imaginary parts, in the same dtype.

    The magnitude 100 / (1 + 100 exp(-m)) is exp(m) for small m and saturates at 100.
    """
    logits, phase = mx.split(features, 2, axis=-1)
    magnitude = _magnitude(logits)
    return mx.concatenate([magnitude * _cos(phase), magnitude * _sin(phase)], axis=-1)


_magnitude = Tabulated(lambda logits: _MAX_MAGNITUDE * mx.exp(-nn.softplus(-logits + math.log(_MAX_MAGNITUDE))))
_cos, _sin = Tabulated(mx.cos), Tabulated(mx.sin)


class InverseStft:
    """Spectra to waveform by weighted overlap-add; each frame is clamped to the window first, which bounds the signal.

    Made once, for the arrays it needs. A transform of 16 points is a product with a matrix: cheaper than an FFT.
    """

    def __init__(self, n_fft: int, hop: int) -> None:
        self._n_fft, self._hop, self._overlaps = n_fft, hop, n_fft // hop
        self._window = hann_window(n_fft)
        self._envelope = mx.array(self._window)
        self._matrix = mx.array(_inverse_matrix(n_fft))
        inner = (self._overlaps - 1) * hop
        self._inner_sum = mx.array(_window_sum(self._window, hop, self._overlaps)[inner : inner + hop])
        mx.eval(self._envelope, self._matrix, self._inner_sum)

    def __call__(self, spectrum: mx.array) -> mx.array:
        """(B, F, 2 * bins), real parts, then imaginary parts -> (B, (F - 1) * hop + n_fft) float32, edges included."""
        alone = self._overlaps - 1
        frames = mx.pad(self.frames(spectrum), [(0, 0), (alone, alone), (0, 0)])
        window_sum = _window_sum(self._window, self._hop, spectrum.shape[1])
        return self._overlap_add(frames).flatten(1) / mx.array(window_sum)

    def frames(self, spectrum: mx.array) -> mx.array:
        """The same spectrum -> windowed frames of the waveform, (B, F, n_fft) float32."""
        signals = spectrum.astype(mx.float32) @ self._matrix
        return mx.clip(signals, -self._envelope, self._envelope) * self._envelope

    def inner(self, frames: mx.array) -> mx.array:
        """Windowed frames, (B, F, n_fft) -> (B, (F + 1) * hop - n_fft): the samples on which no frame is missing."""
        return (self._overlap_add(frames) / self._inner_sum).flatten(1)

    def _overlap_add(self, frames: mx.array) -> mx.array:
        """The same in hops, (B, F - overlaps + 1, hop), not divided yet; at every sample the oldest frame is added first."""
        count = frames.shape[1] - self._overlaps + 1
        parts = []
        for first in range(self._overlaps):
            start = (self._overlaps - 1 - first) * self._hop
            parts.append(frames[:, first : first + count, start : start + self._hop])
        return reduce(mx.add, parts)


def _inverse_matrix(n_fft: int) -> np.ndarray:
    """(2 * bins, n_fft) float32: inverse FFT of a real signal. The imaginary parts of the first and last bin are ignored."""
    bins = n_fft // 2 + 1
    unit = np.eye(bins)
    inverse = np.concatenate([np.fft.irfft(unit, n_fft), np.fft.irfft(1j * unit, n_fft)])
    return inverse.astype(np.float32)


def _window_sum(window: np.ndarray, hop: int, count: int) -> np.ndarray:
    """Overlap-add of ``count`` squared windows, (samples,) float32, at least 1e-10."""
    total = np.zeros((count - 1) * hop + len(window), dtype=np.float32)
    for start in reversed(range(0, len(window), hop)):
        total[start : start + count * hop] += np.tile(np.square(window[start : start + hop]), count)
    return np.maximum(total, np.float32(_MIN_WINDOW_SUM))
