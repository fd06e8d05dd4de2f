"""CUDA kernels that stand in for runs of small operations.

The step is bound by the launches of its operations, not by what they compute. Each function here does in one launch what the
plain operations beside its caller do in many, equal but for the order in which sums are added; on any other device the plain
operations run. :data:`ENABLED` is the one switch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

#: Whether the kernels are used where there is CUDA.
ENABLED = True

_WARP = 32

#: Threads that share a row of a norm, and that search one share of a codebook.
_NORM_THREADS = 384
_SEARCH_THREADS = 256

#: Blocks that search a codebook together. They wait for each other, so all of them must be able to run at once.
_SEARCH_BLOCKS = 64

#: Components that one block can draw from: a thread each.
_MOST_COMPONENTS = 1024

_HEADER = r"""
__device__ __forceinline__ float sum_of_block(float value, float* shared) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) total += shared[i];
  return total;
}

__device__ __forceinline__ float max_of_block(float value, float* shared) {
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float top = shared[0];
  for (unsigned i = 1; i < blockDim.x / 32; ++i) top = fmaxf(top, shared[i]);
  return top;
}

// The greatest score wins and of equals the lowest index. Nothing packs to 0.
__device__ __forceinline__ unsigned long long packed(float score, unsigned index) {
  unsigned bits = __float_as_uint(score);
  bits = (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
  return (static_cast<unsigned long long>(bits) << 32) | (0xffffffffu - index);
}

__device__ __forceinline__ unsigned long long best_of_block(unsigned long long best, unsigned long long* shared) {
  for (int offset = 16; offset > 0; offset /= 2) {
    unsigned long long other = __shfl_xor_sync(0xffffffffu, best, offset);
    best = other > best ? other : best;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
  __syncthreads();
  best = shared[0];
  for (unsigned i = 1; i < blockDim.x / 32; ++i) best = shared[i] > best ? shared[i] : best;
  return best;
}
"""

_ADD_NORM = r"""
  __shared__ float shared[32];
  const int row = blockIdx.x * DIMS;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < DIMS; i += blockDim.x) squares += y[row + i] * y[row + i];
  const float post = rsqrtf(sum_of_block(squares, shared) / DIMS + post_eps[0]);
  squares = 0.0f;
  for (int i = threadIdx.x; i < DIMS; i += blockDim.x) {
    const float value = x[row + i] + y[row + i] * post * post_scale[i];
    sum[row + i] = value;
    squares += value * value;
  }
  const float next = rsqrtf(sum_of_block(squares, shared) / DIMS + next_eps[0]);
  for (int i = threadIdx.x; i < DIMS; i += blockDim.x) normed[row + i] = sum[row + i] * next * next_scale[i];
"""

_DRAW = r"""
  __shared__ float shared[32];
  __shared__ unsigned long long winners[32];
  __shared__ float masses[COUNT];
  const unsigned i = threadIdx.x;
  const bool real = i < COUNT;
  const float logit = real ? logits[i] : -3.402823466e+38f;
  const float top = max_of_block(logit, shared);
  const float weight = real ? expf(logit - top) : 0.0f;
  const float mass = weight / sum_of_block(weight, shared);
  if (real) masses[i] = mass;
  __syncthreads();
  // Of two equal entries the later one counts as the more probable.
  float above = 0.0f;
  if (real) {
    for (unsigned j = 0; j < COUNT; ++j) above += (masses[j] > mass || (masses[j] == mass && j > i)) ? masses[j] : 0.0f;
  }
  const bool kept = real && above < top_p[0];
  const float total = sum_of_block(kept ? weight : 0.0f, shared);
  unsigned long long best = 0;
  if (kept) best = packed(logf(weight / total) - logf(1e-8f - logf(uniform[i] + 1e-8f)), i);
  best = best_of_block(best, winners);
  if (i == 0) component[0] = best ? 0xffffffffu - static_cast<unsigned>(best) : 0;
"""

_CHOOSE = r"""
  __shared__ float left[LATENT];
  __shared__ unsigned long long winners[32];
  const int lane = threadIdx.x % 32;
  const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int warps = gridDim.x * (blockDim.x / 32);
  for (int i = threadIdx.x; i < LATENT; i += blockDim.x) left[i] = choice[i];
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < WIDTH; i += blockDim.x) chosen[i] = choice[i];
  }
  __syncthreads();
  // [0] counts the blocks that have reported, [1 + n] takes the best of the n-th codebook.
  unsigned long long* cells = reinterpret_cast<unsigned long long*>(exchange);
  for (int n = 0; n < COUNT; ++n) {
    const float* table = rows + static_cast<long long>(FIRST + n) * SIZE * WIDTH;
    unsigned long long best = 0;
    for (int k = warp; k < SIZE; k += warps) {
      float product = 0.0f;
      for (int i = lane; i < LATENT; i += 32) product += left[i] * table[static_cast<long long>(k) * WIDTH + i];
      for (int offset = 16; offset > 0; offset /= 2) product += __shfl_xor_sync(0xffffffffu, product, offset);
      const unsigned long long candidate = packed(-(norms[(FIRST + n) * SIZE + k] + 2.0f * product), k);
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
    const unsigned long long winner = *static_cast<volatile unsigned long long*>(cells + 1 + n);
    const float* row = table + static_cast<long long>(0xffffffffu - static_cast<unsigned>(winner)) * WIDTH;
    for (int i = threadIdx.x; i < LATENT; i += blockDim.x) left[i] += row[i];
    if (blockIdx.x == 0) {
      for (int i = threadIdx.x; i < WIDTH; i += blockDim.x) chosen[i] += row[i];
    }
    __syncthreads();
  }
"""


def usable() -> bool:
    """Whether the kernels run here."""
    return ENABLED and mx.default_device().type == mx.gpu and bool(mx.cuda.is_available())


def add_norm(
    x: mx.array, y: mx.array, post: tuple[mx.array, float], following: tuple[mx.array, float]
) -> tuple[mx.array, mx.array]:
    """x + RMS norm of y, and the RMS norm of that; x and y (1, N, D), the norms as (scale (D,), eps)."""
    dims = x.shape[-1]
    names = ["x", "y", "post_scale", "post_eps", "next_scale", "next_eps"]
    total, normed = _kernel("add_norm", tuple(names), ("sum", "normed"), _ADD_NORM)(
        inputs=[x, y, *post, *following],
        template=[("DIMS", dims)],
        grid=(x.size // dims * _NORM_THREADS, 1, 1),
        threadgroup=(_NORM_THREADS, 1, 1),
        output_shapes=[x.shape, x.shape],
        output_dtypes=[mx.float32, mx.float32],
    )
    return total, normed


def can_draw(components: int) -> bool:
    """Whether :func:`draw` takes so many components."""
    return usable() and components <= _MOST_COMPONENTS


def draw(logits: mx.array, top_p: float, uniform: mx.array) -> mx.array:
    """Index (1,) uint32 drawn from the nucleus of ``logits`` by as many ``uniform`` numbers."""
    threads = -(-logits.size // _WARP) * _WARP
    (component,) = _kernel("draw", ("logits", "top_p", "uniform"), ("component",), _DRAW)(
        inputs=[logits, top_p, uniform],
        template=[("COUNT", logits.size)],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint32],
    )
    return component


def choose(choice: mx.array, rows: mx.array, norms: mx.array, latent: int, first: int, count: int) -> mx.array:
    """``choice`` (1, 1, W) after ``count`` codebooks from ``first`` on; ``rows`` (Q, K, W) and ``norms`` (Q, K) of all.

    ``latent``: how many leading columns the distances are of. See :class:`Codebooks`.
    """
    size, width = rows.shape[1:]
    chosen, _ = _kernel("choose", ("choice", "rows", "norms"), ("chosen", "exchange"), _CHOOSE)(
        inputs=[choice, rows, norms],
        template=[("LATENT", latent), ("WIDTH", width), ("SIZE", size), ("FIRST", first), ("COUNT", count)],
        grid=(_SEARCH_BLOCKS * _SEARCH_THREADS, 1, 1),
        threadgroup=(_SEARCH_THREADS, 1, 1),
        output_shapes=[choice.shape, (1 + count,)],
        output_dtypes=[mx.float32, mx.uint64],
        init_value=0.0,
    )
    return chosen


@cache
def _kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str) -> Any:
    kernel: Any = mx.fast.cuda_kernel(
        name=f"tts_{name}", input_names=list(inputs), output_names=list(outputs), source=source, header=_HEADER
    )
    return kernel
