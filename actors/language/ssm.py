"""The selective state space of Mamba-2 (Dao and Gu, 2024: "Transformers are SSMs"), for many positions and for one.

Per head, with a step size dt, a decay rate A < 0, an input x (P,) and projections B, C (N,):

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T        S is (P, N)
    y_t = S_t C_t + D x_t

H heads share G groups of B and C: head i reads group i // (H/G). States, step sizes and decays are float32; y has the
dtype of x. Batch is 1 throughout.
"""

from __future__ import annotations

import math

import mlx.core as mx

#: Positions that :func:`scan` treats at once; its work within a block is quadratic.
BLOCK = 256


def step_size(dt: mx.array, bias: mx.array, limit: tuple[float, float]) -> mx.array:
    """Projected dt of any shape and float dtype -> positive step sizes, float32."""
    low, high = limit
    dt = mx.logaddexp(dt.astype(mx.float32) + bias, 0)  # softplus, never below 0
    if low > 0:
        dt = mx.maximum(dt, low)
    return mx.minimum(dt, high) if high < math.inf else dt


def decay_rate(log_rate: mx.array) -> mx.array:
    """A_log (H,) -> A (H,) float32.

    The exponential is taken in the dtype in which A_log is stored. Taking it in float32 would be more exact, but then a
    bfloat16 checkpoint would not reproduce the numbers it gives elsewhere.
    """
    return -mx.exp(log_rate).astype(mx.float32)


def scan(x: mx.array, dt: mx.array, decay: mx.array, b: mx.array, c: mx.array, skip: mx.array) -> mx.array:
    """All positions from an empty state, in blocks of 256: quadratic within a block, recurrent between blocks.

    x (1, T, H, P); dt (1, T, H) float32; decay (H,) float32; b, c (1, T, G, N); skip (H,), which is D. Returns y (1, T, H, P).
    """
    log_decay = dt * decay  # (1, T, H)
    scaled = dt[..., None] * x  # (1, T, H, P) float32
    heads, positions = x.shape[2], x.shape[1]
    state = mx.zeros((1, heads, x.shape[3], b.shape[3]), mx.float32)
    outputs = []
    for start in range(0, positions, BLOCK):
        part = slice(start, start + BLOCK)
        y, state = _scan_block(scaled[:, part], log_decay[:, part], b[:, part], c[:, part], state)
        outputs.append(y.astype(x.dtype))
    return mx.concatenate(outputs, axis=1) + x * skip[:, None]


def _scan_block(
    scaled: mx.array, log_decay: mx.array, b: mx.array, c: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One block of :func:`scan`: y (1, S, H, P) float32 and the state after it (1, H, P, N)."""
    repeats = scaled.shape[2] // b.shape[2]
    b = b.transpose(0, 2, 3, 1)  # (1, G, N, S)
    similarity = mx.repeat(c.swapaxes(1, 2) @ b, repeats, axis=1)  # (1, H, S, S)
    between = mx.exp(_segment_sums(log_decay.swapaxes(1, 2)))  # (1, H, S, S): decay from column to row
    values = scaled.swapaxes(1, 2)  # (1, H, S, P)
    y = (mx.tril(similarity * between) @ values).swapaxes(1, 2)

    since_start = mx.exp(mx.cumsum(log_decay, axis=1))  # (1, S, H)
    y = y + since_start[..., None] * _read(state, c)

    to_end = between[:, :, -1, :, None]  # (1, H, S, 1)
    added = (values * to_end).swapaxes(2, 3) @ mx.repeat(b, repeats, axis=1).swapaxes(2, 3)
    return y, added + since_start[:, -1, :, None, None] * state


def step(
    x: mx.array, dt: mx.array, decay: mx.array, b: mx.array, c: mx.array, skip: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One position after ``state`` (1, G, R, P, N), where R = H/G heads share a group: y (1, G, R, P) and the next state.

    x (1, G, R, P); dt (1, G, R, 1) float32; decay (G, R, 1) float32; b, c (1, G, N); skip (G, R, 1), which is D. It computes
    the quadratic form of one position, C.B x dt plus the decayed old state read by C, rather than reading the new state:
    that is what :func:`scan` does too.
    """
    _, groups, repeats, size, columns = state.shape
    kept = mx.exp(dt * decay)  # (1, G, R, 1)
    column = c.reshape(1, groups, columns, 1)
    similarity = b.reshape(1, groups, 1, columns) @ column  # (1, G, 1, 1)
    read = (state.reshape(1, groups, repeats * size, columns) @ column).reshape(x.shape)
    y = (similarity * (dt * x) + kept * read).astype(x.dtype) + x * skip

    # dt x is taken once more in the state's shape: that lets it be part of the one fused pass over the state.
    added = (dt[..., None] * x[..., None]) * b.reshape(1, groups, 1, 1, columns)  # (1, G, R, P, N)
    return y, added + kept[..., None] * state


def _read(state: mx.array, c: mx.array) -> mx.array:
    """State (1, H, P, N) seen through c (1, S, G, N) -> (1, S, H, P)."""
    _, heads, size, columns = state.shape
    groups = c.shape[2]
    state = state.reshape(1, 1, groups, heads // groups, size, columns)
    return (state @ c[:, :, :, None, :, None]).squeeze(-1).flatten(2, 3)


def _segment_sums(x: mx.array) -> mx.array:
    """(..., S) -> (..., S, S): the sum over x[column+1 .. row] below the diagonal, 0 on and above it."""
    rows = mx.broadcast_to(x[..., None], (*x.shape, x.shape[-1]))
    return mx.cumsum(mx.tril(rows, -1), axis=-2)
