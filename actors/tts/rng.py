"""Random numbers of one session, from a key it holds.

Drawing with the second half of a split key and keeping the first is what MLX's own global generator does, so a session with
``session_key(s)`` draws exactly the numbers that ``mx.random.seed(s)`` followed by draws without a key would give, and
nothing else in the process can disturb it.
"""

from __future__ import annotations

import mlx.core as mx

from vcpipe.actors.product import on_cuda
from vcpipe.actors.tts import kernels
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


def draws(
    state: mx.array, passes: int, uniforms: int, normals: int
) -> tuple[mx.array, list[tuple[mx.array, mx.array]]]:
    """What ``passes`` draw from ``state``, each first a uniform array, then a normal one.

    -> state after them, for each pass (1, 1, uniforms) in [0, 1) and (1, 1, normals).
    """
    state, keys = _key_chain(state, 2 * passes)
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(1, uniforms), key=key))(keys[::2])
    normal = mx.vmap(lambda key: mx.random.normal((1, normals), key=key))(keys[1::2])
    return state, list(zip(mx.split(uniform, passes), mx.split(normal, passes), strict=True))


def _key_chain(state: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """-> state after ``count`` draws, their keys (count, 2)."""
    if on_cuda():
        after, keys = mx.split(kernels.key_chain(state, count), [1])
        return after.reshape(2), keys
    drawn = []
    for _ in range(count):
        state, key = next_key(state)
        drawn.append(key)
    return state, mx.stack(drawn)
