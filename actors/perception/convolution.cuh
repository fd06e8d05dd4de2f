// Depthwise convolution of one frame, its norm and SiLU.

// One block, for the norm needs all channels: gated (WIDTH,), past (TAPS, WIDTH), taps (TAPS, WIDTH) by distance
// -> out (WIDTH,) = silu(norm(convolution + bias)), and the past after it. EPS is the bits of a float.
template <int WIDTH, int TAPS, bool BIASED, int EPS>
__device__ __forceinline__ void convolve(const float* gated, const float* past, const float* taps, const int* distances,
                                         const float* bias, const float* scale, const float* offset, float* out,
                                         float* after) {
  constexpr int SHARE = (WIDTH + THREADS - 1) / THREADS;
  __shared__ float shared[WARPS];
  float heard[SHARE][TAPS], mixed[SHARE] = {};
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int channel = threadIdx.x + s * THREADS;
    if (channel >= WIDTH) continue;
    if constexpr (BIASED) mixed[s] = bias[channel];
#pragma unroll
    for (int t = 0; t < TAPS; ++t) {
      const int distance = distances[t];
      heard[s][t] = *(distance ? past + t * WIDTH + channel : gated + channel);
      mixed[s] += heard[s][t] * taps[distance * WIDTH + channel];
    }
  }

  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int channel = threadIdx.x + s * THREADS;
    if (channel >= WIDTH) continue;
    sum += mixed[s];
#pragma unroll
    for (int t = 0; t < TAPS; ++t) after[t * WIDTH + channel] = heard[s][t];
  }
  const float mean = sum_of_block<WARPS>(sum, shared) / WIDTH;
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    if (threadIdx.x + s * THREADS < WIDTH) squares += (mixed[s] - mean) * (mixed[s] - mean);
  }
  const float rate = rsqrtf(sum_of_block<WARPS>(squares, shared) / WIDTH + __int_as_float(EPS));
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int channel = threadIdx.x + s * THREADS;
    if (channel >= WIDTH) continue;
    const float normed = (mixed[s] - mean) * rate * scale[channel] + offset[channel];
    out[channel] = normed / (1.0f + expf(-normed));
  }
}
