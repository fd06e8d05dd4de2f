"""State of one decoded stream: what the causal layers and the overlap-add still need of the past."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx


class StreamCache:
    """The last frames of named inputs, so that a chunk is computed as if the whole past stood before it.

    ``entries``: key -> (B, padding, C) array. A stream starts without entries.
    """

    def __init__(self, entries: Mapping[str, mx.array] | None = None) -> None:
        self.entries: dict[str, mx.array] = dict(entries or {})

    def update(self, states: mx.array, key: str, padding: int, *, flush: bool = False) -> mx.array:
        """Put the ``padding`` frames before ``states`` (B, T, C) in front of it: (B, padding + T, C).

        At the start of a stream they are zeros of the states' dtype. The last ``padding`` frames are kept for the next call,
        or dropped with ``flush``. ValueError for a negative ``padding`` and for an entry that does not fit the states.
        """
        if padding < 0:
            raise ValueError(f"padding must not be negative, got {padding}")
        if padding == 0:
            return states
        expected = (states.shape[0], padding, states.shape[2])
        previous = self.entries.pop(key, None)
        if previous is None:
            previous = mx.zeros(expected, dtype=states.dtype)
        elif previous.shape != expected:
            raise ValueError(f"cache entry {key!r} has shape {previous.shape}, these states need {expected}")
        extended = mx.concatenate([previous, states], axis=1)
        if not flush:
            self.entries[key] = extended[:, -padding:]
        return extended

    def clear(self) -> None:
        """Back to the start of a stream."""
        self.entries.clear()

    @property
    def nbytes(self) -> int:
        """Memory of the entries."""
        return sum(entry.nbytes for entry in self.entries.values())
