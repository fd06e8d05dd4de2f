// One position of a Mamba-2 mixer between its two projections: see ssm_kernel.py.

constexpr int WARPS = 8;

// What a value is where the operations that this stands for hand on a T.
template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return static_cast<float>(static_cast<T>(value));
}

template <typename T>
__device__ __forceinline__ float silu(float value) {
  return rounded<T>(value * rounded<T>(1.0f / (1.0f + expf(-value))));
}

// projected: gate, raw (CHANNELS: x, B, C) and dt (heads), one behind the other. window: the raw rows of the last TAPS positions,
// oldest first. A block has ROWS rows of one head's (SIZE, COLUMNS) state, a warp one at a time. gated has no norm yet.
template <typename T, int GROUPS, int REPEATS, int SIZE, int COLUMNS, int TAPS, int ROWS, typename Bias, typename Skip>
__device__ __forceinline__ void mamba_step(const T* projected, const T* const* window, const float* state,
                                           const float* taps, const Bias* conv_bias, const float* dt_bias,
                                           const float* decay, const Skip* skip, const float* limits, T* gated, T* raw,
                                           float* next_state) {
  constexpr int INNER = GROUPS * REPEATS * SIZE, CHANNELS = INNER + 2 * GROUPS * COLUMNS;
  constexpr int SHARE = (COLUMNS + 31) / 32, TURNS = ROWS / WARPS;
  const int head = blockIdx.y, group = head / REPEATS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.z * ROWS + warp;

  // The state does not wait for the convolution: it is on its way meanwhile.
  float old[TURNS][SHARE];
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
    for (int share = 0; share < SHARE; ++share) {
      const int row = first + turn * WARPS, column = share * 32 + lane;
      const bool inside = row < SIZE && column < COLUMNS;
      old[turn][share] = inside ? state[(head * SIZE + row) * COLUMNS + column] : 0.0f;
    }
  }

  const auto mixed = [&](int channel) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < TAPS; ++j) sum += static_cast<float>(window[j][channel]) * taps[j * CHANNELS + channel];
    return silu<T>(rounded<T>(rounded<T>(sum) + static_cast<float>(conv_bias[channel])));
  };
  __shared__ float bc[2 * COLUMNS];
  for (int i = threadIdx.x; i < 2 * COLUMNS; i += 32 * WARPS) {
    const int channel = INNER + (i / COLUMNS * GROUPS + group) * COLUMNS + i % COLUMNS;
    bc[i] = mixed(channel);
    if (head % REPEATS == 0 && blockIdx.z == 0) raw[channel] = window[TAPS - 1][channel];
  }
  __syncthreads();

  const float step = static_cast<float>(projected[INNER + CHANNELS + head]) + dt_bias[head];
  const float softplus = fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step)));
  const float dt = fminf(fmaxf(softplus, limits[0]), limits[1]);
  const float kept = expf(dt * decay[head]);
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int row = first + turn * WARPS, channel = head * SIZE + row;
    if (row >= SIZE) break;
    const float x = mixed(channel), added = dt * x;
    float y = 0.0f;
#pragma unroll
    for (int share = 0; share < SHARE; ++share) {
      const int column = share * 32 + lane;
      if (column >= COLUMNS) break;
      const float value = added * bc[column] + kept * old[turn][share];
      next_state[channel * COLUMNS + column] = value;
      y += value * bc[COLUMNS + column];
    }
    y = sum_of_warp(y);
    if (lane == 0) {
      raw[channel] = window[TAPS - 1][channel];
      const float skipped = rounded<T>(static_cast<float>(skip[head]) * x);
      gated[channel] = static_cast<T>(silu<T>(static_cast<float>(projected[channel])) * rounded<T>(rounded<T>(y) + skipped));
    }
  }
}
