"""Laying clips into stretches, and what is done to them on the way to the recogniser."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vcpipe.bench.mini import augment as a  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def noise(*shape: int) -> torch.Tensor:
    return a.SPEECH_LEVEL * torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def level(sound: torch.Tensor) -> torch.Tensor:
    return sound.square().mean(-1).sqrt()


def test_clips_lie_where_they_belong() -> None:
    sound = torch.arange(1, 4001, dtype=torch.int16)
    segments = a.Segments.of([(1000, 600, 50, 1.0, 1.0), (3000, 500, 2000 + 100, 1.0, 0.5)])
    found = (a.lay(sound, segments, 2, 2000) * 32768).numpy()
    middle = np.arange(a._FADE, 600 - a._FADE)
    np.testing.assert_allclose(found[0, 50 + middle], 1001 + middle, rtol=1e-5)
    middle = middle[middle < 500 - a._FADE]
    np.testing.assert_allclose(found[1, 100 + middle], (3001 + middle) / 2, rtol=1e-5)
    assert not found[0, :50].any() and not found[0, 650:].any() and not found[1, 600:].any()
    assert 0 < found[0, 50] < 10  # faded in
    assert not a.lay(sound, a.Segments.of([]), 2, 2000).any()


def test_a_pace_shifts_pitch() -> None:
    time = np.arange(20000) / a.RATE
    sound = torch.from_numpy((10000 * np.sin(2 * np.pi * 1000 * time)).astype(np.int16))
    found = a.lay(sound, a.Segments.of([(0, 16000, 0, 1.1, 1.0)]), 1, 16000)[0]
    spectrum = torch.fft.rfft(found * torch.hann_window(16000)).abs()
    assert int(spectrum.argmax()) == 1100
    assert float(spectrum[:1080].max() + spectrum[1120:].max()) < 0.01 * float(spectrum.max())


def test_what_comes_out_is_16_bit_sound_like_what_went_in(generator: torch.Generator) -> None:
    speech = noise(64, 32000)
    speech[:, 16000:] = 0
    found = a.augment(speech, torch.zeros_like(speech), generator)
    assert found.shape == speech.shape and bool(found.isfinite().all()) and float(found.abs().max()) <= 1
    assert torch.equal(found * 32768, (found * 32768).round())
    likeness = torch.cosine_similarity(found[:, :16000], speech[:, :16000])
    assert float(likeness.median()) > 0.6
    # Where nobody speaks, some have digital silence and most have noise below the speech.
    quiet = level(found[:, 28000:]) / level(found[:, :16000])
    assert 0.1 < float((quiet == 0).float().mean()) < 0.5
    assert float(quiet.median()) < 0.3


def test_the_echo_is_quiet(generator: torch.Generator) -> None:
    nothing, echo = torch.zeros(64, 16000), noise(64, 16000)
    found = level(a.augment(nothing, echo, generator))
    assert bool((found > 0).all())
    assert float(found.median()) < 0.2 * a.SPEECH_LEVEL


def test_nothing_stays_nothing_or_becomes_noise(generator: torch.Generator) -> None:
    nothing = torch.zeros(64, 16000)
    found = level(a.augment(nothing, nothing, generator))
    assert 0.1 < float((found == 0).float().mean()) < 0.5
    assert float(found.max()) < a.SPEECH_LEVEL


def test_telephones_have_no_upper_half(generator: torch.Generator) -> None:
    found = a.augment(noise(20, 32000), torch.zeros(20, 32000), generator)
    spectrum = torch.fft.rfft(found).abs()
    upper = spectrum[:, 8200:].norm(dim=1) / spectrum.norm(dim=1)
    assert bool((upper[:6] < 0.01).all()) and bool((upper[6:] > 0.05).all())


def test_mu_law_keeps_loud_and_soft_alike() -> None:
    time = torch.arange(16000) / a.RATE
    tone = torch.sin(2 * np.pi * 440 * time)
    for gain in (0.5, 0.05, 0.005):
        error = level(a._mu_law(gain * tone[None])[0] - gain * tone) / level(gain * tone)
        assert 1e-3 < float(error) < 0.05


def test_masks_hide_little_and_the_mean_stays(generator: torch.Generator) -> None:
    mel = torch.randn(64, 400, 128, generator=generator) - 9
    found = a.mask_mel(mel, generator)
    share = (found != mel).float().mean((1, 2))
    assert 0.02 < float(share.mean()) < 0.2 and float(share.min()) == 0
    assert float(found.mean()) == pytest.approx(-9, abs=0.05)
    lost = (found != mel).all(2).sum(1)
    assert 0 < int(lost.max()) <= 18


def test_equal_seeds_give_equal_sound() -> None:
    speech = noise(4, 8000)
    first, second = (a.augment(speech, speech, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
