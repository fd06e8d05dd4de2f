"""What happens to the user's sound on its way: rooms, noise, the assistant's echo, the telephone. Batched, on the device.

Every sample of a batch is drawn anew. Filters and stationary noise are applied in the frequency domain, all in one transform
there and back; what is not linear (clipping, mu-law) in time. B is the batch, N samples at 16 kHz.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.fft import next_fast_len
from torch import Tensor

RATE = 16000

#: RMS of the clips' speech (-23 dBFS), to which noise and echo are relative.
SPEECH_LEVEL = 10 ** (-23 / 20)

_ROOM_SECONDS = 0.6
_FADE = 160  # samples over which anything laid into a stretch begins and ends


# ------------------------------------------------------------------------------------------------ laying clips
class Segments(NamedTuple):
    """Stretches of a bank's sound and where they go. (S,) each; ``total``: the sum of ``samples``.

    ``source``: first sample in the bank; ``samples``: how many are laid; ``place``: the first one's index in the batch, flat;
    ``pace``: samples of the bank for one laid (a change of speed and pitch, or of the rate); ``gain``: factor.
    """

    source: Tensor
    samples: Tensor
    place: Tensor
    pace: Tensor
    gain: Tensor
    total: int

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, float, float]]) -> Segments:
        """From rows of source, samples, place, pace and gain."""
        table = np.array(rows, dtype=np.float64).reshape(-1, 5)
        whole = torch.from_numpy(table[:, :3].astype(np.int64))
        factors = torch.from_numpy(table[:, 3:].astype(np.float32))
        return cls(whole[:, 0], whole[:, 1], whole[:, 2], factors[:, 0], factors[:, 1], int(table[:, 1].sum()))

    def to(self, device: torch.device) -> Segments:
        source, samples, place, pace, gain = (array.to(device, non_blocking=True) for array in self[:-1])
        return Segments(source, samples, place, pace, gain, self.total)


def lay(sound: Tensor, segments: Segments, batch: int, samples: int) -> Tensor:
    """(n,) int16 -> (batch, samples) float32 with the segments in it, which must not overlap; elsewhere zeros.

    Between samples the sound is interpolated by cubics through four of them (Catmull-Rom).
    """
    source, counts, place, pace, gain, total = segments
    out = torch.zeros(batch * samples, device=sound.device)
    if total == 0:
        return out.view(batch, samples)
    segment = torch.repeat_interleave(torch.arange(len(counts), device=sound.device), counts, output_size=total)
    step = torch.arange(total, device=sound.device) - (counts.cumsum(0) - counts)[segment]
    position = step * pace[segment]
    whole = position.floor()
    index, t = source[segment] + whole.long(), position - whole
    a, b, c, d = (sound[(index + offset).clamp(0, len(sound) - 1)].float() for offset in (-1, 0, 1, 2))
    value = b + 0.5 * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)))
    to_edge = torch.minimum(step, counts[segment] - 1 - step)
    value *= gain[segment] / 32768 * ((to_edge + 1) / _FADE).clamp(max=1.0)
    return out.scatter_(0, place[segment] + step, value).view(batch, samples)


# ------------------------------------------------------------------------------------------------ chance
class Chance:
    """Random numbers for a batch, (B, 1) each."""

    def __init__(self, batch: int, generator: torch.Generator) -> None:
        self.batch, self.generator, self.device = batch, generator, generator.device

    def uniform(self, low: float, high: float, columns: int = 1) -> Tensor:
        return low + (high - low) * torch.rand(self.batch, columns, device=self.device, generator=self.generator)

    def normal(self, columns: int) -> Tensor:
        return torch.randn(self.batch, columns, device=self.device, generator=self.generator)

    def happens(self, probability: float) -> Tensor:
        """1.0 or 0.0."""
        return (self.uniform(0, 1) < probability).float()

    def decibels(self, low: float, high: float) -> Tensor:
        """Amplitude factors."""
        return 10 ** (self.uniform(low, high) / 20)


# ------------------------------------------------------------------------------------------------ the way of the sound
def augment(speech: Tensor, echo: Tensor, generator: torch.Generator) -> Tensor:
    """What the microphone gives: (B, N) -> (B, N) on the grid of 16-bit samples.

    ``speech``: what users say, also used as each other's babble; ``echo``: what the assistant says at full level.
    """
    batch, samples = speech.shape
    chance = Chance(batch, generator)
    size = next_fast_len(samples + int(_ROOM_SECONDS * RATE), real=True)
    hz = torch.fft.rfftfreq(size, 1 / RATE, device=speech.device)
    sound = speech + echo * chance.decibels(-30, -15) + _babble(speech, chance)
    spectrum = torch.fft.rfft(sound, size) * torch.fft.rfft(_room(chance), size)
    spectrum = spectrum + _noise(chance, hz, size)
    telephones = round(0.3 * batch)  # samples come in no order, so the first may be those
    curve = _equaliser(chance, hz)
    curve[:telephones] *= _telephone_band(chance, hz)[:telephones]
    sound = torch.fft.irfft(spectrum * curve, size)[:, :samples] * chance.decibels(-20, 3)
    sound = _clipped(sound, chance)
    if telephones:
        sound = torch.cat([_mu_law(sound[:telephones]), sound[telephones:]])
    return (sound * 32768).round_().clamp_(-32768, 32767) / 32768


def _babble(speech: Tensor, chance: Chance) -> Tensor:
    """Two or three other samples of the batch, for a fifth of them: 18 to 30 dB below."""
    level = chance.happens(0.2) * chance.decibels(-30, -18)
    others = sum(speech.roll(shift, 0).roll(shift * RATE, 1) for shift in (1, 2, 3)[: max(1, len(speech) - 1)])
    return others * level


def _room(chance: Chance) -> Tensor:
    """(B, n) impulse responses: the direct sound and, for some, a tail of noise that decays by 60 dB in 0.1 to 0.6 s."""
    time = torch.arange(int(_ROOM_SECONDS * RATE), device=chance.device) / RATE
    tail = chance.normal(len(time)) * torch.exp(-math.log(1000) * time / chance.uniform(0.1, _ROOM_SECONDS))
    tail *= chance.happens(0.4) * chance.decibels(-25, -8) / tail.norm(dim=1, keepdim=True)
    tail[:, 0] = 1.0
    return tail


def _noise(chance: Chance, hz: Tensor, size: int) -> Tensor:
    """Spectrum of white, pink or brown noise, or of none: 5 to 40 dB below speech, also where there is no speech."""
    slope = torch.randint(0, 3, (chance.batch, 1), device=chance.device, generator=chance.generator) / 2
    shape = hz.clamp(min=20.0) ** -slope
    shape = shape * chance.happens(0.7) * chance.decibels(-40, -5) / shape.square().mean(1, keepdim=True).sqrt()
    noise = torch.complex(chance.normal(len(hz)), chance.normal(len(hz)))
    return noise * shape * (SPEECH_LEVEL * math.sqrt(size / 2))


def _equaliser(chance: Chance, hz: Tensor) -> Tensor:
    """(B, F) factors: for some a slope of up to 3 dB an octave and two wide peaks or dips of up to 9 dB."""
    octave = torch.log2(hz.clamp(min=20.0) / 1000)
    decibels = chance.uniform(-3, 3) * octave
    for _ in range(2):
        centre, width = chance.uniform(-3, 2.8), chance.uniform(0.3, 1.5)
        decibels = decibels + chance.uniform(-9, 9) * torch.exp(-0.5 * ((octave - centre) / width).square())
    return 10 ** (decibels * chance.happens(0.6) / 20)


def _telephone_band(chance: Chance, hz: Tensor) -> Tensor:
    """(B, F) factors: from 60-300 Hz to 3400-3900 Hz."""
    low = 1 / torch.sqrt(1 + (chance.uniform(60, 300) / hz.clamp(min=1.0)) ** 4)
    return low * torch.sigmoid((chance.uniform(3400, 3850) - hz) / 25)


def _clipped(sound: Tensor, chance: Chance) -> Tensor:
    """A twentieth overdriven by up to 20 dB, at half of full scale."""
    boost = torch.where(chance.happens(0.05) > 0, chance.decibels(0, 20), 1.0)
    limit = torch.where(boost > 1, 0.5, 1.0)
    return torch.minimum(torch.maximum(sound * boost, -limit), limit)


def _mu_law(sound: Tensor) -> Tensor:
    """As 8 kHz mu-law and back (ITU-T G.711, its curve without its segments). (B, N), band-limited, N even."""
    samples = sound.shape[1]
    narrow = sound[:, ::2].clamp(-1, 1)
    code = (torch.log1p(255 * narrow.abs()) / math.log(256) * 127).round() / 127
    narrow = narrow.sign() * (256**code - 1) / 255
    return 2 * torch.fft.irfft(torch.fft.rfft(narrow), samples)


# ------------------------------------------------------------------------------------------------ on log-mel
def mask_mel(mel: Tensor, generator: torch.Generator) -> Tensor:
    """(B, T, features) with bands and short times at their sample's mean (SpecAugment, Park et al. 2019).

    Times are 60 ms at most: longer ones would swallow letters, and teach to write what was not heard.
    """
    chance = Chance(len(mel), generator)
    hidden = torch.zeros_like(mel, dtype=torch.bool)
    for axis, widest, count in ((2, 20, 2), (1, 6, 3)):
        index = torch.arange(mel.shape[axis], device=mel.device)
        for _ in range(count):
            width = chance.uniform(0, widest) * chance.happens(0.6)
            start = chance.uniform(0, 1) * (mel.shape[axis] - width)
            within = (index >= start) & (index < start + width)
            hidden |= within[:, None] if axis == 2 else within[:, :, None]
    return torch.where(hidden, mel.mean((1, 2), keepdim=True), mel)
