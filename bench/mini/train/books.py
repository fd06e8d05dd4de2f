"""Learning the codebooks of a residual quantiser: k-means to begin and to end with, moving averages in between.

Row 0 of each book is the zero vector and stays it (nets/codec.py says why).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vcpipe.bench.mini.nets.codec import ResidualQuantiser


@torch.no_grad()
def fit_books(quantiser: ResidualQuantiser, latents: Tensor, iterations: int, *, rounded: bool = False) -> None:
    """Learn all books from ``latents`` (N, 64) by k-means (Lloyd), each from what the books before have left.

    Empty rows start again at random vectors. ``rounded``: rows become bfloat16 values, and later books make up for that.
    """
    count, rows, _ = quantiser.books.shape
    residual, fitted = latents, []
    for _ in range(count):
        book = residual[torch.randint(len(residual), (rows,), device=residual.device)].clone()
        book[0] = 0.0
        for _ in range(iterations):
            book = _lloyd(book, residual)
        if rounded:
            book = book.bfloat16().float()
        fitted.append(book)
        residual = residual - book[_nearest(book, residual)]
    quantiser.set_books(torch.stack(fitted))


def _nearest(book: Tensor, vectors: Tensor) -> Tensor:
    return torch.addmm(book.square().sum(-1), vectors, book.T, alpha=-2.0).argmin(-1)


def _lloyd(book: Tensor, vectors: Tensor) -> Tensor:
    nearest = _nearest(book, vectors)
    hits = torch.zeros(len(book), device=book.device).index_add_(0, nearest, torch.ones_like(vectors[:, 0]))
    means = torch.zeros_like(book).index_add_(0, nearest, vectors) / hits.clamp(min=1)[:, None]
    others = vectors[torch.randint(len(vectors), (len(book),), device=book.device)]
    book = torch.where((hits > 0)[:, None], means, others)
    book[0] = 0.0
    return book


class BookAverages:
    """Moves rows to the moving average of the vectors they stood for (van den Oord et al. 2017, appendix A).

    A row that stands for less than a tenth of its share is dead and begins anew at a vector of the batch.
    """

    def __init__(self, quantiser: ResidualQuantiser, *, keep: float = 0.99) -> None:
        self._quantiser, self._keep = quantiser, keep
        books = quantiser.books
        self._hits = torch.ones(books.shape[:2], device=books.device)  # (Q, rows), relative: their mean is 1
        self._sums = books.clone()  # (Q, rows, latent)

    @torch.no_grad()
    def update(self, codes: Tensor, given: Tensor, counted: Tensor) -> None:
        """``codes`` (N, Q) were chosen for the residuals ``given`` (Q, N, latent); ``counted`` (N,): those to learn from."""
        count, rows = self._hits.shape
        books = torch.arange(count, device=codes.device)[:, None]
        places = (codes.T + rows * books).flatten()  # (Q * N)
        share = counted * (rows / counted.sum().clamp(min=1))  # (N,)
        hits = torch.zeros_like(self._hits).flatten().index_add_(0, places, share.repeat(count))
        vectors = (given * share[:, None]).flatten(0, 1)
        sums = torch.zeros_like(self._sums).flatten(0, 1).index_add_(0, places, vectors)
        self._hits.lerp_(hits.view_as(self._hits), 1 - self._keep)
        self._sums.lerp_(sums.view_as(self._sums), 1 - self._keep)
        dead = self._hits < 0.1
        chosen = torch.multinomial(counted + 1e-9, count * rows, replacement=True).view(count, rows)
        self._sums = torch.where(dead[..., None], given[books, chosen], self._sums)
        self._hits = torch.where(dead, 1.0, self._hits)
        fresh = self._sums / self._hits[..., None]
        fresh[:, 0] = 0.0
        self._quantiser.set_books(fresh)
