"""Quantised matrix times one vector on a CUDA GPU, where MLX's own product widens scales and is bound by arithmetic.

A frame is one position, so every product of a step reads its whole matrix for one vector: the time should be that of reading
the matrix. One warp takes a few output rows, loads 16 bytes of weights a lane and keeps the sums in float32. Where there is no
CUDA device it is MLX's own product, to the same values up to rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

_THREADS = 256
_WARPS = _THREADS // 32

#: Bytes one lane loads at once.
_LOAD_BYTES = 16

# An integer becomes a float without a conversion instruction (those run at a fraction of the rate): its bits, put into the
# mantissa of 2^23, are 2^23 + q. A packed value need not even be shifted down for that: left where it is it counts
# 2^(BITS * place) times as much, which the vector, scaled the other way once for all rows, takes back exactly.
_QUANTIZED_SOURCE = """
    constexpr int VALUES = 128 / BITS;
    constexpr int PER_WORD = 32 / BITS;
    constexpr int PLACES = BITS == 4 ? 5 : 2;
    constexpr unsigned MASK = (1u << BITS) - 1u;
    const int lane = threadIdx.x & 31;
    const int first = ((blockIdx.x * blockDim.x + threadIdx.x) >> 5) * ROWS;
    if (first >= N) return;
    float sums[ROWS] = {};
    for (int k = lane * VALUES; k < K; k += 32 * VALUES) {
        uint4 packed[ROWS];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = min(first + r, N - 1);
            packed[r] = *reinterpret_cast<const uint4*>(w + ((long long)row * K + k) / PER_WORD);
        }
        float v[VALUES];
        float total = 0.0f;
        #pragma unroll
        for (int i = 0; i < VALUES; i += 4) {
            const float4 loaded = *reinterpret_cast<const float4*>(x + k + i);
            total += (loaded.x + loaded.y) + (loaded.z + loaded.w);
            const float four[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
            #pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int place = ((i + j) % PER_WORD) % PLACES;
                v[i + j] = four[j] * (1.0f / (1u << (BITS * place)));
            }
        }
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = min(first + r, N - 1);
            const unsigned words[4] = {packed[r].x, packed[r].y, packed[r].z, packed[r].w};
            float dot = 0.0f;
            #pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                const int place = (i % PER_WORD) % PLACES;
                const int shift = (i % PER_WORD) / PLACES * PLACES * BITS;
                const unsigned bits = ((words[i / PER_WORD] >> shift) & (MASK << (BITS * place))) | 0x4b000000u;
                dot = fmaf(__uint_as_float(bits) - 8388608.0f, v[i], dot);
            }
            const long long group = (long long)row * (K / GROUP) + k / GROUP;
            sums[r] += static_cast<float>(scales[group]) * dot + static_cast<float>(biases[group]) * total;
        }
    }
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        #pragma unroll
        for (int step = 16; step > 0; step >>= 1) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], step);
        if (lane == 0 && first + r < N) y[first + r] = sums[r];
    }
"""


@cache
def on_cuda() -> bool:
    """Whether steps run on a CUDA GPU. Asked once: the device is chosen before any stage is loaded."""
    return mx.default_device().type == mx.gpu and mx.cuda.is_available()


def quantized_matvec(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> mx.array:
    """x (..., K) float32 times an affinely quantised (N, K) matrix, transposed -> (..., N) float32.

    ``weight``, ``scales``, ``biases``: as ``mx.quantize`` gives them.
    """
    columns, rows = x.shape[-1], weight.shape[0]
    values = _LOAD_BYTES * 8 // bits
    fits = bits in (4, 8) and columns % values == 0 and group_size % values == 0 and x.size == columns
    if not (on_cuda() and fits and x.dtype == mx.float32):
        return mx.quantized_matmul(x, weight, scales, biases, transpose=True, group_size=group_size, bits=bits)
    rows_per_warp = 4 if rows >= 8192 else 2
    return _quantized_kernel()(
        inputs=[x, weight, scales, biases],
        template=[("ROWS", rows_per_warp), ("BITS", bits), ("GROUP", group_size), ("N", rows), ("K", columns)],
        grid=(-(-rows // (_WARPS * rows_per_warp)) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(*x.shape[:-1], rows)],
        output_dtypes=[mx.float32],
    )[0]


@cache
def _quantized_kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="vcpipe_quantized_matvec",
        input_names=["x", "w", "scales", "biases"],
        output_names=["y"],
        source=_QUANTIZED_SOURCE,
    )
