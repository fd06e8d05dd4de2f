"""Discriminators for training the codec's decoder; they are in no checkpoint.

Multi-period: HiFi-GAN, Kong et al. 2020. Spectra of several resolutions, with their phases: Descript audio codec, Kumar et al.
2023. Both far smaller than there. Losses are least squares, weights are normalised (Salimans and Kingma 2016).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

PERIODS = (2, 3, 5, 7, 11)
WINDOWS = (1536, 768, 256)

#: What a discriminator says of a batch: for each of its parts the features of every layer, the last being the verdict.
Opinions = list[list[Tensor]]


class PeriodDiscriminator(nn.Module):
    """Looks at every ``period``-th sample: convolutions along time for each phase of the period by itself."""

    def __init__(self, period: int, widths: tuple[int, ...] = (16, 48, 128, 192)) -> None:
        super().__init__()
        self.period = period
        inputs = (1, *widths[:-1])
        convs = [nn.Conv1d(a, b, 5, stride=3, padding=2) for a, b in zip(inputs, widths, strict=True)]
        convs.append(nn.Conv1d(widths[-1], widths[-1], 5, padding=2))
        convs.append(nn.Conv1d(widths[-1], 1, 3, padding=1))
        self.convs = nn.ModuleList(weight_norm(conv) for conv in convs)

    def forward(self, waveform: Tensor) -> list[Tensor]:
        """(B, n) -> features (B * period, C, T) of every layer."""
        batch, samples = waveform.shape
        rows = waveform[:, : samples // self.period * self.period].reshape(batch, -1, self.period)
        return _features(self.convs, rows.transpose(1, 2).reshape(batch * self.period, 1, -1))


class SpectrumDiscriminator(nn.Module):
    """Looks at real and imaginary parts of one spectrogram, strides along frequency."""

    def __init__(self, n_fft: int, widths: tuple[int, ...] = (16, 24, 32, 48)) -> None:
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        convs = [nn.Conv2d(2, widths[0], (7, 3), stride=(2, 1), padding=(3, 1))]
        for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
            convs.append(nn.Conv2d(inputs, outputs, (5, 3), stride=(2, 1), padding=(2, 1)))
        convs.append(nn.Conv2d(widths[-1], widths[-1], 3, padding=1))
        convs.append(nn.Conv2d(widths[-1], 1, 3, padding=1))
        self.convs = nn.ModuleList(weight_norm(conv) for conv in convs)

    def forward(self, waveform: Tensor) -> list[Tensor]:
        """(B, n) -> features (B, C, F, T) of every layer."""
        spectrum = torch.stft(
            waveform,
            self.n_fft,
            self.n_fft // 4,
            window=self.window,
            center=False,
            return_complex=True,
            normalized=True,
        )
        # High frequencies are weak: the square root of the magnitude brings them into view.
        parts = torch.stack([spectrum.real, spectrum.imag], dim=1)  # (B, 2, F, T)
        magnitude = parts.square().sum(1, keepdim=True)
        scaled = parts * (magnitude + 1e-6) ** -0.25
        return _features(self.convs, scaled.contiguous(memory_format=torch.channels_last))


def _features(convs: nn.ModuleList, x: Tensor) -> list[Tensor]:
    features = []
    for i, conv in enumerate(convs):
        x = conv(x)
        if i < len(convs) - 1:
            x = F.leaky_relu(x, 0.1)
        features.append(x)
    return features


class Discriminators(nn.Module):
    """All of them."""

    def __init__(self, periods: tuple[int, ...] = PERIODS, windows: tuple[int, ...] = WINDOWS) -> None:
        super().__init__()
        parts: list[nn.Module] = [PeriodDiscriminator(period) for period in periods]
        self.parts = nn.ModuleList(parts + [SpectrumDiscriminator(n_fft) for n_fft in windows])

    def forward(self, waveform: Tensor) -> Opinions:
        """(B, n) float32 -> what each part makes of it."""
        return [part(waveform) for part in self.parts]


def halves(both: Opinions) -> tuple[Opinions, Opinions]:
    """Of a batch whose second half is another kind of sound than the first: what was made of either."""
    pairs = [[features.chunk(2) for features in part] for part in both]
    return [[a for a, _ in part] for part in pairs], [[b for _, b in part] for part in pairs]


def discriminator_loss(real: Opinions, fake: Opinions) -> Tensor:
    """Real sound should be judged 1, decoded sound 0."""
    losses = [
        (1 - r[-1].float()).square().mean() + f[-1].float().square().mean() for r, f in zip(real, fake, strict=True)
    ]
    return torch.stack(losses).mean()


def generator_losses(real: Opinions, fake: Opinions) -> tuple[Tensor, Tensor]:
    """Adversarial loss (decoded sound should be judged 1), and distance of the features relative to their size."""
    adversarial = torch.stack([(1 - part[-1].float()).square().mean() for part in fake]).mean()
    distances = []
    for real_part, fake_part in zip(real, fake, strict=True):
        for r, f in zip(real_part[:-1], fake_part[:-1], strict=True):
            target = r.detach().float()
            distances.append(F.l1_loss(f.float(), target) / target.abs().mean().clamp(min=1e-4))
    return adversarial, torch.stack(distances).mean()
