"""The emulator of CUDA kernels: what kernels may do, and that it says what they must not."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cuda_emulation import EmulatedKernel


def launch(
    source: str,
    *inputs: Any,
    dtype: mx.Dtype = mx.float32,
    size: int = 64,
    threads: int = 32,
    header: str = "",
    shared_memory: int = 0,
    **more: Any,
) -> mx.array:
    """Output y of ``size`` from inputs a, b, ..., by as many threads as y has entries; each knows its own as ``i``."""
    source = "const int i = blockIdx.x * blockDim.x + threadIdx.x;" + source
    kernel = EmulatedKernel("probe", list("ab"[: len(inputs)]), ["y"], source, header, shared_memory=shared_memory)
    (y,) = kernel(
        inputs=inputs,
        grid=(size, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(size,)],
        output_dtypes=[dtype],
        **more,
    )
    assert y.shape == (size,) and y.dtype == dtype
    return y


@pytest.fixture(autouse=True)
def compiler(emulated_cuda: None) -> None:
    """Skips these without a compiler."""


def test_inputs_scalars_shapes_and_template() -> None:
    a = mx.arange(128).reshape(2, 64).T.astype(mx.int32)  # (64, 2), not contiguous
    y = launch(
        "y[i] = static_cast<T>(a[i * a_shape[1]] * b[0] + (FLAG ? N : 0) + a_ndim + a_strides[0]);",
        a, 0.5, template=[("T", mx.float32), ("FLAG", True), ("N", 7)],
    )  # fmt: skip
    np.testing.assert_array_equal(y, np.arange(64) * 0.5 + 7 + 2 + 2)


def test_initial_value_and_poison() -> None:
    source = "if (i == 3) y[i] = 1.0f;"
    assert mx.isnan(launch(source)).sum().item() == 63
    np.testing.assert_array_equal(launch(source, init_value=2.0), [2, 2, 2, 1] + [2] * 60)
    shared = launch("__shared__ float s[4]; if (i % 8 == 0) s[2] = i; __syncthreads(); y[i] = s[i % 4];")
    assert mx.isnan(shared).tolist() == [True, True, False, True] * 16


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_short_floats_round_as_mlx_does(dtype: mx.Dtype) -> None:
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    values[:12] = [0, -0.0, 1e-7, 6e-8, 2.9e-8, 65519, 65520, -1e9, np.inf, -np.inf, 1 + 2**-11, 1 + 3 * 2**-11]
    rounded = launch("y[i] = a[i];", mx.array(values), dtype=dtype)
    wanted = mx.array(values).astype(dtype).astype(mx.float32)
    np.testing.assert_array_equal(rounded.astype(mx.float32), wanted)
    np.testing.assert_array_equal(launch("y[i] = static_cast<float>(a[i]);", rounded), wanted)


def test_warps() -> None:
    source = """
      const int lane = threadIdx.x % 32;
      unsigned long long wide = __shfl_xor_sync(0xffffffffu, (unsigned long long)i << 40, 1) >> 40;
      int down = __shfl_down_sync(0xffffffffu, i, 3), up = __shfl_up_sync(0xffffffffu, i, 3, 8);
      int third = 0;
      if (lane < 8) third = __shfl_sync(0xffu, i, 3);
      __syncwarp();
      unsigned odd = __ballot_sync(0xffffffffu, i & 1);
      y[i] = wide * 1000000 + down * 10000 + up * 100 + third + (odd == 0xaaaaaaaau ? 0.5 : 0);
    """
    i = np.arange(64)
    lane = i % 32
    up, down = np.where(lane % 8 < 3, i, i - 3), np.where(lane < 29, i + 3, i)
    third = np.where(lane < 8, i - lane + 3, 0)
    wanted = (i ^ 1) * 1000000 + down * 10000 + up * 100 + third + 0.5
    np.testing.assert_array_equal(launch(source, dtype=mx.float32), wanted.astype(np.float32))


def test_shared_memory_and_helpers_of_a_header() -> None:
    header = """
      #include <cuda_bf16.h>
      __device__ __forceinline__ float reversed(float value, float* shared) {
        shared[threadIdx.x] = value;
        __syncthreads();
        return shared[blockDim.x - 1 - threadIdx.x];
      }
    """
    y = launch(
        """
        extern __shared__ __align__(16) float big[];
        __shared__ alignas(16) float small[8];
        if (threadIdx.x < 8) small[threadIdx.x] = threadIdx.x;
        y[i] = reversed(i, big) + small[__syncthreads_count(threadIdx.x < 5)];
        """,
        header=header, shared_memory=128,
    )  # fmt: skip
    i = np.arange(64)
    np.testing.assert_array_equal(y, i // 32 * 32 + 31 - i % 32 + 5)


def test_blocks_wait_for_each_other() -> None:
    """More blocks than cores, one that waits first; threads of one block that wait for another in a loop."""
    source = """
      volatile unsigned* cell = reinterpret_cast<volatile unsigned*>(y);
      __shared__ volatile int flag;
      if (threadIdx.x == 0) flag = 0;
      __syncthreads();
      if (threadIdx.x == 31) flag = 1;
      while (flag == 0) {}
      if (threadIdx.x == 0) {
        atomicAdd(y, 1u);
        __threadfence();
        while (*cell < gridDim.x) {}
        atomicMax(y + 1, *cell);
      }
    """
    assert launch(source, dtype=mx.uint32, size=1600, init_value=0)[:2].tolist() == [50, 50]


def test_vector_loads_and_atomics_of_floats() -> None:
    source = """
      const float4 four = reinterpret_cast<const float4*>(a)[i % 4];
      atomicAdd(y, four.x + four.w);
      reinterpret_cast<uint2*>(y)[1 + i % 31] = make_uint2(__float_as_uint(1.0f), __float_as_uint(fmaxf(min(1, 2), 0.5f)));
    """
    y = launch(source, mx.arange(16).astype(mx.float32), init_value=0)
    np.testing.assert_array_equal(y, [16 * (0 + 3 + 4 + 7 + 8 + 11 + 12 + 15), 0] + [1] * 62)


def test_tensor_cores() -> None:
    """The lanes hold the fragments as the PTX ISA says."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((16, 16), (16, 8)))
    source = """
      const int row = i / 4, two = i % 4 * 2;
      const unsigned* rows = reinterpret_cast<const unsigned*>(a);  // pairs along k, of a and of b transposed
      const unsigned* columns = reinterpret_cast<const unsigned*>(b);
      float c[4] = {y[row * 8 + two], y[row * 8 + two + 1], y[(row + 8) * 8 + two], y[(row + 8) * 8 + two + 1]};
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(rows[row * 8 + i % 4]), "r"(rows[(row + 8) * 8 + i % 4]), "r"(rows[row * 8 + i % 4 + 4]),
            "r"(rows[(row + 8) * 8 + i % 4 + 4]), "r"(columns[row * 8 + i % 4]), "r"(columns[row * 8 + i % 4 + 4]));
      for (int j = 0; j < 4; ++j) y[(row + j / 2 * 8) * 8 + two + j % 2] = c[j];
    """
    kernel = EmulatedKernel("probe", ["a", "b"], ["y"], "const int i = threadIdx.x;" + source)
    (y,) = kernel(
        inputs=[mx.array(a).astype(mx.bfloat16), mx.array(b.T).astype(mx.bfloat16)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(16, 8)],
        output_dtypes=[mx.float32],
        init_value=3.0,
    )
    np.testing.assert_array_equal(y, a @ b + 3)


#: What a thread must not do -> the error; LINE is where it stands. Of each two lines.
MISUSES = {
    "if (threadIdx.x < 5) return;\n__syncthreads();": "a thread ended, so it never comes to the barrier at LINE2",
    "__syncthreads();\nif (threadIdx.x < 5) __syncthreads();": "a thread ended, so it never comes to the barrier at LINE2",
    "if (threadIdx.x < 5) __syncthreads();\nelse __syncthreads();": "meet at different barriers: LINE1 and LINE2",
    "if (threadIdx.x < 5) __syncwarp();\nelse __syncthreads();": (
        "deadlock in block (0, 0, 0): 27 threads wait in a barrier at LINE2, 5 threads wait in a warp operation at LINE1"
    ),
    "if (threadIdx.x < 5)\ny[0] = __shfl_xor_sync(31u, 1, 8);": (
        "lane 0 takes the value of lane 8, which gives none, at LINE2"
    ),
    "\ny[0] = __shfl_xor_sync(62u, 1, 1);": "a thread calls a warp operation whose mask lacks it, at LINE2",
    "\ny[0] = b[64];": "a thread reads or writes 256 bytes from the start of `b`, which has 256",
    "\ny[64 + threadIdx.x] = 1;": "a thread reads or writes 256 bytes from the start of `y`, which has 128",
    "\ny[-1] = 1;": "a thread writes before the start of `y`",
    "\nconst_cast<float*>(b)[0] = 1;": "a thread writes to `b`, an input",
    "\ny[0] = reinterpret_cast<const float4*>(b + 1)->x;": "misaligned or null pointer at LINE2",
    "__shared__ float s[8];\ns[threadIdx.x] = 1;": "index out of the bounds of its array at LINE2",
    "\ny[0] = 1u << (threadIdx.x + 1);": "shift by too many bits at LINE2",
    "\ny[0] = threadIdx.x / (blockDim.x - 32);": "integer division by zero at LINE2",
    "\ny[0] = *reinterpret_cast<const float*>(64ull);": "a thread touches memory that is none of its buffers",
}


@pytest.mark.parametrize(("case", "message"), list(enumerate(MISUSES.values())))
def test_misuse(case: int, message: str) -> None:
    source = "\n".join(f"if (a[0] == {i}) {{ {misuse} }}" for i, misuse in enumerate(MISUSES))
    for i in (1, 2):
        message = message.replace(f"LINE{i}", f"probe:{2 * case + i}")
    with pytest.raises(RuntimeError, match=f"kernel probe: .*{re.escape(message)}$"):
        launch(source, case, mx.ones(64), size=32)


def test_too_much_shared_memory() -> None:
    with pytest.raises(RuntimeError, match="static shared memory of a block is over 48 KiB"):
        launch("__shared__ float s[13000]; s[int(a[0])] = 1; y[0] = s[int(a[1])];", mx.ones(64))


def test_a_source_that_is_not_cpp() -> None:
    with pytest.raises(RuntimeError, match=r"probe:2:.*undeclared"):
        launch("\ny[0] = undeclared;")


@pytest.mark.parametrize("threads", [0, 2048])
def test_threads_of_a_block(threads: int) -> None:
    with pytest.raises(ValueError, match="probe: grid"):
        launch("", size=4096, threads=threads)
