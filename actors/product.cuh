// What the kernels of product.py share.

constexpr int WARPS = 8;

// How the input is made: see RmsNorm and LayerNorm in norms.py.
constexpr int NOTHING = 0, RMS = 1, LAYER = 2;

// What becomes of the outputs: see Activation in product_kernels.py.
constexpr int SQUARED_RELU = 1, SILU = 2, GATED_GELU = 3, GATED_SIGMOID = 4;

// Four numbers that lie in a row.
__device__ __forceinline__ void load(const float* from, float* to) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
}

__device__ __forceinline__ void load(const __nv_bfloat16* from, float* to) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  to[0] = __uint_as_float(words.x << 16);
  to[1] = __uint_as_float(words.x & 0xffff0000u);
  to[2] = __uint_as_float(words.y << 16);
  to[3] = __uint_as_float(words.y & 0xffff0000u);
}

__device__ __forceinline__ void load(const __half* from, float* to) {
  for (int i = 0; i < 4; ++i) to[i] = __half2float(from[i]);
}
