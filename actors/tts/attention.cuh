// Attention of one position over a buffer of slots: see attention.py.

// The score of nothing: finite, so that differences of scores are.
constexpr float NEVER = -1e30f;

// A block is one head of one row of the batch. LANES lanes share a slot, so a warp takes 32 / LANES slots at once; every group
// of lanes has a running maximum, total and weighted sum of values of its own (online softmax), which are merged at the end.
// Slots before min(position, capacity) are filled. A buffer without room is a ring: the slot after the last one is the
// position's own, and what it still holds is not seen any more.
template <int D, int HEADS, int BATCH, int LANES>
__device__ __forceinline__ void attend(const float* projected, const float* query_gain, const float* key_gain,
                                       const float* frequencies, const int* position, const float* buffer, const int* layer,
                                       const unsigned* slot, const float* scale, const float* eps, int capacity, float* found, float* entry) {
  constexpr int HALF = D / 2, FOURS = D / 4 / LANES, AT_ONCE = 32 / LANES;
  __shared__ __align__(16) float now[3][D];  // query, key and value of the position
  __shared__ __align__(16) float sums[WARPS][D];
  __shared__ float tops[WARPS], totals[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = blockIdx.x % HEADS, row = blockIdx.x / HEADS;

  if (warp < 3) {
    const float* raw = projected + ((row * 3 + warp) * HEADS + head) * D;
    float squares = 0.0f;
    for (int i = lane; i < D; i += 32) squares += raw[i] * raw[i];
    const float inverse = rsqrtf(sum_of_warp(squares) / D + eps[0]);
    const float* gain = warp == 0 ? query_gain : key_gain;
    for (int i = lane; i < HALF; i += 32) {
      float first = raw[i], second = raw[i + HALF];
      if (warp < 2) {
        const float angle = static_cast<float>(position[0]) * frequencies[i];
        const float cosine = cosf(angle), sine = sinf(angle);
        const float a = first * inverse * gain[i], b = second * inverse * gain[i + HALF];
        first = a * cosine - b * sine;
        second = b * cosine + a * sine;
      }
      now[warp][i] = first;
      now[warp][i + HALF] = second;
      if (warp > 0) {
        float* kept = entry + (((warp - 1) * BATCH + row) * HEADS + head) * D;
        kept[i] = first;
        kept[i + HALF] = second;
      }
    }
  }
  __syncthreads();

  const int part = lane % LANES, group = lane / LANES;
  const auto at = [&](int i) { return 4 * (i * LANES + part); };
  float4 query[FOURS];
#pragma unroll
  for (int i = 0; i < FOURS; ++i) query[i] = four(now[0] + at(i));
  const auto score_of = [&](const float4* key) {
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < FOURS; ++i) score = dot(query[i], key[i], score);
#pragma unroll
    for (int offset = 1; offset < LANES; offset *= 2) score += __shfl_xor_sync(ALL_LANES, score, offset);
    return score * scale[0];
  };

  float top = NEVER, total = 0.0f;
  float4 sum[FOURS];
  {
    float4 key[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; ++i) key[i] = four(now[1] + at(i));
    const float score = score_of(key);
    const bool mine = warp == 0 && group == 0;
    if (mine) top = score, total = 1.0f;
#pragma unroll
    for (int i = 0; i < FOURS; ++i) sum[i] = mine ? four(now[2] + at(i)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  const int filled = min(position[0], capacity);
  const int unseen = position[0] < capacity ? -1 : static_cast<int>((slot[0] + 1) % capacity);
  const long long rows = static_cast<long long>(HEADS) * capacity * D;
  const float* keys = buffer + (layer[0] * 2 * BATCH + row) * rows + static_cast<long long>(head) * capacity * D;
  const float* values = keys + BATCH * rows;
  for (int first = warp * AT_ONCE; first < filled; first += WARPS * AT_ONCE) {
    const long long from = static_cast<long long>(min(first + group, filled - 1)) * D;
    float4 key[FOURS], value[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
      key[i] = four(keys + from + at(i));
      value[i] = four(values + from + at(i));
    }
    const float score = score_of(key);
    if (first + group >= filled || first + group == unseen) continue;
    const float higher = fmaxf(top, score), before = expf(top - higher), weight = expf(score - higher);
    top = higher;
    total = total * before + weight;
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
      sum[i].x = sum[i].x * before + weight * value[i].x;
      sum[i].y = sum[i].y * before + weight * value[i].y;
      sum[i].z = sum[i].z * before + weight * value[i].z;
      sum[i].w = sum[i].w * before + weight * value[i].w;
    }
  }
  __syncwarp();

#pragma unroll
  for (int offset = LANES; offset < 32; offset *= 2) {
    const float other = __shfl_xor_sync(ALL_LANES, top, offset), higher = fmaxf(top, other);
    const float own = expf(top - higher), others = expf(other - higher);
    top = higher;
    total = total * own + __shfl_xor_sync(ALL_LANES, total, offset) * others;
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
      sum[i].x = sum[i].x * own + __shfl_xor_sync(ALL_LANES, sum[i].x, offset) * others;
      sum[i].y = sum[i].y * own + __shfl_xor_sync(ALL_LANES, sum[i].y, offset) * others;
      sum[i].z = sum[i].z * own + __shfl_xor_sync(ALL_LANES, sum[i].z, offset) * others;
      sum[i].w = sum[i].w * own + __shfl_xor_sync(ALL_LANES, sum[i].w, offset) * others;
    }
  }
  if (group == 0) {
#pragma unroll
    for (int i = 0; i < FOURS; ++i) *reinterpret_cast<float4*>(sums[warp] + at(i)) = sum[i];
    tops[warp] = top;
    totals[warp] = total;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < D; i += THREADS) {
    float highest = tops[0];
    for (int w = 1; w < WARPS; ++w) highest = fmaxf(highest, tops[w]);
    float weighted = 0.0f, weights = 0.0f;
    for (int w = 0; w < WARPS; ++w) {
      const float share = expf(tops[w] - highest);
      weighted += share * sums[w][i];
      weights += share * totals[w];
    }
    found[(row * HEADS + head) * D + i] = weighted / weights;
  }
}

template <int COUNT>
struct Pointers {
  const float* of[COUNT];
};

// A block copies one of COUNT arrays of SIZE numbers.
template <int SIZE, int COUNT>
__device__ __forceinline__ void stack(const Pointers<COUNT>& arrays, float* stacked) {
  const float* from = arrays.of[blockIdx.x];
  for (int i = threadIdx.x; i < SIZE; i += THREADS) stacked[blockIdx.x * SIZE + i] = from[i];
}
