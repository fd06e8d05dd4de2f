"""Distances between a decoded and a true waveform: spectra in several resolutions, and how silent silence is."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

#: Window in samples -> mel bands. Short windows judge onsets, long ones pitch.
_SCALES = {64: 8, 128: 16, 256: 32, 512: 48, 1024: 80, 2048: 128}

#: Amplitudes of a band below it do not count: -80 dB of a full-scale sine.
_FLOOR = 1e-4

_INAUDIBLE = 1e-5


class SpectralDistance(nn.Module):
    """Mean over scales of the L1 distance of log10 mel spectra plus that of magnitudes relative to the true ones' mean."""

    def __init__(self, rate: int) -> None:
        super().__init__()
        for n_fft, bands in _SCALES.items():
            self.register_buffer(f"window{n_fft}", torch.hann_window(n_fft))
            self.register_buffer(f"mel{n_fft}", torch.from_numpy(mel_filters(rate, n_fft, bands)))

    def forward(self, decoded: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        """Two (B, n) float32 waveforms -> (log-mel distance, magnitude distance)."""
        both = torch.cat([decoded, true])
        logs, magnitudes = [], []
        for n_fft in _SCALES:
            spectrum = self._spectrum(both, n_fft)
            ours, theirs = spectrum.chunk(2)
            magnitudes.append((ours - theirs).abs().mean() / theirs.mean().clamp(min=_FLOOR))
            mel = (spectrum.transpose(1, 2) @ getattr(self, f"mel{n_fft}").T).clamp(min=_FLOOR).log10()
            ours, theirs = mel.chunk(2)
            logs.append((ours - theirs).abs().mean())
        return torch.stack(logs).mean(), torch.stack(magnitudes).mean()

    def log_mel(self, waveform: Tensor, n_fft: int = 1024) -> Tensor:
        """(B, n) -> (B, frames, bands) natural logarithms of amplitudes, floored."""
        spectrum = self._spectrum(waveform, n_fft)
        return (spectrum.transpose(1, 2) @ getattr(self, f"mel{n_fft}").T).clamp(min=_FLOOR).log()

    def _spectrum(self, waveform: Tensor, n_fft: int) -> Tensor:
        """(B, n) -> (B, bins, frames) amplitudes: 1 for a full-scale sine."""
        window = getattr(self, f"window{n_fft}")
        spectrum = torch.stft(waveform, n_fft, n_fft // 4, window=window, center=False, return_complex=True)
        # The root of a sum with a floor: the modulus has no gradient at zero, where silence is.
        power = spectrum.real.square() + spectrum.imag.square()
        return (power + 1e-9).sqrt() * (2 / window.sum())


def loudness_of_silence(decoded: Tensor, silent: Tensor) -> Tensor:
    """Mean of log10(1 + |x| / 1e-5) over the samples where ``silent`` (B, n) holds: 0 for true silence, 1 at -80 dB."""
    loud = torch.log10(1 + decoded.abs() / _INAUDIBLE)
    return (loud * silent).sum() / silent.sum().clamp(min=1)


def mel_filters(rate: int, n_fft: int, bands: int) -> np.ndarray:
    """(bands, n_fft // 2 + 1) float32 triangles, evenly spaced in mel (O'Shaughnessy), each with sum 1.

    A band narrower than a bin takes the bin nearest to its middle.
    """
    frequencies = np.linspace(0, rate / 2, n_fft // 2 + 1)
    top = 2595 * np.log10(1 + rate / 2 / 700)
    points = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    rising = (frequencies - points[:-2, None]) / (points[1:-1] - points[:-2])[:, None]
    falling = (points[2:, None] - frequencies) / (points[2:] - points[1:-1])[:, None]
    filters = np.maximum(0, np.minimum(rising, falling))
    empty = np.flatnonzero(filters.sum(1) < 1e-6)
    filters[empty, np.abs(frequencies - points[1:-1][empty, None]).argmin(1)] = 1.0
    return (filters / filters.sum(1, keepdims=True)).astype(np.float32)
