"""Between waveform and spectrogram. All spectra are (B, frames, bins); windows are periodic Hann; nothing is centred."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np

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


def polar_spectrum(features: mx.array) -> tuple[mx.array, mx.array]:
    """(B, frames, 2 * bins) of log-magnitudes, then phases -> real and imaginary parts, in the same dtype.

    The magnitude 100 / (1 + 100 exp(-m)) is exp(m) for small m and saturates at 100.
    """
    logits, phase = mx.split(features, 2, axis=-1)
    magnitude = _MAX_MAGNITUDE * mx.exp(-nn.softplus(-logits + math.log(_MAX_MAGNITUDE)))
    real = magnitude * mx.cos(phase)
    imag = magnitude * mx.sin(phase)
    # The first and the last bin of a real signal's spectrum are real.
    return real, mx.pad(imag[..., 1:-1], [(0, 0), (0, 0), (1, 1)])


def inverse_stft(real: mx.array, imag: mx.array, n_fft: int, hop: int) -> mx.array:
    """(B, frames, bins) twice -> (B, (frames - 1) * hop + n_fft) float32, edges included.

    Weighted overlap-add; each frame is clamped to the window's envelope first, which bounds the signal.
    """
    window = hann_window(n_fft)
    envelope = mx.array(window)
    frames = mx.fft.irfft(real + 1j * imag, n=n_fft, axis=-1)  # (B, frames, n_fft) float32
    frames = mx.clip(frames, -envelope, envelope) * envelope
    return _overlap_add(frames, hop) / mx.array(_window_sum(window, hop, frames.shape[1]))


def _overlap_add(frames: mx.array, hop: int) -> mx.array:
    """(B, frames, n_fft) -> (B, (frames - 1) * hop + n_fft); at every sample the oldest frame is added first."""
    batch, count, n_fft = frames.shape
    total = mx.zeros((batch, (count - 1) * hop + n_fft), dtype=mx.float32)
    for start in reversed(range(0, n_fft, hop)):
        piece = frames[:, :, start : start + hop].reshape(batch, count * hop)
        total = total + mx.pad(piece, [(0, 0), (start, n_fft - hop - start)])
    return total


def _window_sum(window: np.ndarray, hop: int, count: int) -> np.ndarray:
    """Overlap-add of ``count`` squared windows, (samples,) float32, at least 1e-10."""
    total = np.zeros((count - 1) * hop + len(window), dtype=np.float32)
    for start in reversed(range(0, len(window), hop)):
        total[start : start + count * hop] += np.tile(np.square(window[start : start + hop]), count)
    return np.maximum(total, np.float32(_MIN_WINDOW_SUM))
