"""The state space in blocks and step by step, against the recurrence written out."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vcpipe.actors.language import ssm


def as_float32(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 1e-5), (mx.bfloat16, 3e-2)])
def test_state_space_in_blocks_equals_the_recurrence(dtype, tolerance):
    """scan over more than one block, step by step, and the defining recurrence in numpy agree."""
    rng = np.random.default_rng(1)
    positions, heads, size, groups, columns = ssm.BLOCK + 9, 4, 3, 2, 8
    x = mx.array(rng.normal(size=(1, positions, heads, size))).astype(dtype)
    b, c = (mx.array(rng.normal(size=(1, positions, groups, columns)) / 3).astype(dtype) for _ in range(2))
    skip = mx.array(rng.normal(size=heads)).astype(dtype)
    decay = ssm.decay_rate(mx.array(rng.normal(size=heads)).astype(dtype))
    dt = ssm.step_size(mx.array(rng.normal(size=(1, positions, heads)) - 2), mx.zeros(heads), (0.0, float("inf")))
    assert decay.dtype == dt.dtype == mx.float32

    wanted = recurrence(x, dt, decay, b, c, skip)
    scanned = ssm.scan(x, dt, decay, b, c, skip)
    assert scanned.dtype == dtype
    np.testing.assert_allclose(as_float32(scanned), wanted, atol=tolerance * np.abs(wanted).max())

    grouped = (groups, heads // groups)
    state, stepped = mx.zeros((1, *grouped, size, columns)), []
    by_group = [array.reshape(*grouped, 1) for array in (decay, skip)]
    for t in range(positions):
        inputs = x[:, t].reshape(1, *grouped, size), dt[:, t].reshape(1, *grouped, 1), by_group[0], b[:, t], c[:, t]
        y, state = ssm.step(*inputs, by_group[1], state)
        mx.eval(y, state)
        stepped.append(y.reshape(1, 1, heads, size))
    assert state.dtype == mx.float32
    together = mx.concatenate(stepped, axis=1)
    np.testing.assert_allclose(as_float32(together), wanted, atol=tolerance * np.abs(wanted).max())

    first = slice(0, 1)
    alone = ssm.scan(x[:, first], dt[:, first], decay, b[:, first], c[:, first], skip)
    np.testing.assert_allclose(
        as_float32(alone), as_float32(together[:, first]), rtol=1e-5 if dtype == mx.float32 else 1e-2
    )


def recurrence(x, dt, decay, b, c, skip) -> np.ndarray:
    x, dt, decay, b, c, skip = (np.array(a.astype(mx.float32), np.float64) for a in (x, dt, decay, b, c, skip))
    _, positions, heads, size = x.shape
    share = heads // b.shape[2]
    state, y = np.zeros((heads, size, b.shape[3])), np.zeros(x.shape)
    for t in range(positions):
        for h in range(heads):
            state[h] = np.exp(dt[0, t, h] * decay[h]) * state[h] + dt[0, t, h] * np.outer(
                x[0, t, h], b[0, t, h // share]
            )
            y[0, t, h] = state[h] @ c[0, t, h // share] + skip[h] * x[0, t, h]
    return y


def test_step_size_is_clipped_after_softplus():
    dt = ssm.step_size(mx.array([[[-50.0, 0.0, 50.0]]]), mx.zeros(3), (0.1, 5.0))
    np.testing.assert_allclose(np.array(dt[0, 0]), [0.1, np.log(2), 5.0], rtol=1e-6)
