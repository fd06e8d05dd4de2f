"""How far heard words are from the wanted ones."""

from __future__ import annotations


def word_errors(wanted: list[str], heard: list[str]) -> int:
    """Fewest words to change, leave out or put in (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(wanted, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1]
