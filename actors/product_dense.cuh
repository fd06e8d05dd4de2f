// Rows times a dense matrix: see product.py.
#include <cuda_pipeline_primitives.h>

// Sixteen bytes of weights as floats; the pointer only tells their type.
__device__ __forceinline__ void widen(const float*, uint4 words, float* to) {
  to[0] = __uint_as_float(words.x);
  to[1] = __uint_as_float(words.y);
  to[2] = __uint_as_float(words.z);
  to[3] = __uint_as_float(words.w);
}

__device__ __forceinline__ void widen(const __nv_bfloat16*, uint4 words, float* to) {
  const unsigned pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(pairs[i] << 16);
    to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void widen(const __half*, uint4 words, float* to) {
  const __half* halves = reinterpret_cast<const __half*>(&words);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = __half2float(halves[i]);
}

// Four numbers to shared memory. Those of float32 are on their way when this returns, and there after __pipeline_wait_prior.
__device__ __forceinline__ void bring(const float* from, float4* to) { __pipeline_memcpy_async(to, from, sizeof(float4)); }

template <typename Number>
__device__ __forceinline__ void bring(const Number* from, float4* to) {
  float four[4];
  load(from, four);
  *to = make_float4(four[0], four[1], four[2], four[3]);
}

// The input (N, K) of a product while it is made in shared memory, by quads of four numbers. Every one of SEGMENTS equal parts
// belongs to as many warps, each of its quads to one thread. Loops are not unrolled: a launch finds its instructions in no
// cache, and those of straight code took longer to come than the numbers.
template <typename T, typename Weight, int N, int GROUPS, int NORM, bool CARRY>
struct Making {
  static constexpr int QUADS = 4 / static_cast<int>(sizeof(Weight));  // that a lane multiplies at once
  static constexpr int SEGMENTS = N * GROUPS;
  static constexpr int WARPS_EACH = WARPS / SEGMENTS;
  static constexpr int THREADS = 32 * WARPS_EACH;
  static constexpr bool SUMS = CARRY && NORM == RMS;
  const unsigned row_quads, quads, segment, row, first;
  float4* const made;  // (N, QUADS, row_quads / QUADS): lanes that follow each other read quads that do, or banks would clash
  float4* const added;  // the same
  float4* const gains;  // (2, 2, row_quads): scale and offset of the input's norm, then of that of what is carried

  __device__ __forceinline__ Making(unsigned columns, float4* room)
      : row_quads(columns / 4),
        quads(row_quads / GROUPS),
        segment(threadIdx.x / THREADS),
        row(segment / GROUPS),
        first(segment < SEGMENTS ? threadIdx.x % THREADS : quads),
        made(room),
        added(room + N * row_quads),
        gains(room + (SUMS ? 2 * N : N) * row_quads) {}

  // Shared memory behind the above.
  __device__ __forceinline__ float4* end() const { return gains + ((NORM != NOTHING) + CARRY) * 2 * row_quads; }

  __device__ __forceinline__ unsigned in_row(unsigned quad) const { return segment % GROUPS * quads + quad; }

  __device__ __forceinline__ unsigned place(unsigned quad) const {
    return (row * QUADS + in_row(quad) % QUADS) * (row_quads / QUADS) + in_row(quad) / QUADS;
  }

  // A row that x does not have is another one.
  __device__ __forceinline__ void start(const T* x, const T* y, unsigned rows) {
    constexpr int AT_ONCE = sizeof(T) == 4 ? 1 : 4;
#pragma unroll AT_ONCE
    for (unsigned quad = first; quad < quads; quad += THREADS) {
      const unsigned from = 4 * (min(row, rows - 1u) * row_quads + in_row(quad));
      bring(x + from, made + place(quad));
      if constexpr (SUMS) bring(y + from, added + place(quad));
    }
  }

  template <typename Gain>
  __device__ __forceinline__ void start_gains(int which, const Gain* scale, const Gain* offset) {
    float4* to = gains + 2 * which * row_quads;
#pragma unroll 1
    for (unsigned quad = threadIdx.x; quad < row_quads; quad += 32 * WARPS) {
      bring(scale + 4 * quad, to + quad);
      if constexpr (NORM == LAYER) bring(offset + 4 * quad, to + row_quads + quad);
    }
  }

  // Mean over this thread's segment of what its threads summed up. `room`: WARPS numbers, not used again.
  __device__ __forceinline__ float mean(float sum, float* room) const {
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS_EACH; ++i) sum += room[min(segment, SEGMENTS - 1u) * WARPS_EACH + i];
    return __fdividef(sum, static_cast<float>(4 * quads));
  }

  // The input, when what was started has arrived. The first of two passes makes what is carried: x + norm(y) or norm(x).
  __device__ __forceinline__ void finish(float carry_eps, float norm_eps, T* carried) {
    if constexpr (NORM != NOTHING) {
      __shared__ float room[2][2][WARPS];
#pragma unroll 1
      for (int pass = CARRY ? 0 : 1; pass < 2; ++pass) {
        const float4* from = SUMS && pass == 0 ? added : made;
        const float4* gain = gains + 2 * (1 - pass) * row_quads;
        float center = 0.0f, sum = 0.0f;
        if constexpr (NORM == LAYER) {
#pragma unroll 1
          for (unsigned quad = first; quad < quads; quad += THREADS) {
            const float4 v = from[place(quad)];
            sum += (v.x + v.y) + (v.z + v.w);
          }
          center = mean(sum, room[pass][0]);
          sum = 0.0f;
        }
#pragma unroll 1
        for (unsigned quad = first; quad < quads; quad += THREADS) {
          const float4 v = from[place(quad)];
          const float x = v.x - center, y = v.y - center, z = v.z - center, w = v.w - center;
          sum += (x * x + y * y) + (z * z + w * w);
        }
        const float factor = rsqrtf(mean(sum, room[pass][1]) + (pass == 0 ? carry_eps : norm_eps));
#pragma unroll 1
        for (unsigned quad = first; quad < quads; quad += THREADS) {
          const unsigned at = place(quad);
          float4 v = from[at];
          const float4 scale = gain[in_row(quad)];
          float4 offset = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if constexpr (NORM == LAYER) offset = gain[row_quads + in_row(quad)];
          if (SUMS && pass == 0) offset = made[at];
          float four[4] = {(v.x - center) * factor * scale.x + offset.x, (v.y - center) * factor * scale.y + offset.y,
                           (v.z - center) * factor * scale.z + offset.z, (v.w - center) * factor * scale.w + offset.w};
          if (pass == 0 && blockIdx.x == 0) {
            T* to = carried + 4 * (row * row_quads + in_row(quad));
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = static_cast<T>(four[i]);
          }
          if (pass == 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i) four[i] = static_cast<float>(static_cast<T>(four[i]));
          }
          made[at] = make_float4(four[0], four[1], four[2], four[3]);
        }
      }
    }
    __syncthreads();
  }
};

// COUNT sums over the lanes, each half as many times: lane i has sum i % COUNT, its bits in reverse order.
template <int COUNT>
__device__ __forceinline__ float shared_out_sums(float* values) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = COUNT / 2, step = 1; half > 0; half /= 2, step *= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = lane & step ? values[i + half] : values[i], given = lane & step ? values[i] : values[i + half];
      values[i] = kept + __shfl_xor_sync(ALL_LANES, given, step);
    }
  }
#pragma unroll
  for (int step = COUNT; step < 32; step *= 2) values[0] += __shfl_xor_sync(ALL_LANES, values[0], step);
  return values[0];
}

// What becomes of a product, beside its matrix: see _settings in product_kernels.py.
struct Settings {
  float carry_eps = 0.0f, norm_eps = 0.0f, factor = 1.0f;
  int rows, activation = 0;
  bool biased = false, residual = false;

  __device__ __forceinline__ Settings(int rows_) : rows(rows_) {}
  __device__ __forceinline__ Settings(const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    const int bits = static_cast<int>(four.w);
    carry_eps = four.x;
    norm_eps = four.y;
    factor = four.z;
    activation = bits & 7;
    biased = bits & 8;
    residual = bits & 16;
    rows = bits & 32 ? 2 : 1;
  }
};

// `b` is the other half of a gated activation. All that need an exponential share one: 1 + tanh(x) is 2 sigmoid(2 x).
__device__ __forceinline__ float activated(int activation, float a, float b) {
  if (activation == SQUARED_RELU) return fmaxf(a, 0.0f) * fmaxf(a, 0.0f);
  if (activation == 0) return a;
  float exponent = activation == GATED_SIGMOID ? b : a;
  if (activation == GATED_GELU) {
    exponent = 1.5957691216057308f * (a + 0.044715f * a * a * a);
    a *= b;
  }
  return __fdividef(a, 1.0f + expf(-exponent));
}

// x (N, K) -> out (N, O) = residual + factor * activation(norm(carry(x, y)) W^T + bias), and carried (N, K) = carry(x, y).
//
// Every block makes the input for itself. A task is two rows of the matrix, which follow each other or are of one gated output,
// times all of x: of as many warps as there are too few tasks for. A lane takes 16 bytes of each row at a time, and those of
// AHEAD times are always on their way to its own place in shared memory.
// Pointers that an instance has no use for are not read: settings are for SET, bias and residual for ADDS.
template <typename T, int N, int AHEAD, int NORM, bool CARRY, int GROUPS, bool SET, bool ADDS, typename Gain,
          typename NormGain, typename Weight, typename Bias>
__device__ __forceinline__ void dense_product(int matrix_rows, int columns, const T* x, const T* y, const Gain* carry_scale,
                                              const Gain* carry_offset, const NormGain* norm_scale,
                                              const NormGain* norm_offset, const Weight* w, const float* settings,
                                              const Bias* bias, const T* residual, T* out, T* carried) {
  using Input = Making<T, Weight, N, GROUPS, NORM, CARRY>;
  constexpr int ROWS = 2;
  constexpr int VALUES = 16 / static_cast<int>(sizeof(Weight));
  constexpr int QUADS = Input::QUADS;
  extern __shared__ __align__(16) float4 staged[];
  __shared__ float shares[2][WARPS][ROWS * N];
  const int chunks = columns / VALUES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // The input goes ahead of the weights, whose crowd it would have to wait for.
  Input input(columns, staged);
  Settings how(N);
  if constexpr (SET) how = Settings(settings);
  input.start(x, y, how.rows);
  if constexpr (CARRY) input.start_gains(1, carry_scale, carry_offset);
  if constexpr (NORM != NOTHING) input.start_gains(0, norm_scale, norm_offset);
  __pipeline_commit();

  const bool gated = SET && how.activation >= GATED_GELU;
  const int outputs = gated ? matrix_rows / 2 : matrix_rows;
  const int distance = gated ? outputs : 1;
  const int tasks = gated ? outputs : (outputs + 1) / 2;
  int split = 0;  // the logarithm of how many warps share a task
#pragma unroll 1
  while (1 << split < WARPS && tasks << split << 1 <= static_cast<int>(gridDim.x) * WARPS) ++split;
  const int of_block = WARPS >> split, stride = gridDim.x * of_block;
  const int start = (warp & ((1 << split) - 1)) * 32, step = 32 << split;  // of its share, in chunks

  uint4* const ring = reinterpret_cast<uint4*>(input.end()) + warp * AHEAD * ROWS * 32 + lane;
  int next_task = start < chunks ? blockIdx.x * of_block + (warp >> split) : tasks;
  int next = start;
  const auto fetch = [&](int slot) {
    if (next_task < tasks) {
      const unsigned first = gated ? next_task : 2 * next_task;
      if (next + lane < chunks) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const unsigned last = matrix_rows - 1, row = min(first + r * distance, last);
          const uint4* words = reinterpret_cast<const uint4*>(w) + static_cast<size_t>(row) * static_cast<unsigned>(chunks);
          __pipeline_memcpy_async(ring + (slot * ROWS + r) * 32, words + static_cast<unsigned>(next + lane), sizeof(uint4));
        }
      }
      next += step;
      if (next >= chunks) {
        next = start;
        next_task += stride;
      }
    }
    __pipeline_commit();
  };
#pragma unroll 1
  for (int slot = 0; slot < AHEAD; ++slot) fetch(slot);
  __pipeline_wait_prior(AHEAD);
  input.finish(how.carry_eps, how.norm_eps, carried);

  // Of the sums over lanes this one gets that of row r of the matrix and row n of x.
  const int r = lane % ROWS, n = lane / ROWS % N;
  int slot = 0, turn = 0;
#pragma unroll 1
  for (int task = blockIdx.x * of_block; task < tasks; task += stride, turn ^= 1) {
    const int mine = task + (warp >> split);
    const int output = gated ? mine : 2 * mine + r;
    const int at = n * outputs + output;
    const bool writes = lane < ROWS * N && n < how.rows && output < outputs && !(gated && r) && start == 0;
    float offset = 0.0f, before = 0.0f;  // loaded now, to be there when they are needed
    if constexpr (ADDS) {
      if (how.biased) offset = static_cast<float>(bias[min(gated ? output + r * distance : output, matrix_rows - 1)]);
      if (how.residual && writes) before = static_cast<float>(residual[at]);
    }
    float sums[ROWS][N] = {};
#pragma unroll 1
    for (int chunk = mine < tasks ? start + lane : chunks + lane; chunk - lane < chunks; chunk += step) {
      __pipeline_wait_prior(AHEAD - 1);
      if (chunk < chunks) {
        float4 values[N][QUADS];
#pragma unroll
        for (int i = 0; i < N * QUADS; ++i) values[i / QUADS][i % QUADS] = staged[i * chunks + chunk];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          float weights[VALUES];
          widen(w, ring[(slot * ROWS + j) * 32], weights);
#pragma unroll
          for (int i = 0; i < N * QUADS; ++i) {
            const float4 value = values[i / QUADS][i % QUADS];
            const float* weight = weights + i % QUADS * 4;
            float& sum = sums[j][i / QUADS];
            sum = fmaf(weight[0], value.x, fmaf(weight[1], value.y, fmaf(weight[2], value.z, fmaf(weight[3], value.w, sum))));
          }
        }
      }
      fetch(slot);  // what was in it has been used
      slot = slot + 1 < AHEAD ? slot + 1 : 0;
    }
    float value = shared_out_sums<ROWS * N>(&sums[0][0]);
    if (split > 0) {
      if (lane < ROWS * N) shares[turn][warp][lane] = value;
      __syncthreads();
      value = 0.0f;
#pragma unroll 1
      for (int i = 0; i < 1 << split; ++i) value += shares[turn][(warp >> split << split) + i][lane % (ROWS * N)];
    }
    value += offset;
    if constexpr (SET) value = activated(how.activation, value, __shfl_xor_sync(ALL_LANES, value, 1));
    if (ADDS && how.residual) value = before + how.factor * value;
    if (writes) out[at] = static_cast<T>(value);
  }
}
