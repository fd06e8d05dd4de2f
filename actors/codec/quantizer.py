"""Residual vector quantisation (RVQ; SoundStream, Zeghidour et al. 2021): a latent as a sum of one vector of each codebook."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.codec.config import CodecConfig
from vcpipe.actors.codec.frames import on_gpu


class Variance(nn.Module):
    """A codebook's variance: part of every checkpoint, used in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.variance = mx.array(1.0)


class ResidualQuantizer(nn.Module):
    """``mus_list``: the codebooks, each (codebook_size, latent_dim), in the order in which they are applied."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.mus_list = [mx.zeros((config.codebook_size, config.latent_dim)) for _ in range(config.num_quantizers)]
        self._size = config.codebook_size
        self.variance_list = [Variance() for _ in range(config.num_quantizers)]

    def prepare(self) -> None:
        """Lay the codebooks one after the other into one table, of which each becomes a part."""
        self._table = mx.concatenate(self.mus_list)  # (Q * codebook_size, latent_dim)
        self._starts = mx.arange(len(self.mus_list))[:, None] * self._size
        self.mus_list = list(mx.split(self._table, len(self.mus_list)))
        mx.eval(self._table, self._starts, self.mus_list)

    def encode(self, latents: mx.array) -> mx.array:
        """(B, T, latent_dim) -> codes (B, Q, T): the nearest vector to what the codebooks before have left."""
        residual = latents
        codes = []
        for codebook in self.mus_list:
            distances = (
                mx.sum(residual * residual, axis=-1, keepdims=True)
                - 2.0 * (residual @ codebook.T)
                + mx.sum(codebook * codebook, axis=-1)
            )  # (B, T, codebook_size)
            nearest = mx.argmin(distances, axis=-1)  # (B, T)
            codes.append(nearest)
            residual = residual - codebook[nearest]
        return mx.stack(codes, axis=1)

    def decode(self, codes: mx.array) -> mx.array:
        """Codes (B, Q, T) -> (B, T, latent_dim), summed in the codebooks' dtype. Fewer codebooks give a coarser latent."""
        if codes.ndim != 3:
            raise ValueError(f"codes have shape (batch, codebooks, frames), not {codes.shape}")
        used = codes.shape[1]
        if used > len(self.mus_list):
            raise ValueError(f"codes of {used} codebooks, the codec has {len(self.mus_list)}")
        vectors = mx.take(self._table, codes + self._starts[:used], axis=0)  # (B, Q, T, latent_dim)
        # One after the other, rounded each time: a reduction would round differently, as would a GPU's running sum.
        if not on_gpu():
            return mx.cumsum(vectors, axis=1)[:, -1]
        latents, *others = mx.split(vectors, used, axis=1)
        for vector in others:
            latents = latents + vector
        return latents.squeeze(1)
