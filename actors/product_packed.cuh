// A row times a matrix of 4 or 8 bit integers: see product.py.
//
// The products of one vector are done by tensor cores, as arithmetic would take longer than reading the weights. They multiply
// bfloat16 numbers and add in float32, and little is lost by that: an integer of 4 bits, put into the upper bits of a
// bfloat16's mantissa, is 1 + q / 16 (one shift and one logic instruction for two of them; 8 bits are two times 4), and the
// upper 17 bits of a float32 are the sum of two bfloat16 parts, which take two of the eight columns that a tensor core
// multiplies at once. (The rest would be a third part, and shared memory for it.)
#include <cuda_pipeline_primitives.h>

// c (16, 8) += a (16, 16) b (16, 8); who holds what: PTX ISA, "Matrix fragments for mma.m16n8k16".
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// The four bits `place` and `place + 4` of a word as two bfloat16 numbers, 1 + q / 16 each.
__device__ __forceinline__ unsigned two_of_word(unsigned word, int place) {
  const unsigned moved = place == 0 ? word << 3 : word >> (4 * place - 3);
  return (moved & 0x00780078u) | 0x3f803f80u;
}

template <typename T>
struct Parts {
  static constexpr int COUNT = 2;
};

template <>
struct Parts<__nv_bfloat16> {
  static constexpr int COUNT = 1;
};

// Scale and offset of a group in the four rows of a lane.
template <typename Scale>
struct __align__(16) Scales {
  Scale of[4][2];
};

// 16 bytes or several times as many on their way to shared memory.
template <typename Value>
__device__ __forceinline__ void send(Value* to, const Value* from) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Value) / 16); ++i) {
    __pipeline_memcpy_async(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(from) + i, 16);
  }
}

template <int COUNT, typename T>
__device__ __forceinline__ void read(const T* from, float* to) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) load(from + i, to + i);
}

// x -> out = residual + activation(norm(x) W^T + bias), where `normed`, `squared`, `biased` and `added` say which of these
// there are, the norm over `runs` equal parts of x.
//
// The matrix is laid out as it is read: see PackedTiles in product_kernels.py. A step of a warp is 32 bytes of each of the 32
// rows of a tile, and the warps of a block share the steps of its tile. A unit of x is what meets one word. AHEAD steps of a
// warp are always on their way to shared memory, and every lane waits for its own weights.
template <typename T, int BITS, int PACKED_GROUP, int AHEAD, typename Gain, typename Scale, typename Bias>
__device__ __forceinline__ void packed_product(const T* x, const Gain* norm_scale, const unsigned* w, const Scale* scales,
                                               const Bias* bias, const T* residual, int tiles, int steps, bool normed,
                                               bool squared, bool biased, bool added, int runs, const float* eps, T* out) {
  constexpr int PER_WORD = 32 / BITS;
  constexpr int PAIRS = PER_WORD / 2;
  constexpr int STEP = 8 * PER_WORD;
  constexpr int PARTS = Parts<T>::COUNT;
  constexpr int ROWS = 32;
  constexpr int AT_ONCE = 4;
  constexpr float ALL_ONES = BITS == 4 ? 16.0f : 272.0f;  // what the added ones make of a sum of x
  // (WARPS, AHEAD, 2, 32) weights, (WARPS, AHEAD, 8) scales; x as (steps, PARTS, 4, PAIRS) of both words of a lane, and (steps,)
  extern __shared__ __align__(16) uint4 ring[];
  Scales<Scale>* ring_scales = reinterpret_cast<Scales<Scale>*>(ring + WARPS * AHEAD * 64);
  uint2* pairs = reinterpret_cast<uint2*>(ring_scales + WARPS * AHEAD * 8);
  float* totals = reinterpret_cast<float*>(pairs + steps * PARTS * 4 * PAIRS);
  __shared__ float shares[2][WARPS][ROWS];
  __shared__ float room[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_of_lane = lane / 4, quarter = lane % 4;

  // A run of the norm belongs to `share` warps, which take `width` units at a time.
  const int share = WARPS / runs, run = warp / share, width = 32 * share;
  const int begin = run * (steps * 8 / runs) + warp % share * 32, end = run < runs ? (run + 1) * (steps * 8 / runs) : 0;
  float factor = 1.0f;
  if (normed) {
    float squares = 0.0f;
#pragma unroll 1
    for (int base = begin; base < end; base += AT_ONCE * width) {
      float value[AT_ONCE][PER_WORD];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) read<PER_WORD>(x + min(base + j * width + lane, end - 1) * PER_WORD, value[j]);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (base + j * width + lane >= end) continue;
#pragma unroll
        for (int i = 0; i < PER_WORD; ++i) squares += value[j][i] * value[j][i];
      }
    }
    squares = sum_of_warp(squares);
    if (lane == 0) room[warp] = squares;
  }

  // Only now the weights: the input would have to wait for their crowd.
  int next_tile = blockIdx.x, next_step = warp;
  const auto fetch = [&](int slot) {
    if (next_step < steps && next_tile < tiles) {
      const int to = warp * AHEAD + slot;
      const long long from = static_cast<long long>(next_tile) * steps + next_step;
      send(ring + to * 64 + lane, reinterpret_cast<const uint4*>(w) + from * 64 + lane);
      send(ring + to * 64 + 32 + lane, reinterpret_cast<const uint4*>(w) + from * 64 + 32 + lane);
      const int group = next_tile * (steps * STEP / PACKED_GROUP) + next_step * STEP / PACKED_GROUP;
      if (lane < 8) send(ring_scales + to * 8 + lane, reinterpret_cast<const Scales<Scale>*>(scales) + group * 8 + lane);
      next_step += WARPS;
      if (next_step >= steps) {
        next_step = warp;
        next_tile += gridDim.x;
      }
    }
    __pipeline_commit();
  };
#pragma unroll 1
  for (int slot = 0; slot < AHEAD; ++slot) fetch(slot);

  __syncthreads();
  if (normed && run < runs) {
    float squares = 0.0f;
#pragma unroll 1
    for (int i = 0; i < share; ++i) squares += room[run * share + i];
    factor = rsqrtf(squares / (steps * STEP / runs) + *eps);
  }
  unsigned* words = reinterpret_cast<unsigned*>(pairs);
#pragma unroll 1
  for (int base = begin; base < end; base += width) {
    const int unit = base + lane, step = unit / 8;
    const bool real = unit < end;
    float value[PER_WORD], total = 0.0f;
    read<PER_WORD>(x + min(unit, end - 1) * PER_WORD, value);
    if (normed) {
      float gain[PER_WORD];
      read<PER_WORD>(norm_scale + min(unit, end - 1) * PER_WORD, gain);
#pragma unroll
      for (int i = 0; i < PER_WORD; ++i) value[i] = static_cast<float>(static_cast<T>(value[i] * factor * gain[i]));
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      unsigned* to = words + ((step * PARTS + part) * 4 + unit % 8 / 2) * PAIRS * 2 + unit % 2;
      const unsigned half = part + 1 < PARTS ? 0u : 0x8000u;  // the last part is rounded
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        const unsigned low = (__float_as_uint(value[p]) + half) & 0xffff0000u;
        const unsigned high = (__float_as_uint(value[p + PAIRS]) + half) & 0xffff0000u;
        if (real) to[2 * p] = high | (low >> 16);
        value[p] -= __uint_as_float(low);
        value[p + PAIRS] -= __uint_as_float(high);
        total += __uint_as_float(low) + __uint_as_float(high);
      }
    }
    // Of the parts, not of x: it takes back what the ones and the offsets of the integers add to their products.
    for (int offset = 1; offset < 8; offset *= 2) total += __shfl_xor_sync(ALL_LANES, total, offset);
    if (real && unit % 8 == 0) totals[step] = total;
  }
  __syncthreads();

  int slot = 0, turn = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn = 1 - turn) {
    float sums[4] = {};
#pragma unroll 1
    for (int step = warp; step < steps; step += WARPS) {
      uint2 columns[PAIRS];
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) columns[p] = make_uint2(0, 0);
      if (row_of_lane < PARTS) {
        const uint2* from = pairs + ((step * PARTS + row_of_lane) * 4 + quarter) * PAIRS;
#pragma unroll
        for (int p = 0; p < PAIRS; p += 2) {
          const uint4 two = *reinterpret_cast<const uint4*>(from + p);
          columns[p] = make_uint2(two.x, two.y);
          columns[p + 1] = make_uint2(two.z, two.w);
        }
      }
      const float total = quarter == 0 ? totals[step] : 0.0f;
      __pipeline_wait_prior(AHEAD - 1);
      __syncwarp();  // the scales have been waited for by others
      const Scales<Scale> scale = ring_scales[(warp * AHEAD + slot) * 8 + row_of_lane];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 word = ring[(warp * AHEAD + slot) * 64 + 32 * half + lane];
        float low[4] = {}, high[4] = {};
#pragma unroll
        for (int place = 0; place < 4; ++place) {
          const unsigned rows[4] = {two_of_word(word.x, place), two_of_word(word.z, place), two_of_word(word.y, place),
                                    two_of_word(word.w, place)};
          if (BITS == 8 && place % 2) multiply_add(high, rows, columns[place / 2]);
          else multiply_add(low, rows, columns[BITS == 8 ? place / 2 : place]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float dot = 16.0f * (low[2 * i] + low[2 * i + 1]);
          if constexpr (BITS == 8) dot += 256.0f * (high[2 * i] + high[2 * i + 1]);
          const float by = static_cast<float>(scale.of[2 * half + i][0]), offset = static_cast<float>(scale.of[2 * half + i][1]);
          sums[2 * half + i] += by * dot + (offset - ALL_ONES * by) * total;
        }
      }
      __syncwarp();
      fetch(slot);  // what was in it has been used
      slot = slot + 1 < AHEAD ? slot + 1 : 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = sums[i];
      sum += __shfl_xor_sync(ALL_LANES, sum, 1);
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      if (quarter == 0) shares[turn][warp][8 * i + row_of_lane] = sum;
    }
    __syncthreads();
    if (threadIdx.x < ROWS) {
      const int at = tile * ROWS + threadIdx.x;
      float value = 0.0f;
#pragma unroll 1
      for (int i = 0; i < WARPS; ++i) value += shares[turn][i][threadIdx.x];
      if (biased) value += static_cast<float>(bias[at]);
      if (squared) value = fmaxf(value, 0.0f) * fmaxf(value, 0.0f);
      if (added) value += static_cast<float>(residual[at]);
      out[at] = static_cast<T>(value);
    }
  }
}
