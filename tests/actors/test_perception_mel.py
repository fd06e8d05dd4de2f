"""Log-mel of whole waveforms and of streams."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vcpipe.actors.perception.config import MelConfig
from vcpipe.actors.perception.mel import LogMel, MelStream
from vcpipe.schemas.errors import AudioInputError, ConfigError, SessionClosedError

LOG_MEL = LogMel(MelConfig())
HOP = 160

#: A matrix product may round differently for another number of rows, and so does the spectrum of frame 0 due alone.
ROUNDING = 2e-4


def noise(samples: int) -> np.ndarray:
    return np.random.default_rng(samples).normal(0, 0.1, samples).astype(np.float32)


def streamed(samples: np.ndarray, sizes: list[int], **options: object) -> np.ndarray:
    """Push ``samples`` in portions of ``sizes`` (the last size repeats), the last portion final."""
    stream = MelStream(LOG_MEL, **options)  # type: ignore[arg-type]
    outputs, start = [], 0
    while start < samples.size:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        outputs.append(np.array(stream.push(samples[start : start + size], final=start + size >= samples.size)))
        start += size
    return np.concatenate(outputs, axis=1)


def reference_log_mel(samples: np.ndarray) -> np.ndarray:
    """Log-mel by definition in float64, one frame at a time."""
    x = samples.astype(np.float64)
    x = np.concatenate([x[:1], x[1:] - 0.97 * x[:-1]])
    x = np.pad(x, 256, mode="reflect")
    window = np.zeros(512)
    window[56:456] = np.hanning(400)

    def to_hz(mel: np.ndarray) -> np.ndarray:
        return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))

    edges = to_hz(np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), 130))
    bins = np.linspace(0, 8000, 257)
    filters = np.stack(
        [
            np.interp(bins, edges[i : i + 3], [0, 1, 0], left=0, right=0) * 2 / (edges[i + 2] - edges[i])
            for i in range(128)
        ]
    )
    frames = [np.abs(np.fft.rfft(x[start : start + 512] * window)) ** 2 for start in range(0, samples.size + 1, HOP)]
    return np.log(np.array(frames) @ filters.T + 2.0**-24)


@pytest.mark.parametrize("samples", [257, 1280, 4000, 5003])
def test_whole_log_mel_equals_definition(samples: int) -> None:
    mel = np.array(LOG_MEL.whole(noise(samples)))
    assert mel.shape == (1, 1 + samples // HOP, 128)
    np.testing.assert_allclose(mel[0], reference_log_mel(noise(samples)), atol=2e-3)


def test_whole_log_mel_refuses_too_short_input() -> None:
    assert LOG_MEL.whole(noise(172)).shape == (1, 1, 128)
    with pytest.raises(AudioInputError, match="171 samples; at least 172"):
        LOG_MEL.whole(noise(171))


@pytest.mark.parametrize(
    "sizes",
    [[1280], [1], [159], [256, 1, 1280], [300, 2000, 5, 160], [8000]],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
@pytest.mark.parametrize("lookahead", [None, 400, 1280])
def test_streaming_mel_joined_outputs_equal_offline(sizes: list[int], lookahead: int | None) -> None:
    samples = noise(2803 if sizes == [1] else 8 * 1280 + 77)
    mel = streamed(samples, list(sizes), lookahead_samples=lookahead)
    np.testing.assert_allclose(mel, np.array(LOG_MEL.whole(samples)), atol=ROUNDING, rtol=0)


def test_frame_0_due_alone_lies_one_sample_early_and_sounds_the_same() -> None:
    stream = MelStream(LOG_MEL, lookahead_samples=1280)
    samples = noise(1280)
    alone = np.array(stream.push(samples))
    y = LOG_MEL.preemphasise(samples, None)
    early = np.concatenate([y[255:0:-1], y[:256], np.zeros(1, dtype=np.float32)])
    np.testing.assert_array_equal(alone, np.array(LOG_MEL.of_segment(early)))
    exact = np.concatenate([y[256:0:-1], y[:256]])
    difference = np.abs(alone - np.array(LOG_MEL.of_segment(exact))).max()
    assert 0 < difference < 5e-4


def test_frame_pushes_give_1_then_8_mel_frames_and_hold_1440_samples() -> None:
    stream = MelStream(LOG_MEL, lookahead_samples=1280)
    counts, held = [], []
    for _ in range(50):
        counts.append(stream.push(noise(1280)).shape[1])
        held.append(stream.buffered_samples)
    assert counts == [1] + [8] * 49
    assert held == [1280] + [1440] * 49


def test_minimal_lookahead_gives_7_then_8_mel_frames_and_the_rest_at_the_end() -> None:
    stream = MelStream(LOG_MEL)
    counts = [stream.push(noise(1280)).shape[1] for _ in range(4)]
    assert counts == [7, 8, 8, 8]
    assert stream.push(noise(0), final=True).shape == (1, 2, 128)


@pytest.mark.parametrize("samples", [1, 100, 172, 256])
def test_stream_shorter_than_its_reflection_is_independent_of_chunking(samples: int) -> None:
    mel = streamed(noise(samples), [samples])
    assert mel.shape == (1, samples // HOP + 1, 128) and np.isfinite(mel).all()
    np.testing.assert_allclose(streamed(noise(samples), [7]), mel, atol=ROUNDING, rtol=0)


def test_stream_without_samples_ends_without_frames() -> None:
    stream = MelStream(LOG_MEL)
    assert stream.push(noise(0), final=True).shape == (1, 0, 128)
    with pytest.raises(SessionClosedError):
        stream.push(noise(160))


def test_lookahead_below_half_an_fft_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 256, not 255"):
        MelStream(LOG_MEL, lookahead_samples=255)


@pytest.mark.parametrize(
    ("option", "accepted"),
    [({"window": "hamming"}, "hann"), ({"normalize": "per_feature"}, "NA"), ({"pad_to": 16}, "0")],
)
def test_frontends_that_cannot_stream_are_refused(option: dict[str, object], accepted: str) -> None:
    with pytest.raises(ConfigError, match=f"accepted: {accepted}"):
        MelConfig(**option)  # type: ignore[arg-type]


def test_silence_is_the_logarithm_of_the_guard() -> None:
    mel = LOG_MEL.whole(np.zeros(1280, dtype=np.float32))
    assert mx.allclose(mel, mx.full(mel.shape, np.log(2.0**-24)), atol=1e-5)
