// Relative attention of one frame.

// A block for each head, a warp for every WARPS-th slot: projected (3, HEADS, DIM), window (2, HEADS, SLOTS, DIM), positions
// (HEADS, SLOTS, DIM) by distance, biases (2, HEADS, DIM) -> mixed (HEADS, DIM), and the window after it.
template <int HEADS, int SLOTS, int DIM>
__device__ __forceinline__ void attend(const float* projected, const float* window, const float* positions,
                                       const float* biases, const int* distances, const float* mask, float* mixed,
                                       float* after) {
  constexpr int SHARE = (SLOTS + WARPS - 1) / WARPS, PARTS = (DIM + 31) / 32;
  __shared__ float scores[SLOTS];
  __shared__ float partial[WARPS][DIM];
  const int head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float scale = 1.0f / sqrtf(static_cast<float>(DIM));

  float content[PARTS] = {}, place[PARTS] = {};  // the query, biased, for keys and for positions, which are scaled already
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    const int d = lane + 32 * p;
    if (d >= DIM) continue;
    const float query = projected[head * DIM + d];
    content[p] = (query + biases[head * DIM + d]) * scale;
    place[p] = query + biases[(HEADS + head) * DIM + d];
  }
  float keys[SHARE][PARTS], values[SHARE][PARTS], rows[SHARE][PARTS];
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int slot = warp + s * WARPS;
    if (slot >= SLOTS) continue;
    const int distance = distances[slot];
    const float* key = distance ? window + (head * SLOTS + slot) * DIM : projected + (HEADS + head) * DIM;
    const float* value = distance ? window + ((HEADS + head) * SLOTS + slot) * DIM : projected + (2 * HEADS + head) * DIM;
    const float* row = positions + (head * SLOTS + distance) * DIM;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      const int d = lane + 32 * p;
      if (d >= DIM) continue;
      keys[s][p] = key[d];
      values[s][p] = value[d];
      rows[s][p] = row[d];
    }
  }

#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int slot = warp + s * WARPS;
    if (slot >= SLOTS) continue;
    float* key = after + (head * SLOTS + slot) * DIM;
    float* value = after + ((HEADS + head) * SLOTS + slot) * DIM;
    float score = 0.0f;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      const int d = lane + 32 * p;
      if (d >= DIM) continue;
      score += content[p] * keys[s][p] + place[p] * rows[s][p];
      key[d] = keys[s][p];
      value[d] = values[s][p];
    }
    score = sum_of_warp(score);
    if (lane == 0) scores[slot] = score + mask[slot];
  }
  __syncthreads();

  // Every warp finds the softmax's maximum and sum for itself.
  float top = scores[0], total = 0.0f;
  for (int slot = lane; slot < SLOTS; slot += 32) top = fmaxf(top, scores[slot]);
  top = max_of_warp(top);
  for (int slot = lane; slot < SLOTS; slot += 32) total += expf(scores[slot] - top);
  total = sum_of_warp(total);
  float sums[PARTS] = {};
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int slot = warp + s * WARPS;
    if (slot >= SLOTS) continue;
    const float share = expf(scores[slot] - top) / total;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      if (lane + 32 * p < DIM) sums[p] += share * values[s][p];
    }
  }
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    if (lane + 32 * p < DIM) partial[warp][lane + 32 * p] = sums[p];
  }
  __syncthreads();
  for (int d = threadIdx.x; d < DIM; d += THREADS) {
    float sum = 0.0f;
    for (int w = 0; w < WARPS; ++w) sum += partial[w][d];
    mixed[head * DIM + d] = sum;
  }
}
