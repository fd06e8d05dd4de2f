"""The residual vector quantiser's tables: codes -> their summed entries, a residual -> the nearest entry."""

from __future__ import annotations

import mlx.core as mx


class Codebooks:
    """Q tables of K entries, widened to float32 once.

    ``entries``: the checkpoint's (Q, K, Z) tensor. Code K is the mask: it stands for an entry of zeros.
    """

    def __init__(self, entries: mx.array) -> None:
        self.count, self.size, self.latent_size = entries.shape
        self._tables = [entries[q].astype(mx.float32) for q in range(self.count)]  # (K, Z) each
        # Squared in the stored dtype: that rounding is part of the distances.
        self._norms = [mx.sum(entries[q] * entries[q], axis=-1).astype(mx.float32) for q in range(self.count)]
        mx.eval(self._tables, self._norms)

    def depth_sum(self, codes: mx.array) -> mx.array:
        """(..., Q) int -> (..., Z) float32, added in the order of the codebooks."""
        total = mx.zeros((*codes.shape[:-1], self.latent_size))
        for q, table in enumerate(self._tables):
            code = codes[..., q]
            entry = table[mx.minimum(code, self.size - 1)]
            total = total + mx.where((code == self.size)[..., None], 0.0, entry)
        return total

    def nearest(self, residual: mx.array, codebook: int) -> tuple[mx.array, mx.array]:
        """residual (1, 1, Z) float32 -> code (1, 1) uint32 of the nearest entry (the first of equals), entry (1, 1, Z)."""
        table = self._tables[codebook]
        distance = self._norms[codebook] - 2.0 * (residual @ table.T)  # (1, 1, K), less the residual's own norm
        code = mx.argmin(distance, axis=-1)
        return code, table[code]
