// Runs of small operations of the speech decoder in one launch each: see kernels.py.

__device__ __forceinline__ float max_of_block(float value, float* shared) {
  value = max_of_warp(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float top = shared[0];
  for (int i = 1; i < WARPS; ++i) top = fmaxf(top, shared[i]);
  return top;
}

// The greatest score wins and of equals the lowest index. Nothing packs to 0.
__device__ __forceinline__ unsigned long long packed(float score, unsigned index) {
  unsigned bits = __float_as_uint(score);
  bits = (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
  return (static_cast<unsigned long long>(bits) << 32) | (0xffffffffu - index);
}

__device__ __forceinline__ unsigned index_of(unsigned long long best) { return 0xffffffffu - static_cast<unsigned>(best); }

__device__ __forceinline__ unsigned long long best_of_block(unsigned long long best, unsigned long long* shared) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const unsigned long long other = __shfl_xor_sync(ALL_LANES, best, offset);
    best = other > best ? other : best;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
  __syncthreads();
  best = shared[0];
  for (int i = 1; i < WARPS; ++i) best = shared[i] > best ? shared[i] : best;
  return best;
}

// A block is a row.
template <int DIMS>
__device__ __forceinline__ void norm_of_sum(const float* x, const float* y, const float* post_scale, const float* post_eps,
                                            const float* scale, const float* eps, float* normed) {
  __shared__ float shared[WARPS], sums[DIMS];
  const int row = blockIdx.x * DIMS;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < DIMS; i += THREADS) squares += y[row + i] * y[row + i];
  const float post = rsqrtf(sum_of_block<WARPS>(squares, shared) / DIMS + post_eps[0]);
  squares = 0.0f;
  for (int i = threadIdx.x; i < DIMS; i += THREADS) {
    sums[i] = x[row + i] + y[row + i] * post * post_scale[i];
    squares += sums[i] * sums[i];
  }
  const float inverse = rsqrtf(sum_of_block<WARPS>(squares, shared) / DIMS + eps[0]);
  for (int i = threadIdx.x; i < DIMS; i += THREADS) normed[row + i] = sums[i] * inverse * scale[i];
}

// Threefry-2x32 with 20 rounds (Salmon et al., 2011), MLX's generator.
__device__ __forceinline__ void threefry(const unsigned key[2], unsigned counter[2]) {
  constexpr unsigned ROTATIONS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const unsigned keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1bd11bdau};
  unsigned a = counter[0] + keys[0], b = counter[1] + keys[1];
  for (unsigned i = 0; i < 5; ++i) {
    for (int j = 0; j < 4; ++j) {
      const unsigned turn = ROTATIONS[i % 2][j];
      a += b;
      b = (b << turn | b >> (32 - turn)) ^ a;
    }
    a += keys[(i + 1) % 3];
    b += keys[(i + 2) % 3] + i + 1;
  }
  counter[0] = a;
  counter[1] = b;
}

// Splits the state COUNT times, as mx.random.split does: the first half goes on, the second is for a draw.
template <int COUNT>
__device__ __forceinline__ void key_chain(const unsigned* state, unsigned* keys) {
  unsigned key[2] = {state[0], state[1]};
  for (int n = 0; n < COUNT; ++n) {
    unsigned one[2] = {0, 2}, other[2] = {1, 3};
    threefry(key, one);
    threefry(key, other);
    key[0] = one[0];
    key[1] = other[0];
    keys[2 * (1 + n)] = one[1];
    keys[2 * (1 + n) + 1] = other[1];
  }
  keys[0] = key[0];
  keys[1] = key[1];
}

// Which of P components is drawn from the nucleus of `logits`, by the Gumbel-max trick. `masses` is left changed.
template <int P>
__device__ __forceinline__ unsigned draw(const float* logits, const float* uniform, float top_p, float* masses, float* shared,
                                         unsigned long long* winners) {
  float top = -3.402823466e+38f;
  for (int i = threadIdx.x; i < P; i += THREADS) top = fmaxf(top, logits[i]);
  top = max_of_block(top, shared);
  float total = 0.0f;
  for (int i = threadIdx.x; i < P; i += THREADS) total += expf(logits[i] - top);
  total = sum_of_block<WARPS>(total, shared);
  for (int i = threadIdx.x; i < P; i += THREADS) masses[i] = expf(logits[i] - top) / total;
  __syncthreads();
  // The least mass above which there is less than top_p, by its bits: all above it stay.
  const auto mass_above = [&](float least) {
    float above = 0.0f;
    for (int i = threadIdx.x; i < P; i += THREADS) above += masses[i] > least ? masses[i] : 0.0f;
    return sum_of_block<WARPS>(above, shared);
  };
  int below = -1, least = 0x3f800000;
  while (least - below > 1) {
    const int middle = below + (least - below) / 2;
    if (mass_above(__int_as_float(middle)) < top_p) least = middle;
    else below = middle;
  }
  const float edge = __int_as_float(least), above = mass_above(edge);
  // Of equal entries at the edge the later ones count as the more probable.
  const auto kept = [&](int i) {
    if (masses[i] != edge) return masses[i] > edge;
    float mass = above;
    for (int j = i + 1; j < P; ++j) mass += masses[j] == edge ? edge : 0.0f;
    return mass < top_p;
  };
  float rest = 0.0f;
  for (int i = threadIdx.x; i < P; i += THREADS) rest += kept(i) ? expf(logits[i] - top) : 0.0f;
  rest = sum_of_block<WARPS>(rest, shared);
  unsigned long long best = 0;
  for (int i = threadIdx.x; i < P; i += THREADS) {
    if (!kept(i)) continue;
    const float score = logf(expf(logits[i] - top) / rest) - logf(1e-8f - logf(uniform[i] + 1e-8f));
    const unsigned long long candidate = packed(score, i);
    best = candidate > best ? candidate : best;
  }
  best = best_of_block(best, winners);
  return best ? index_of(best) : 0;
}

// One pass: draws a component, makes its continuous code and fixes codebooks span[0] .. span[0] + span[1] - 1, each to the entry
// nearest to what the ones before have left. Every block makes the code for itself; a codebook's entries are shared out.
// `chosen` and `previous`: 1 + Q cells of 8 bytes, up to a multiple of 16, in which the blocks meet (zero at first: how many have
// reported, the best of each codebook); the sum of all chosen entries, Z, twice; the codes, Q.
template <int P, int RANK, int H, int Z, int Q, int K, typename ToLow, typename FromLow, typename Entry>
__device__ __forceinline__ void fix_codes(const float* projected, const float* x, const float* scale, const ToLow* to_low,
                                       const FromLow* from_low, const float* uniform, const float* normal, const float* previous,
                                       const Entry* entries, const float* norms, const int* span, const float* settings,
                                       float* chosen) {
  constexpr int WIDTH = P + Z + 1, SUMS = (2 * (1 + Q) + 3) / 4 * 4, CODES = SUMS + 2 * Z;
  constexpr int ROWS = (RANK + WARPS - 1) / WARPS;
  const float eps = settings[0], guidance = settings[1], top_p = settings[2], least_log_std = settings[3];
  const float noise_scale = settings[4];
  __shared__ float shared[WARPS], logits[P], masses[P], low[RANK];
  __shared__ __align__(16) float guided[H], left[Z];
  __shared__ unsigned long long winners[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // Guidance is linear, and so are the projections of what it makes of the two rows.
  const auto of_both = [&](const float* rows, int at, int width) {
    return rows[at] + guidance * (rows[at] - rows[width + at]);
  };
  float inverse[2];
  for (int row = 0; row < 2; ++row) {
    float squares = 0.0f;
    for (int i = threadIdx.x; i < H; i += THREADS) squares += x[row * H + i] * x[row * H + i];
    inverse[row] = rsqrtf(sum_of_block<WARPS>(squares, shared) / H + eps);
  }
  for (int i = threadIdx.x; i < H; i += THREADS) {
    const float conditional = x[i] * inverse[0] * scale[i], unconditional = x[H + i] * inverse[1] * scale[i];
    guided[i] = conditional + guidance * (conditional - unconditional);
  }
  for (int i = threadIdx.x; i < P; i += THREADS) logits[i] = of_both(projected, i, WIDTH);
  __syncthreads();
  const unsigned component = draw<P>(logits, uniform, top_p, masses, shared, winners);

  // A warp takes all its rows of the component's first matrix at once, so that many loads are on their way.
  const ToLow* to = to_low + static_cast<long long>(component) * RANK * H;
  float sums[ROWS] = {};
  for (int i = 4 * lane; i < H; i += 128) {
    const float4 input = four(guided + i);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sums[r] = dot(four(to + min(warp * ROWS + r, RANK - 1) * H + i), input, sums[r]);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float sum = sum_of_warp(sums[r]);
    if (lane == 0 && warp * ROWS + r < RANK) low[warp * ROWS + r] = sum;
  }
  __syncthreads();
  const float log_std = fmaxf(of_both(projected, P + Z, WIDTH), least_log_std), spread = expf(log_std);
  const FromLow* from = from_low + static_cast<long long>(component) * Z * RANK;
#pragma unroll 8
  for (int z = warp; z < Z; z += WARPS) {
    float mean = 0.0f;
    for (int i = lane; i < RANK; i += 32) mean += static_cast<float>(from[z * RANK + i]) * low[i];
    mean = sum_of_warp(mean);
    if (lane == 0) left[z] = mean * spread + of_both(projected, P + z, WIDTH) + spread * normal[z] * noise_scale;
  }
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < Z; i += THREADS) chosen[SUMS + i] = span[0] ? previous[SUMS + i] : 0.0f;
    for (int i = threadIdx.x; i < Q; i += THREADS) chosen[CODES + i] = i < span[0] ? previous[CODES + i] : 0.0f;
  }
  __syncthreads();

  unsigned long long* cells = reinterpret_cast<unsigned long long*>(chosen);
  for (int n = 0; n < span[1]; ++n) {
    const int codebook = span[0] + n;
    const Entry* table = entries + static_cast<long long>(codebook) * K * Z;
    unsigned long long best = 0;
    for (int k = blockIdx.x * WARPS + warp; k < K; k += gridDim.x * WARPS) {
      float product = 0.0f;
#pragma unroll 4
      for (int i = 4 * lane; i < Z; i += 128) product = dot(four(table + static_cast<long long>(k) * Z + i), four(left + i), product);
      // Less the square of what is left, the same for all: |e|^2 - 2 e left.
      const unsigned long long candidate = packed(2.0f * sum_of_warp(product) - norms[codebook * K + k], k);
      best = candidate > best ? candidate : best;
    }
    best = best_of_block(best, winners);
    if (threadIdx.x == 0) {
      atomicMax(cells + 1 + n, best);
      __threadfence();
      atomicAdd(cells, 1ull);
      const unsigned long long all = static_cast<unsigned long long>(n + 1) * gridDim.x;
      while (*static_cast<volatile unsigned long long*>(cells) < all) {}
      __threadfence();
    }
    __syncthreads();
    const unsigned code = index_of(*static_cast<volatile unsigned long long*>(cells + 1 + n));
    const Entry* entry = table + static_cast<long long>(code) * Z;
    for (int i = threadIdx.x; i < Z; i += THREADS) {
      left[i] -= static_cast<float>(entry[i]);
      if (blockIdx.x == 0) chosen[SUMS + i] += static_cast<float>(entry[i]);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) chosen[CODES + codebook] = static_cast<float>(code);
    __syncthreads();
  }
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < Z; i += THREADS) chosen[SUMS + Z + i] = chosen[SUMS + i];
  }
}
