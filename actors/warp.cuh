// What the threads of a warp or a block find out together.

constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float sum_of_warp(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
  return value;
}

__device__ __forceinline__ float max_of_warp(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
  return value;
}

// Of a block of COUNT warps; all get the sum. `shared` has a place for each warp.
template <int COUNT>
__device__ __forceinline__ float sum_of_block(float value, float* shared) {
  value = sum_of_warp(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < COUNT; ++i) total += shared[i];
  return total;
}
