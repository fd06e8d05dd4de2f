// What a CUDA kernel needs to be compiled as C++ and run on a CPU: see cuda_emulation.py. The threads of a block are fibers of
// one CPU thread (cuda_emulation.cpp); they change places where they wait for each other, and only there.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// ---- The language

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static thread_local

struct Site {
  const char* file;
  int line;
};
// The last parameters of what is called by a kernel: where it is called.
#define CALLER const char* file = __builtin_FILE(), int line = __builtin_LINE()
#define SITE Site{file, line}

#define VECTORS(type, name, bytes)                                                                 \
  struct __align__(2 * bytes) name##2 { type x, y; };                                              \
  struct name##3 { type x, y, z; };                                                                \
  struct __align__(4 * bytes > 16 ? 16 : 4 * bytes) name##4 { type x, y, z, w; };                  \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                 \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                      \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
VECTORS(signed char, char, 1)
VECTORS(unsigned char, uchar, 1)
VECTORS(short, short, 2)
VECTORS(unsigned short, ushort, 2)
VECTORS(int, int, 4)
VECTORS(unsigned, uint, 4)
VECTORS(long long, longlong, 8)
VECTORS(unsigned long long, ulonglong, 8)
VECTORS(float, float, 4)
VECTORS(double, double, 8)
#undef VECTORS
using dim3 = uint3;

// ---- What the running fiber is, and how it waits (cuda_emulation.cpp)

struct Place {
  uint3 thread, block;
  dim3 threads, blocks;
  void* dynamic_shared;
  unsigned loops;
};

enum WarpOperation { SYNC, SHUFFLE, BALLOT };

// "const" as it does not change for the code that a fiber runs.
__attribute__((const)) Place* emulated_place();
int emulated_barrier(int predicate, Site site);
uint64_t emulated_exchange(WarpOperation operation, unsigned mask, uint64_t value, int source, Site site);
void emulated_spin();

constexpr int warpSize = 32;
#define threadIdx (emulated_place()->thread)
#define blockIdx (emulated_place()->block)
#define blockDim (emulated_place()->threads)
#define gridDim (emulated_place()->blocks)

inline void __syncthreads(CALLER) { emulated_barrier(0, SITE); }
inline int __syncthreads_count(int predicate, CALLER) { return emulated_barrier(predicate != 0, SITE); }
inline int __syncthreads_or(int predicate, CALLER) { return emulated_barrier(predicate != 0, SITE) > 0; }
inline int __syncthreads_and(int predicate, CALLER) { return emulated_barrier(predicate == 0, SITE) == 0; }

inline int emulated_lane() {
  const Place& p = *emulated_place();
  return (p.thread.x + p.threads.x * (p.thread.y + p.threads.y * p.thread.z)) % 32;
}

template <typename T>
T emulated_shuffle(unsigned mask, T value, int source, int width, Site site) {
  static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
  const int lane = emulated_lane();
  if (source / width != lane / width || source < 0) source = lane;
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = emulated_exchange(SHUFFLE, mask, bits, source, site);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CALLER) {
  return emulated_shuffle(mask, value, emulated_lane() / width * width + (source & (width - 1)), width, SITE);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CALLER) {
  return emulated_shuffle(mask, value, emulated_lane() ^ lanes, width, SITE);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32, CALLER) {
  return emulated_shuffle(mask, value, emulated_lane() + static_cast<int>(lanes), width, SITE);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32, CALLER) {
  return emulated_shuffle(mask, value, emulated_lane() - static_cast<int>(lanes), width, SITE);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CALLER) { emulated_exchange(SYNC, mask, 0, 0, SITE); }
inline unsigned __ballot_sync(unsigned mask, int predicate, CALLER) {
  return static_cast<unsigned>(emulated_exchange(BALLOT, mask, predicate != 0, 0, SITE));
}
inline int __any_sync(unsigned mask, int predicate, CALLER) { return __ballot_sync(mask, predicate, file, line) != 0; }
inline int __all_sync(unsigned mask, int predicate, CALLER) { return __ballot_sync(mask, !predicate, file, line) == 0; }

// ---- Memory

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
inline void __nanosleep(unsigned) { emulated_spin(); }

template <typename T> struct Same { using type = T; };
template <typename T> using Exactly = typename Same<T>::type;

// Applies to the bits, so that it serves floating point too.
template <typename T, typename Change>
T emulated_atomic(T* address, Change change) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  static_assert(sizeof(T) == sizeof(Bits), "an atomic has 4 or 8 bytes");
  Bits* cell = reinterpret_cast<Bits*>(address);
  Bits old = __atomic_load_n(cell, __ATOMIC_SEQ_CST), bits;
  T value;
  do {
    memcpy(&value, &old, sizeof(T));
    const T next = change(value);
    memcpy(&bits, &next, sizeof(T));
  } while (!__atomic_compare_exchange_n(cell, &old, bits, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return value;
}
#define ATOMIC(name, result)                                        \
  template <typename T> T name(T* address, Exactly<T> value) {      \
    return emulated_atomic(address, [=](T old) -> T { return result; }); \
  }
ATOMIC(atomicAdd, old + value)
ATOMIC(atomicSub, old - value)
ATOMIC(atomicMax, old > value ? old : value)
ATOMIC(atomicMin, old < value ? old : value)
ATOMIC(atomicOr, old | value)
ATOMIC(atomicAnd, old & value)
ATOMIC(atomicXor, old ^ value)
ATOMIC(atomicExch, value)
ATOMIC(atomicInc, old >= value ? 0 : old + 1)
#undef ATOMIC
template <typename T>
T atomicCAS(T* address, Exactly<T> compare, Exactly<T> value) {
  return emulated_atomic(address, [=](T old) -> T { return old == compare ? value : old; });
}

template <typename T> T __ldg(const T* address) { return *address; }
template <typename T> T __ldca(const T* address) { return *address; }
template <typename T> T __ldcg(const T* address) { return *address; }
template <typename T> T __ldcs(const T* address) { return *address; }
template <typename T> T __ldlu(const T* address) { return *address; }
template <typename T> T __ldcv(const T* address) { return *const_cast<const volatile T*>(address); }
template <typename T> void __stcg(T* address, Exactly<T> value) { *address = value; }
template <typename T> void __stcs(T* address, Exactly<T> value) { *address = value; }
template <typename T> void __stwt(T* address, Exactly<T> value) { *address = value; }

// ---- Numbers

template <typename To, typename From>
To emulated_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
inline unsigned __float_as_uint(float v) { return emulated_bits<unsigned>(v); }
inline int __float_as_int(float v) { return emulated_bits<int>(v); }
inline float __uint_as_float(unsigned v) { return emulated_bits<float>(v); }
inline float __int_as_float(int v) { return emulated_bits<float>(v); }
inline long long __double_as_longlong(double v) { return emulated_bits<long long>(v); }
inline double __longlong_as_double(long long v) { return emulated_bits<double>(v); }

// Both 16-bit types round to the nearest, ties to even.
inline uint16_t bfloat16_bits(float v) {
  const unsigned bits = __float_as_uint(v);
  if (v != v) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float bfloat16_value(uint16_t bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
inline uint16_t half_bits(float v) {
  const unsigned all = __float_as_uint(v), sign = (all >> 16) & 0x8000u, bits = all & 0x7fffffffu;
  if (v != v) return 0x7fff;
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // below the least normal one: 0.5 has the right unit in the last place
    return static_cast<uint16_t>(sign | (__float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13));
}
inline float half_value(uint16_t bits) {
  const unsigned sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest << 13) * 0x1p112f));
}

#define FLOAT16(type, prefix)                                                                         \
  struct type {                                                                                       \
    uint16_t bits;                                                                                    \
    type() = default;                                                                                 \
    template <typename T, typename = std::enable_if_t<std::is_arithmetic<T>::value>>                  \
    type(T v) : bits(prefix##_bits(static_cast<float>(v))) {}                                         \
    operator float() const { return prefix##_value(bits); }                                           \
    type& operator+=(type v) { return *this = type(float(*this) + float(v)); }                        \
    type& operator-=(type v) { return *this = type(float(*this) - float(v)); }                        \
    type& operator*=(type v) { return *this = type(float(*this) * float(v)); }                        \
  };                                                                                                  \
  inline type operator+(type a, type b) { return type(float(a) + float(b)); }                         \
  inline type operator-(type a, type b) { return type(float(a) - float(b)); }                         \
  inline type operator*(type a, type b) { return type(float(a) * float(b)); }                         \
  inline type operator/(type a, type b) { return type(float(a) / float(b)); }
FLOAT16(__nv_bfloat16, bfloat16)
FLOAT16(__half, half)
#undef FLOAT16
using half = __half;
using nv_bfloat16 = __nv_bfloat16;
inline __nv_bfloat16 __float2bfloat16(float v) { return v; }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return v; }
inline float __bfloat162float(__nv_bfloat16 v) { return v; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return emulated_bits<__nv_bfloat16>(v); }
inline __half __float2half(float v) { return v; }
inline __half __float2half_rn(float v) { return v; }
inline float __half2float(__half v) { return v; }
inline unsigned short __half_as_ushort(__half v) { return v.bits; }
inline __half __ushort_as_half(unsigned short v) { return emulated_bits<__half>(v); }

// Of a number and a NaN the number, as CUDA has it.
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return x != x || y > x ? y : x;
}
template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return x != x || y < x ? y : x;
}
using std::abs;
using std::ceil;
using std::cos;
using std::erf;
using std::exp;
using std::fabs;
using std::floor;
using std::fma;
using std::isfinite;
using std::isinf;
using std::isnan;
using std::log;
using std::log1p;
using std::pow;
using std::sin;
using std::sqrt;
using std::tanh;
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline float rsqrt(float v) { return rsqrtf(v); }
inline float __frsqrt_rn(float v) { return rsqrtf(v); }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __expf(float v) { return expf(v); }
inline float __logf(float v) { return logf(v); }
inline float __log2f(float v) { return log2f(v); }
inline float __sinf(float v) { return sinf(v); }
inline float __cosf(float v) { return cosf(v); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float v) { return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f; }
inline float __int2float_rn(int v) { return static_cast<float>(v); }
inline float __uint2float_rn(unsigned v) { return static_cast<float>(v); }
inline int __float2int_rn(float v) { return static_cast<int>(nearbyintf(v)); }
inline int __float2int_rz(float v) { return static_cast<int>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __ffs(unsigned v) { return __builtin_ffs(static_cast<int>(v)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 0xfu;
    unsigned byte = bytes >> (8 * (pick & 7u)) & 0xffu;
    if (pick & 8u) byte = byte & 0x80u ? 0xffu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31u));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31u) >> 32);
}
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  return sum;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 4; ++i) sum += (a >> (8 * i) & 0xffu) * (b >> (8 * i) & 0xffu);
  return sum;
}

// ---- Tensor cores

// cuda_pipeline_primitives.h (cuda_emulation.cpp). Copies are done as late as they may be: when they are waited for.
void __pipeline_memcpy_async(void* to, const void* from, size_t bytes);
void __pipeline_commit();
void __pipeline_wait_prior(size_t groups);

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: c (16, 8) += a (16, 16) b (16, 8), by a warp. Which lane holds what: PTX
// ISA, "Matrix fragments for mma.m16n8k16". A word holds two neighbours along the 16 that are summed, the first in its low half.
inline void emulated_mma(float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                         unsigned b0, unsigned b1, CALLER) {
  struct Fragment {
    unsigned a[4], b[2];
  };
  const int lane = emulated_lane(), row = lane / 4, column = lane % 4 * 2;
  Fragment mine = {{a0, a1, a2, a3}, {b0, b1}};
  const Fragment* table[32];
  const Fragment** all = emulated_shuffle(0xffffffffu, static_cast<const Fragment**>(table), 0, 32, SITE);
  all[lane] = &mine;
  __syncwarp(0xffffffffu, file, line);
  float* c[4] = {&c0, &c1, &c2, &c3};
  for (int i = 0; i < 4; ++i) {
    double sum = *c[i];
    for (int k = 0; k < 16; ++k) {
      const int quarter = k % 8 / 2, half = k / 8, shift = k % 2 * 16;
      const unsigned a = all[row * 4 + quarter]->a[i / 2 + 2 * half], b = all[(column + i % 2) * 4 + quarter]->b[half];
      sum += bfloat16_value(static_cast<uint16_t>(a >> shift)) * static_cast<double>(bfloat16_value(static_cast<uint16_t>(b >> shift)));
    }
    *c[i] = static_cast<float>(sum);
  }
  __syncwarp(0xffffffffu, file, line);
}

// ---- MLX's own

namespace mlx::core::cu {
template <typename T>
struct Dimensions {
  T values[10];
  T operator[](int i) const { return values[i]; }
  const T* data() const { return values; }
};
using Shape = Dimensions<int32_t>;
using Strides = Dimensions<int64_t>;
}  // namespace mlx::core::cu

// A loop may wait for another thread, which must have its turn then. These two come last: what stands above uses the words.
inline bool emulated_turn() {
  if ((++emulated_place()->loops & 63u) == 0) emulated_spin();
  return true;
}
#define while(...) while (emulated_turn() && (__VA_ARGS__))
#define alignas(bytes) __attribute__((aligned(bytes)))
