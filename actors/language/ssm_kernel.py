"""One position of a Mamba-2 mixer, from its input projection to its norm, as one CUDA kernel.

On a fast GPU a step's time is the number of operations it starts. This one stands for convolution, SiLU, step size, state
update, read-out and gate, and passes over the state once. Its numbers are those of ``ssm.step`` up to rounding: it reads the
new state where that adds the old one's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from vcpipe.actors.language.config import LanguageConfig

#: Threads of a block, eight warps, and rows of a head's (P, N) state that a block updates: two a warp.
_THREADS, _ROWS = 256, 16

#: A block has part of one head's rows, a warp a row at a time. ``PAST`` stands for the names of the past rows. gated has no
#: norm yet.
_SOURCE = """
constexpr int inner = GROUPS * REPEATS * SIZE, channels = inner + 2 * GROUPS * COLUMNS;
const int head = blockIdx.y, group = head / REPEATS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
const float* window[] = {PAST projected + inner};

auto silu = [](float v) { return v / (1.0f + expf(-v)); };
auto mixed = [&](int channel) {
  float sum = conv_bias[channel];
  for (int j = 0; j < TAPS; ++j) sum += window[j][channel] * taps[j * channels + channel];
  return silu(sum);
};

__shared__ float bc[2 * COLUMNS];
for (int i = threadIdx.x; i < 2 * COLUMNS; i += blockDim.x) {
  bc[i] = mixed(inner + (i / COLUMNS * GROUPS + group) * COLUMNS + i % COLUMNS);
}
__syncthreads();

const float raw = projected[inner + channels + head] + dt_bias[head];
const float softplus = fmaxf(raw, 0.0f) + log1pf(expf(-fabsf(raw)));
const float dt = fminf(fmaxf(softplus, limits[0]), limits[1]);
const float kept = expf(dt * decay[head]);

const int first = blockIdx.z * ROWS, end = first + ROWS < SIZE ? first + ROWS : SIZE;
for (int row = first + warp; row < end; row += blockDim.x / 32) {
  const int channel = head * SIZE + row;
  const float x = mixed(channel), added = dt * x;
  float y = 0.0f;
  for (int n = lane; n < COLUMNS; n += 32) {
    const float value = added * bc[n] + kept * state[channel * COLUMNS + n];
    next_state[channel * COLUMNS + n] = value;
    y += value * bc[COLUMNS + n];
  }
  for (int offset = 16; offset > 0; offset /= 2) y += __shfl_xor_sync(0xffffffff, y, offset);
  if (lane == 0) gated[channel] = silu(projected[channel]) * (y + skip[head] * x);
}
"""


def available() -> bool:
    """Whether MLX runs on a CUDA device now."""
    return mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu


class StateSpaceKernel:
    """The kernel with one mixer's constants, all float32: taps (k, C), conv_bias (C,); dt_bias, decay and skip of H each."""

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
        past = [f"past{j}" for j in range(config.conv_kernel - 1)]
        limits = mx.array(config.time_step_limit, mx.float32)
        mx.eval(limits)
        self._constants = [taps, conv_bias, dt_bias, decay, skip, limits]
        self._kernel: Any = mx.fast.cuda_kernel(
            name="mamba_step",
            input_names=["projected", "state", "taps", "conv_bias", "dt_bias", "decay", "skip", "limits", *past],
            output_names=["gated", "next_state"],
            source=_SOURCE.replace("PAST", "".join(f"{name}, " for name in past)),
        )
        groups, heads, size = config.n_groups, config.mamba_num_heads, config.mamba_head_dim
        self._sizes = {
            "GROUPS": groups,
            "REPEATS": heads // groups,
            "SIZE": size,
            "COLUMNS": config.ssm_state_size,
            "TAPS": config.conv_kernel,
            "ROWS": _ROWS,
        }
        self._grid = (_THREADS, heads, -(-size // _ROWS))
        self._gated_shape = (1, groups, heads // groups * size)

    def __call__(self, projected: mx.array, past: Sequence[mx.array], state: mx.array) -> tuple[mx.array, mx.array]:
        """projected (1, 1, I+C+H), past rows (1, 1, C) each, all float32, and state (1, G, R, P, N).

        Returns gated y before the norm, (1, G, R * P), and the next state.
        """
        gated, state = self._kernel(
            inputs=[projected, state, *self._constants, *past],
            template=list(self._sizes.items()),
            grid=self._grid,
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[self._gated_shape, state.shape],
            output_dtypes=[mx.float32, mx.float32],
        )
        return gated, state
