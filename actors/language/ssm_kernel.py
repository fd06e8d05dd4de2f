"""One position of a Mamba-2 mixer, from its input projection to its norm, as one CUDA kernel.

On a fast GPU a step's time is the number of operations it starts. This one (``ssm_kernel.cuh``) stands for convolution, SiLU,
step size, state update, read-out and gate, and passes over the state once. Its numbers are those of ``ssm.step`` up to
rounding: it reads the new state where that adds the old one's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from vcpipe.actors.language.config import LanguageConfig
from vcpipe.actors.product import included

#: Threads of a block, eight warps, and rows of a head's (P, N) state that a block updates: two a warp.
_THREADS, _ROWS = 256, 16

_TEMPLATE = ("T", "GROUPS", "REPEATS", "SIZE", "COLUMNS", "TAPS", "ROWS")
_CONSTANTS = ("taps", "conv_bias", "dt_bias", "decay", "skip", "limits")


class StateSpaceKernel:
    """The kernel with one mixer's constants: taps (k, C), dt_bias and decay of H each, float32; conv_bias (C,), skip of H."""

    def __init__(
        self,
        config: LanguageConfig,
        *,
        taps: mx.array,
        conv_bias: mx.array,
        dt_bias: mx.array,
        decay: mx.array,
        skip: mx.array,
    ) -> None:
        limits = mx.array(config.time_step_limit, mx.float32)
        mx.eval(limits)
        self._constants = [taps, conv_bias, dt_bias, decay, skip, limits]
        groups, heads, size = config.n_groups, config.mamba_num_heads, config.mamba_head_dim
        self._sizes = (groups, heads // groups, size, config.ssm_state_size, config.conv_kernel, _ROWS)
        self._grid = (_THREADS, heads, -(-size // _ROWS))
        self._shapes = [(1, 1, config.inner_size), (1, 1, config.conv_size)]

    def __call__(
        self, projected: mx.array, past: Sequence[mx.array], state: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """projected (1, 1, I+C+H) and past rows (1, 1, C) each, of one dtype, and state (1, G, R, P, N) float32.

        Returns gated y before the norm, (1, 1, I), this position's row (1, 1, C), and the next state.
        """
        dtype = projected.dtype
        gated, raw, state = _kernel(len(past))(
            inputs=[projected, state, *self._constants, *past],
            template=list(zip(_TEMPLATE, (dtype, *self._sizes), strict=True)),
            grid=self._grid,
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[*self._shapes, state.shape],
            output_dtypes=[dtype, dtype, mx.float32],
        )
        return gated, raw, state


@cache
def _kernel(past_rows: int) -> Any:
    past = [f"past{i}" for i in range(past_rows)]
    return mx.fast.cuda_kernel(
        name="vcpipe_mamba_step",
        input_names=["projected", "state", *_CONSTANTS, *past],
        output_names=["gated", "raw", "next_state"],
        source=f"""const T* window[] = {{{", ".join([*past, "projected + GROUPS * REPEATS * SIZE"])}}};
mamba_step<{", ".join(_TEMPLATE)}>(projected, window, state, {", ".join(_CONSTANTS)}, gated, raw, next_state);""",
        header=included("vcpipe.actors", "warp.cuh") + included("vcpipe.actors.language", "ssm_kernel.cuh"),
    )
