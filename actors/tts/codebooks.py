"""The residual vector quantiser's tables: codes -> their summed entries, a residual -> the nearest entries.

A *choice* (1, 1, W) float32 is the state of choosing codes: what is left of the continuous code (Z), the sum of the entries
chosen so far (Z), and the codes themselves (Q, padded). Every table has one row a code that is added to the choice when the
code is chosen: minus the entry, the entry, and the code in its codebook's column. All of it is exact in float32.

On CUDA :func:`vcpipe.actors.tts.kernels.fix_codes` chooses from the tables as they are stored.
"""

from __future__ import annotations

import mlx.core as mx

#: Rows of the tables are padded to a multiple of this, so that each begins on an aligned address.
_ALIGNMENT = 4


class Codebooks:
    """Q tables of K entries, widened to float32 once.

    ``entries``: the checkpoint's (Q, K, Z) tensor.
    """

    def __init__(self, entries: mx.array) -> None:
        self.count, self.size, self.latent_size = entries.shape
        self._width = 2 * self.latent_size + -(-self.count // _ALIGNMENT) * _ALIGNMENT
        self._table = mx.stack(
            [self._rows_of(entries[q].astype(mx.float32), q) for q in range(self.count)]
        )  # (Q, K, W)
        mx.eval(self._table)
        self._rows = [self._table[q : q + 1] for q in range(self.count)]  # views
        self._negated = [rows[..., : self.latent_size].swapaxes(1, 2) for rows in self._rows]  # (1, Z, K) views
        norms = squared_norms(entries)
        self._norms = [norms[q : q + 1][None] for q in range(self.count)]
        self._nothing = mx.zeros((1, 1, self._width - self.latent_size))
        mx.eval(self._rows, self._negated, self._norms, self._nothing)

    @property
    def entries(self) -> mx.array:
        """(Q, K, Z) float32."""
        return self._table[..., self.latent_size : 2 * self.latent_size]

    def begin(self, residual: mx.array, choice: mx.array | None) -> mx.array:
        """``residual`` (1, 1, Z) as what is left to choose for, with the sum and codes of ``choice`` (None: none yet)."""
        chosen = self._nothing if choice is None else choice[..., self.latent_size :]
        return mx.concatenate([residual, chosen], axis=-1)

    def choose(self, choice: mx.array, first: int, count: int) -> mx.array:
        """Add the entries nearest to what is left, of ``count`` codebooks from ``first`` on, one after the other."""
        for codebook in range(first, first + count):
            choice = self._choose_one(choice, codebook)
        return choice

    def _choose_one(self, choice: mx.array, codebook: int) -> mx.array:
        """Of equally near entries the first is taken."""
        left = choice[..., : self.latent_size]
        # Squared distances less the square of what is left: |e|^2 - 2 e left.
        distance = mx.addmm(self._norms[codebook], left, self._negated[codebook], alpha=2.0)  # (1, 1, K)
        nearest = mx.argmin(distance, axis=-1, keepdims=True)
        return choice + mx.take_along_axis(self._rows[codebook], nearest, axis=1)

    def sum_of(self, choice: mx.array) -> mx.array:
        """(1, 1, Z): the chosen entries, added in the order of the codebooks."""
        return choice[..., self.latent_size : 2 * self.latent_size]

    def codes_of(self, choice: mx.array) -> mx.array:
        """(1, 1, Q), whole numbers in float32."""
        return choice[..., 2 * self.latent_size : 2 * self.latent_size + self.count]

    def _rows_of(self, entries: mx.array, codebook: int) -> mx.array:
        """Entries (K, Z) of a codebook -> its rows (K, W)."""
        columns = mx.arange(self._width - 2 * self.latent_size)[None]
        codes = mx.where(columns == codebook, mx.arange(self.size)[:, None], 0).astype(mx.float32)
        return mx.concatenate([-entries, entries, codes], axis=1)


def squared_norms(entries: mx.array) -> mx.array:
    """(Q, K, Z) -> (Q, K) float32, squared in the stored dtype: that rounding is part of the distances."""
    return mx.sum(entries * entries, axis=-1).astype(mx.float32)


def depth_sum(entries: mx.array, codes: mx.array) -> mx.array:
    """Codes (..., Q) int of ``entries`` (Q, K, Z) -> (..., Z) float32, added in the order of the codebooks.

    Code K is the mask: it stands for an entry of zeros.
    """
    total = mx.zeros((*codes.shape[:-1], entries.shape[-1]))
    size = entries.shape[1]
    for q in range(entries.shape[0]):
        code = codes[..., q]
        entry = entries[q][mx.minimum(code, size - 1)].astype(mx.float32)
        total = total + mx.where((code == size)[..., None], 0.0, entry)
    return total
