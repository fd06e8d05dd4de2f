"""Log-mel features of 16 kHz speech, of a whole waveform or of a stream.

A mel frame is centred on a multiple of the hop (160 samples) and reaches half an FFT (256) to either side. Beyond the ends
of the signal it sees the signal mirrored, without the edge sample twice. Samples stay in numpy until the FFT: they are
few, and pre-emphasis then rounds alike on every device.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from vcpipe.actors.perception.config import MelConfig
from vcpipe.actors.product import on_cuda
from vcpipe.schemas.errors import AudioInputError, SessionClosedError


class LogMel:
    """Window and mel filters of one frontend, made once and shared by all sessions."""

    def __init__(self, config: MelConfig) -> None:
        self.config = config
        self._window = _padded_hann(config.window_samples, config.n_fft)
        self._filters = slaney_filters(config.sample_rate, config.n_fft, config.features)
        mx.eval(self._filters)

    def whole(self, samples: np.ndarray) -> mx.array:
        """(n,) float32 in [-1, 1] -> (1, T, features), T = 1 + n // hop.

        AudioInputError below 172 samples. Up to 256 the reflections are shorter than half an FFT, and so is T.
        """
        half = self.config.half_samples
        if samples.size < self.config.min_samples:
            raise AudioInputError(
                f"the input has {samples.size} samples; at least {self.config.min_samples} are needed "
                f"({self.config.min_samples / self.config.sample_rate * 1e3:.2f} ms)"
            )
        body = self.preemphasise(samples, None)
        before, after = body[1 : half + 1][::-1], body[-half - 1 : -1][::-1]
        segment = np.concatenate([before, body, after])
        return self.of_segment(segment)

    def preemphasise(self, samples: np.ndarray, previous: np.ndarray | None) -> np.ndarray:
        """y[i] = x[i] - 0.97 x[i-1], (n,) float32; without a ``previous`` sample (1,) the first one stays as it is."""
        factor = np.float32(self.config.preemph)
        if previous is None:
            return np.concatenate([samples[:1], samples[1:] - factor * samples[:-1]])
        return samples - factor * np.concatenate([previous, samples[:-1]])

    def windowed(self, segment: np.ndarray) -> np.ndarray:
        """Pre-emphasised samples, the first frame's first sample first -> (T, n_fft) float32, every whole frame in them."""
        frames = np.lib.stride_tricks.sliding_window_view(segment, self.config.n_fft)[:: self.config.hop_samples]
        return frames * self._window

    def log_mel(self, windowed: mx.array) -> mx.array:
        """(T, n_fft) -> (T, features) float32."""
        power = _power(mx.fft.rfft(windowed))  # (T, bins)
        mel = self._filters @ power.T  # (features, T)
        return mx.log(mel.T + self.config.log_zero_guard_value)

    def of_segment(self, segment: np.ndarray) -> mx.array:
        """As :meth:`windowed`, but (1, T, features)."""
        return self.log_mel(mx.array(self.windowed(segment)))[None]


def _power(spectrum: mx.array) -> mx.array:
    """|z|^2 of complex numbers, float32."""
    if on_cuda():
        # MLX's compiled CUDA kernels know no absolute value of complex numbers. Without its root only rounding differs.
        return mx.square(mx.real(spectrum)) + mx.square(mx.imag(spectrum))
    return mx.square(mx.abs(spectrum))


class MelStream:
    """Log-mel of one stream. Pushes of any sizes, the final one included, give the frames of the whole waveform.

    ``lookahead_samples``: how far the input must reach beyond a frame's centre before the frame is due; at least (and
    by default) half an FFT.

    One float detail is the published model's: where frame 0 is due alone, its mirror image lacks the farthest sample, and
    the frame is padded at its end instead. It then lies one sample early, [y255 ... y0 ... y255, 0]; that is the time
    reversal of the exact frame under a symmetric window, so the spectrum is the same but for its rounding (1e-4).
    """

    def __init__(self, log_mel: LogMel, *, lookahead_samples: int | None = None) -> None:
        config = log_mel.config
        lookahead = config.half_samples if lookahead_samples is None else lookahead_samples
        if lookahead < config.half_samples:
            raise ValueError(f"lookahead_samples must be at least {config.half_samples}, not {lookahead}")
        self._log_mel = log_mel
        self._lookahead = lookahead
        # Frames kept before the next one: half an FFT, and the sample that pre-emphasis looks back at.
        self._lookbehind_frames = math.ceil((config.half_samples + 1) / config.hop_samples)
        self._buffer = np.zeros(0, dtype=np.float32)
        self._buffer_start = 0  # index of the buffer's first sample in the stream, a multiple of the hop
        self._next_frame = 0
        self._closed = False

    @property
    def buffered_samples(self) -> int:
        """Samples held back for later frames."""
        return int(self._buffer.size)

    def push(self, samples: np.ndarray, *, final: bool = False) -> mx.array:
        """(n,) float32 -> the frames now due, (1, T, features), T may be 0.

        ``final`` closes the stream: all frames left are due, the signal is mirrored at its end.
        """
        segment = self.take(samples, final=final)
        return self._log_mel.of_segment(segment) if segment.size else mx.zeros((1, 0, self._log_mel.config.features))

    def take(self, samples: np.ndarray, *, final: bool = False) -> np.ndarray:
        """As :meth:`push`, but the pre-emphasised samples that the frames now due are made of, (0,) for none."""
        if self._closed:
            raise SessionClosedError("the log-mel stream has had its final push")
        self._closed = final
        self._buffer = np.concatenate([self._buffer, samples])
        hop = self._log_mel.config.hop_samples
        end_frame = self._due_frames(final)
        if end_frame <= self._next_frame:
            return np.zeros(0, dtype=np.float32)
        first_kept = self._buffer_start // hop
        segment = self._segment(self._next_frame - first_kept, end_frame - first_kept)
        self._next_frame = end_frame
        self._forget(max(end_frame - self._lookbehind_frames, 0) * hop)
        return segment

    def _due_frames(self, final: bool) -> int:
        hop, total = self._log_mel.config.hop_samples, self._buffer_start + self._buffer.size
        if final:
            return total // hop + 1 if total else 0
        return max(total - self._lookahead, -1) // hop + 1

    def _segment(self, start_frame: int, end_frame: int) -> np.ndarray:
        """Pre-emphasised samples under frames [start_frame, end_frame), counted from the buffer's first sample."""
        hop, half = self._log_mel.config.hop_samples, self._log_mel.config.half_samples
        first, last = start_frame * hop - half, (end_frame - 1) * hop + half
        start, missing_before, missing_after = max(first, 0), max(-first, 0), max(last - self._buffer.size, 0)
        previous = self._buffer[start - 1 : start] if start else None
        body = self._log_mel.preemphasise(self._buffer[start:last], previous)
        before = body[1 : missing_before + 1][::-1]
        after = body[-missing_after - 1 : -1][::-1] if missing_after else body[:0]
        zeros = np.zeros(last - first - before.size - body.size - after.size, dtype=np.float32)
        return np.concatenate([before, body, after, zeros])

    def _forget(self, before_sample: int) -> None:
        surplus = before_sample - self._buffer_start
        if surplus > 0:
            self._buffer = self._buffer[surplus:].copy()
            self._buffer_start = before_sample


def _padded_hann(window_samples: int, n_fft: int) -> np.ndarray:
    """Symmetric Hann window in the middle of (n_fft,) float32 zeros."""
    phase = 2 * np.pi * np.arange(window_samples) / max(window_samples - 1, 1)
    window = np.zeros(n_fft, dtype=np.float32)
    left = (n_fft - window_samples) // 2
    window[left : left + window_samples] = 0.5 * (1 - np.cos(phase))
    return window


def slaney_filters(sample_rate: int, n_fft: int, features: int) -> mx.array:
    """(features, n_fft // 2 + 1) triangular mel filters of equal area, from 0 Hz to half the rate.

    The scale of Slaney's Auditory Toolbox: linear to 1000 Hz, logarithmic above. All in float32 as the published model's
    frontend does it; a float64 construction differs by 5e-6.
    """
    hz_per_mel, break_hz, log_step = 200.0 / 3, 1000.0, math.log(6.4) / 27.0
    break_mel = break_hz / hz_per_mel
    top_hz = sample_rate / 2
    top_mel = top_hz / hz_per_mel
    if top_hz >= break_hz:
        top_mel = break_mel + math.log(top_hz / break_hz) / log_step
    mels = mx.linspace(0.0, top_mel, features + 2)
    edges = mx.where(mels >= break_mel, break_hz * mx.exp(log_step * (mels - break_mel)), hz_per_mel * mels)
    widths = edges[1:] - edges[:-1]
    bins = mx.linspace(0, sample_rate // 2, n_fft // 2 + 1)
    offsets = edges[None] - bins[:, None]  # (bins, features + 2)
    rising = -offsets[:, :-2] / widths[:-1]
    falling = offsets[:, 2:] / widths[1:]
    triangles = mx.maximum(mx.minimum(rising, falling), 0.0)
    return (triangles * (2.0 / (edges[2:] - edges[:-2]))).T
