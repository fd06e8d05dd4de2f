"""Random numbers of one session, from a key it holds.

Drawing with the second half of a split key and keeping the first is what MLX's own global generator does, so a session with
``session_key(s)`` draws exactly the numbers that ``mx.random.seed(s)`` followed by draws without a key would give, and
nothing else in the process can disturb it.
"""

from __future__ import annotations

import mlx.core as mx

from vcpipe.schemas.errors import ConfigError


def session_key(seed: int) -> mx.array:
    """(2,) uint32 state for a seed of 0 .. 2**64 - 1; anything else is a ConfigError."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ConfigError(f"seed must be an integer from 0 to 2**64 - 1, not {seed!r}")
    return mx.random.key(seed)


def next_key(state: mx.array) -> tuple[mx.array, mx.array]:
    """State -> (state after one draw, key of that draw)."""
    following, drawn = mx.split(mx.random.split(state), 2)
    return following.reshape(2), drawn.reshape(2)
