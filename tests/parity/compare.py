"""What a run gave, in one form for goldens, peer and pipeline, and what counts as equal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf

DATA = Path(__file__).parents[1] / "data"
TINY, GOLDEN = DATA / "tiny", DATA / "golden"
QUESTION_WAV = Path(__file__).parents[2] / "docs" / "question.wav"

#: Largest difference of two decodes of the same codes; full scale is 1.0. With the same BLAS there is next to none. The codec's
#: activations are bfloat16, eight bits of mantissa: where a matrix product sums in another order, one value in a frame in
#: twenty rounds the other way, and a phase of 4 to 8 radians that does so turns one of the nine bins by 2**-5. Between
#: OpenBLAS and MLX's own BLAS the largest difference in 600 frames was 0.028.
MAX_ROUNDING = 0.05
#: Root mean square of the difference over a run: 2 % of the speech's 0.2 (seen: 0.002). An error of the network, or speech
#: that is one sample late, is far above.
RMS_ROUNDING = 0.004


@dataclass
class Heard:
    """``events``: (kind, frame_index, token_id, delta, text) of each; ``codes`` (F, Q); ``samples`` (F * 1764,)."""

    events: list[tuple[Any, ...]]
    codes: np.ndarray
    samples: np.ndarray
    text: str = ""
    transcript: str | None = None
    text_ids: list[int] | None = None
    function_ids: list[int] | None = None


def heard(events: Iterable[Any]) -> Heard:
    """From the events of a streaming session, the peer's or ours: their fields have the same names."""
    events = list(events)
    audio = [event for event in events if event.kind == "audio"]
    return Heard(
        events=[as_row(event) for event in events],
        codes=np.array([np.array(event.audio_codes) for event in audio]),
        samples=np.concatenate([np.zeros(0, np.float32), *(np.array(event.samples) for event in audio)]),
    )


def as_row(event: Any) -> tuple[Any, ...]:
    """Everything of an event but its arrays."""
    return (event.kind, event.frame_index, event.token_id, event.delta, event.text)


def assert_same_bytes(ours: Heard, wanted: Heard) -> None:
    """For two runs of the same code."""
    assert ours.events == wanted.events
    np.testing.assert_array_equal(ours.codes, wanted.codes)
    np.testing.assert_array_equal(ours.samples, wanted.samples)


def assert_same_sound(samples: np.ndarray, wanted: np.ndarray) -> None:
    """For two decodes of the same codes."""
    assert samples.shape == wanted.shape
    difference = np.abs(samples - wanted)
    assert difference.max(initial=0.0) <= MAX_ROUNDING
    assert np.sqrt(np.mean(np.square(difference))) <= RMS_ROUNDING


def read_wav(path: Path) -> np.ndarray:
    """16 kHz mono WAV -> (n,) float32."""
    samples, rate = sf.read(path, dtype="float32")
    assert rate == 16000
    return samples


def noise_bursts(seed: int, samples: int) -> np.ndarray:
    """(n,) float32: bursts of noise, some loud enough to clip, between near-silence."""
    rng = np.random.default_rng(seed)
    loudness = np.repeat(rng.choice([1e-4, 0.05, 0.3, 1.0], -(-samples // 900)), 900)[:samples]
    return np.clip(loudness * rng.standard_normal(samples), -1, 1).astype(np.float32)
