"""The codec in PyTorch: what the codec actor computes, with gradients. Names and layouts are the checkpoint's.

Waveform -> spectrum of 16 points every 4 samples -> causal ConvNeXt stages and strided convolutions -> latents z, 12.5 a second
-> residual vector quantisation -> transposed convolutions and ConvNeXt stages -> magnitudes and phases -> overlap-add of frames
that are clamped to the window. ConvNeXt: Liu et al. 2022; for audio, with a spectrum as output: Vocos, Siuzdak 2023; residual
quantisation: SoundStream, Zeghidour et al. 2021.

Activations are (B, T, C). Convolutions whose stride is their kernel, and those of kernel 1, are matrix products.

Silence has a place of its own: row 0 of every codebook is a zero vector that training never moves, and the encoder learns to
put digital silence at z = 0. So silence is the code 0 of all books, and no other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

_MAX_MAGNITUDE = 100.0


class Codec(nn.Module):
    """See the module. ``sizes`` is the ``codec_config`` of a runtime config."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.n_fft, self.hop = int(sizes["n_fft"]), int(sizes["hop_length"])
        self.frame_samples = self.hop * math.prod(sizes["downsample_rates"])
        self.latent = int(sizes["latent_dim"])
        self.encoder = Encoder(sizes)
        self.decoder = Decoder(sizes)
        self.prvq = ResidualQuantiser(sizes["num_quantizers"], sizes["codebook_size"], self.latent)

    @property
    def books(self) -> Tensor:
        """All codebooks, (31, 128, 64): what ``rvq_embs`` of the speech decoder holds too."""
        return self.prvq.books

    def encode(self, waveform: Tensor) -> Tensor:
        """(B, samples) float32 -> latents (B, samples // 1764, 64)."""
        return self.encoder(spectral_features(waveform, self.n_fft, self.hop))

    def quantise(self, latents: Tensor, books: int | None = None) -> tuple[Tensor, Tensor]:
        """Latents (B, T, 64) -> codes (B, T, Q) and the sum of their rows (B, T, 64), of the first ``books`` books or all."""
        codes, _, total = self.prvq.quantise(latents.reshape(-1, self.latent), books)
        return codes.view(*latents.shape[:2], -1), total.view_as(latents)

    def decode(self, latents: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Sums of rows (B, T, 64) -> waveform (B, 1764 T) float32.

        ``dtype``: of weights and activations up to the spectrum. With bfloat16 they are rounded as they are at inference.
        """
        spectrum = polar_spectrum(self.decoder(latents.to(dtype)))
        return inverse_stft(spectrum.float(), self.n_fft, self.hop)


# ------------------------------------------------------------------------------------------------ layers
class FrameLinear(nn.Module):
    """A convolution of kernel 1 as PyTorch stores it, (outputs, inputs, 1)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(_normal((outputs, inputs, 1), inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight[:, :, 0].to(x.dtype), bias)


class Downsample(nn.Module):
    """A convolution whose stride is its kernel; frames that fill no kernel are left out. Weight (outputs, inputs, rate)."""

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.weight = nn.Parameter(_normal((outputs, inputs, rate), inputs * rate))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, inputs) -> (B, T // rate, outputs)."""
        batch, frames, inputs = x.shape
        count = frames // self.rate
        windows = x[:, : count * self.rate].reshape(batch, count, self.rate * inputs)
        return F.linear(windows, self.weight.permute(0, 2, 1).flatten(1).to(x.dtype))


class Upsample(nn.Module):
    """A transposed convolution whose stride is its kernel. Weight (inputs, outputs, rate)."""

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.weight = nn.Parameter(_normal((inputs, outputs, rate), inputs))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, inputs) -> (B, rate * T, outputs)."""
        batch, frames, _ = x.shape
        every = self.weight.permute(0, 2, 1).flatten(1).to(x.dtype)  # (inputs, rate * outputs)
        return (x @ every).view(batch, frames * self.rate, -1)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution over the frame and its past, layer norm, two-layer network on each frame; plus the input."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv1d(channels, channels, kernel, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = FrameLinear(channels, 4 * channels)
        self.pwconv2 = FrameLinear(4 * channels, channels)
        with torch.no_grad():
            self.pwconv2.weight.mul_(0.3)  # a block begins near the identity

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        weight, bias = self.dwconv.weight.to(x.dtype), self.dwconv.bias.to(x.dtype)
        past = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))  # (B, C, kernel - 1 + T)
        y = F.conv1d(past, weight, bias, groups=len(weight)).transpose(1, 2)
        y = F.layer_norm(y, y.shape[-1:], self.norm.weight.to(x.dtype), self.norm.bias.to(x.dtype), self.norm.eps)
        return x + self.pwconv2(F.gelu(self.pwconv1(y)))


def _normal(shape: tuple[int, ...], fan_in: int) -> Tensor:
    return torch.randn(shape) * fan_in**-0.5


class Encoder(nn.Module):
    """``layers`` as the checkpoint counts them: a projection; for each stage its blocks and a strided convolution."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        widths = [sizes["base_channels"] * m for m in sizes["channel_multipliers"]] + [sizes["latent_dim"]]
        layers: list[nn.Module] = [FrameLinear(sizes["n_fft"] + 2, widths[0], bias=False)]
        for stage, rate in enumerate(sizes["downsample_rates"]):
            blocks = sizes["blocks_per_stage"]
            layers += [ConvNeXtBlock(widths[stage], sizes["block_kernel_size"]) for _ in range(blocks)]
            layers.append(Downsample(widths[stage], widths[stage + 1], rate))
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """(B, F, 18) -> (B, F // 441, 64)."""
        return self.layers(features)


class Decoder(nn.Module):
    """``layers``: for each stage a transposed convolution and its blocks; a projection to log-magnitudes and phases."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        widths = [sizes["latent_dim"], *(sizes["base_channels"] * m for m in reversed(sizes["channel_multipliers"]))]
        layers: list[nn.Module] = []
        for stage, rate in enumerate(reversed(sizes["downsample_rates"])):
            layers.append(Upsample(widths[stage], widths[stage + 1], rate))
            blocks = sizes["blocks_per_stage"]
            layers += [ConvNeXtBlock(widths[stage + 1], sizes["block_kernel_size"]) for _ in range(blocks)]
        layers.append(FrameLinear(widths[-1], sizes["n_fft"] + 2, bias=False))
        self.layers = nn.Sequential(*layers)

    def forward(self, latents: Tensor) -> Tensor:
        """(B, T, 64) -> (B, 441 T, 18)."""
        return self.layers(latents)


# ------------------------------------------------------------------------------------------------ quantiser
class Variance(nn.Module):
    """Part of every checkpoint; nothing reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.variance = nn.Parameter(torch.ones(()), requires_grad=False)


class ResidualQuantiser(nn.Module):
    """``mus_list``: codebooks (128, 64), each for what the ones before have left. No gradient reaches them; row 0 is zero."""

    def __init__(self, books: int, rows: int, latent: int) -> None:
        super().__init__()
        tables = [torch.randn(rows, latent) * 0.5**i for i in range(books)]
        for table in tables:
            table[0] = 0.0
        self.mus_list = nn.ParameterList([nn.Parameter(table, requires_grad=False) for table in tables])
        self._variance_list = nn.ModuleList([Variance() for _ in range(books)])

    @property
    def books(self) -> Tensor:
        """(Q, rows, latent)."""
        return torch.stack([table.detach() for table in self.mus_list])

    @torch.no_grad()
    def set_books(self, books: Tensor) -> None:
        """Overwrite the codebooks, (Q, rows, latent)."""
        torch._foreach_copy_(list(self.mus_list), list(books.unbind(0)))

    @torch.no_grad()
    def quantise(self, latents: Tensor, books: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(N, latent) -> codes (N, Q), what each book was given (Q, N, latent), sum of all rows (N, latent)."""
        tables = self.books[:books]
        lengths = tables.square().sum(-1)
        residual, given, codes = latents.detach(), [], []
        for table, length in zip(tables, lengths, strict=True):
            given.append(residual)
            # |r - mu|^2 without |r|^2, which is the same for all rows.
            nearest = torch.addmm(length, residual, table.T, alpha=-2.0).argmin(-1)
            codes.append(nearest)
            residual = residual - table[nearest]
        return torch.stack(codes, dim=-1), torch.stack(given), latents.detach() - residual


# ------------------------------------------------------------------------------------------------ spectrum
def _window(n_fft: int, like: Tensor) -> Tensor:
    return torch.hann_window(n_fft, periodic=True, device=like.device)


def spectral_features(waveform: Tensor, n_fft: int, hop: int) -> Tensor:
    """(B, samples) float32 -> (B, samples // hop, n_fft + 2): real parts, then imaginary parts; not centred."""
    edge = (n_fft - hop) // 2
    frames = F.pad(waveform, (edge, edge)).unfold(-1, n_fft, hop)
    return frames @ _forward_matrix(n_fft, waveform)


def polar_spectrum(features: Tensor) -> Tensor:
    """(B, F, 2 * bins) of log-magnitudes m, then phases -> real parts, then imaginary parts.

    The magnitude 100 / (1 + 100 exp(-m)) is exp(m) for small m and saturates at 100.
    """
    logits, phase = features.chunk(2, dim=-1)
    magnitude = _MAX_MAGNITUDE * torch.exp(-F.softplus(math.log(_MAX_MAGNITUDE) - logits))
    return torch.cat([magnitude * torch.cos(phase), magnitude * torch.sin(phase)], dim=-1)


def inverse_stft(spectrum: Tensor, n_fft: int, hop: int) -> Tensor:
    """(B, F, 2 * bins) float32 -> (B, hop * F): frames clamped to the window, windowed, overlap-added, edges cut off."""
    window = _window(n_fft, spectrum)
    signals = spectrum @ _inverse_matrix(n_fft, spectrum)  # (B, F, n_fft)
    signals = torch.minimum(torch.maximum(signals, -window), window) * window
    edge = (n_fft - hop) // 2
    sums = _overlap_add(window.square().expand(1, spectrum.shape[1], n_fft), hop).clamp(min=1e-10)
    return (_overlap_add(signals, hop) / sums)[:, edge:-edge]


def _overlap_add(frames: Tensor, hop: int) -> Tensor:
    """(B, F, n) -> (B, (F - 1) * hop + n)."""
    overlaps = frames.shape[-1] // hop
    parts = frames.unflatten(-1, (overlaps, hop)).unbind(2)
    total = sum(F.pad(part, (0, 0, i, overlaps - 1 - i)) for i, part in enumerate(parts))
    return total.flatten(1)


# A transform of 16 points is a product with a matrix. They are made once for each device.
_matrices: dict[tuple[str, int, torch.device], Tensor] = {}


def _forward_matrix(n_fft: int, like: Tensor) -> Tensor:
    """(n_fft, 2 * bins): periodic Hann window and Fourier transform of a real signal."""

    def make() -> np.ndarray:
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft)
        spectrum = np.fft.rfft(np.diag(window))
        return np.concatenate([spectrum.real, spectrum.imag], axis=1)

    return _matrix("forward", n_fft, like, make)


def _inverse_matrix(n_fft: int, like: Tensor) -> Tensor:
    """(2 * bins, n_fft): inverse transform; the imaginary parts of the first and last bin have no effect."""

    def make() -> np.ndarray:
        unit = np.eye(n_fft // 2 + 1)
        return np.concatenate([np.fft.irfft(unit, n_fft), np.fft.irfft(1j * unit, n_fft)])

    return _matrix("inverse", n_fft, like, make)


def _matrix(name: str, n_fft: int, like: Tensor, make: Any) -> Tensor:
    key = (name, n_fft, like.device)
    if key not in _matrices:
        _matrices[key] = torch.from_numpy(make().astype(np.float32)).to(like.device)
    return _matrices[key]
