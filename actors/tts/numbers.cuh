// What the kernels of the speech decoder share.

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// Four numbers that lie in a row, on an aligned address.
__device__ __forceinline__ float4 four(const float* from) { return *reinterpret_cast<const float4*>(from); }

__device__ __forceinline__ float4 four(const __nv_bfloat16* from) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  return make_float4(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u),
                     __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000u));
}

__device__ __forceinline__ float4 four(const __half* from) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  const __half* halves = reinterpret_cast<const __half*>(&words);
  return make_float4(__half2float(halves[0]), __half2float(halves[1]), __half2float(halves[2]), __half2float(halves[3]));
}

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}
