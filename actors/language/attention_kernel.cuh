// One position's queries over all keys and values so far: see attention_kernel.py.

constexpr int WARPS = 8;
// Rows that a warp has on their way at once.
constexpr int AHEAD = 2;

// Minus infinity: the greatest score of no position.
__device__ __forceinline__ float nothing() { return __int_as_float(static_cast<int>(0xff800000u)); }

// queries (KV_HEADS, REPEATS, SIZE), buffer (2, KV_HEADS, rows, SIZE): keys, then values, of which `filled` rows count. A block
// has share blockIdx.x of SHARES and the query heads of key/value head blockIdx.y, a warp some rows of the share.
// parts (KV_HEADS * REPEATS, SHARES, SIZE + 2): the sum of a share's values, weighted by exp(score - top); then top, the greatest
// score; then the sum of the weights. A share may be empty: its top is nothing() and its sums are 0.
template <int KV_HEADS, int REPEATS, int SIZE, int SHARES, typename T, typename Buffer>
__device__ __forceinline__ void attend_share(const T* queries, const Buffer* buffer, int rows, int filled, float* parts) {
  constexpr int PLACES = (SIZE + 31) / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y;
  const int length = (filled + SHARES - 1) / SHARES;
  const int first = blockIdx.x * length, end = min(first + length, filled);
  const Buffer* keys = buffer + static_cast<long long>(kv_head) * rows * SIZE;
  const Buffer* values = keys + static_cast<long long>(KV_HEADS) * rows * SIZE;

  float query[REPEATS][PLACES], sums[REPEATS][PLACES] = {}, tops[REPEATS], weights[REPEATS] = {};
#pragma unroll
  for (int r = 0; r < REPEATS; ++r) {
    tops[r] = nothing();
#pragma unroll
    for (int p = 0; p < PLACES; ++p) {
      const int i = p * 32 + lane;
      query[r][p] = i < SIZE ? static_cast<float>(queries[(kv_head * REPEATS + r) * SIZE + i]) * rsqrtf(SIZE) : 0.0f;
    }
  }
  for (int row = first + warp * AHEAD; row < end; row += WARPS * AHEAD) {
    float key[AHEAD][PLACES], value[AHEAD][PLACES];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
#pragma unroll
      for (int p = 0; p < PLACES; ++p) {
        const int i = p * 32 + lane;
        const long long at = static_cast<long long>(min(row + a, end - 1)) * SIZE + i;
        key[a][p] = i < SIZE ? static_cast<float>(keys[at]) : 0.0f;
        value[a][p] = i < SIZE ? static_cast<float>(values[at]) : 0.0f;
      }
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (row + a >= end) break;
#pragma unroll
      for (int r = 0; r < REPEATS; ++r) {
        float score = 0.0f;
#pragma unroll
        for (int p = 0; p < PLACES; ++p) score = fmaf(query[r][p], key[a][p], score);
        score = sum_of_warp(score);
        const float top = fmaxf(tops[r], score), kept = expf(tops[r] - top), weight = expf(score - top);
        tops[r] = top;
        weights[r] = weights[r] * kept + weight;
#pragma unroll
        for (int p = 0; p < PLACES; ++p) sums[r][p] = sums[r][p] * kept + weight * value[a][p];
      }
    }
  }

  __shared__ float shared[WARPS][REPEATS][SIZE + 2];
#pragma unroll
  for (int r = 0; r < REPEATS; ++r) {
#pragma unroll
    for (int p = 0; p < PLACES; ++p) {
      if (p * 32 + lane < SIZE) shared[warp][r][p * 32 + lane] = sums[r][p];
    }
    if (lane == 0) {
      shared[warp][r][SIZE] = tops[r];
      shared[warp][r][SIZE + 1] = weights[r];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < REPEATS * (SIZE + 2); i += 32 * WARPS) {
    const int r = i / (SIZE + 2), place = i % (SIZE + 2);
    float top = nothing(), sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, shared[w][r][SIZE]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float other = shared[w][r][SIZE];
      if (other != nothing()) sum += expf(other - top) * shared[w][r][place];
    }
    parts[((kv_head * REPEATS + r) * SHARES + blockIdx.x) * (SIZE + 2) + place] = place == SIZE ? top : sum;
  }
}

// parts of a query head, which is blockIdx.x -> attended (heads, SIZE). A thread has one number.
template <int SIZE, int SHARES, typename T>
__device__ __forceinline__ void join_shares(const float* parts, T* attended) {
  const float* part = parts + blockIdx.x * SHARES * (SIZE + 2);
  const int place = threadIdx.x;
  float top = nothing(), sum = 0.0f, weights = 0.0f;
#pragma unroll
  for (int s = 0; s < SHARES; ++s) top = fmaxf(top, part[s * (SIZE + 2) + SIZE]);
#pragma unroll
  for (int s = 0; s < SHARES; ++s) {
    const float kept = expf(part[s * (SIZE + 2) + SIZE] - top);  // of an empty share 0
    sum += kept * part[s * (SIZE + 2) + place];
    weights += kept * part[s * (SIZE + 2) + SIZE + 1];
  }
  attended[blockIdx.x * SIZE + place] = static_cast<T>(sum / weights);
}
