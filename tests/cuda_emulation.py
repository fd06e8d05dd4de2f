"""CUDA kernels on a CPU, for machines without a GPU: ``mx.fast.cuda_kernel`` by g++.

:class:`EmulatedKernel` compiles a kernel's source as C++ (``cuda_emulation.h``) and runs its threads as fibers
(``cuda_emulation.cpp``). It is for the numbers and for mistakes, not for speed: barriers that some threads miss, shuffles from
absent lanes, memory outside of a buffer or an array, misaligned loads and deadlocks are errors that name the place. Memory
that nothing was written to holds NaN. Races are found only if the order in which threads run here brings them out.

Tests ask for the fixture ``cuda``: a real device where there is one, else this.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

_HERE = Path(__file__).parent

_TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
    mx.float64: "double",
}

_MOST_THREADS = 1024

_COMMON = ["-std=c++17", "-fPIC", "-pthread", "-w", "-U_FORTIFY_SOURCE", f"-I{_HERE}"]

#: -fsanitize reports to cuda_emulation.cpp. nvcc contracts a product and a sum, g++ is told not to: rounding differs.
_KERNEL = [
    "-O1",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero",
]


class EmulatedKernel:
    """Stands for what ``mx.fast.cuda_kernel`` returns; arguments as there.

    It runs at the call, so the outputs are evaluated. All inputs are made contiguous.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        shared_memory: int = 0,
    ) -> None:
        self._name = name
        self._inputs, self._outputs = list(input_names), list(output_names)
        self._source, self._header = source, header
        self._shared_memory = shared_memory

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Raises RuntimeError for a source that does not compile and for a kernel that does what it must not."""
        counts = len(inputs), len(output_shapes), len(output_dtypes)
        if counts != (len(self._inputs), len(self._outputs), len(self._outputs)):
            raise ValueError(f"{self._name}: inputs, output_shapes and output_dtypes are {counts}")
        arrays = [mx.contiguous(a if isinstance(a, mx.array) else mx.array(a)) for a in inputs]
        read = [_bytes_of(a) for a in arrays]
        written = [
            _initial(int(np.prod(shape, dtype=np.int64)), dtype, init_value)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        code = self._code(arrays, output_dtypes, template or [])
        if verbose:
            print(code)
        if min(*grid, *threadgroup) < 1 or np.prod(threadgroup) > _MOST_THREADS:
            raise ValueError(f"{self._name}: grid {grid} of threads in groups of {threadgroup}")
        threads = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]
        blocks = [-(-g // t) for t, g in zip(threadgroup, grid, strict=True)]
        self._run(_compiled(code), read, written, blocks, threads)
        return [
            mx.array(bytes_).view(dtype).reshape(shape)
            for bytes_, shape, dtype in zip(written, output_shapes, output_dtypes, strict=True)
        ]

    def _run(self, library: Path, read: list[np.ndarray], written: list[np.ndarray], blocks: Any, threads: Any) -> None:
        loaded = _loaded(library)
        kernel = _Kernel(*(ctypes.cast(f, ctypes.c_void_p) for f in (loaded.emulated_entry, loaded.emulated_anchor)))
        buffers = (_Buffer * (len(read) + len(written)))()
        for i, (name, array) in enumerate(zip(self._inputs + self._outputs, read + written, strict=True)):
            buffers[i] = _Buffer(name.encode(), array.ctypes.data, array.nbytes, i >= len(read))
        message = ctypes.create_string_buffer(2000)
        grid, block = (ctypes.c_uint * 3)(*blocks), (ctypes.c_uint * 3)(*threads)
        launch = _runtime().emulated_launch
        if not launch(kernel, buffers, len(buffers), grid, block, self._shared_memory, message, len(message)):
            raise RuntimeError(f"kernel {self._name}: {message.value.decode()}")

    def _code(
        self, arrays: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]]
    ) -> str:
        parameters: list[str] = []
        arguments: list[str] = []

        def pass_on(kind: str, name: str, value: str) -> None:
            parameters.append(f"{kind} {name}")
            arguments.append(value)

        for i, (name, array) in enumerate(zip(self._inputs, arrays, strict=True)):
            kind = f"const {_TYPES[array.dtype]}*"
            pass_on(kind, name, f"static_cast<{kind}>(buffers[{i}])")
            facts = {"shape": ("Shape", array.shape), "strides": ("Strides", _strides(array.shape))}
            for fact, (type_, values) in facts.items():
                if array.ndim and f"{name}_{fact}" in self._source:
                    pass_on(f"const {type_}", f"{name}_{fact}", f"{type_}{{{{{', '.join(map(str, values))}}}}}")
            if array.ndim and f"{name}_ndim" in self._source:
                pass_on("const int", f"{name}_ndim", str(array.ndim))
        for i, (name, dtype) in enumerate(zip(self._outputs, output_dtypes, strict=True)):
            pass_on(f"{_TYPES[dtype]}*", name, f"static_cast<{_TYPES[dtype]}*>(buffers[{len(arrays) + i}])")
        return f"""#include "cuda_emulation.h"
#line 1 "{self._name}, header"
{_as_cpp(self._header)}
namespace mlx::core::cu {{
static void kernel({", ".join(parameters)}) {{
{"".join(map(_constant, template))}
#line 1 "{self._name}"
{_as_cpp(self._source)}
}}
extern "C" void emulated_entry(void* const* buffers) {{ kernel({", ".join(arguments)}); }}
extern "C" void* emulated_anchor() {{
  static thread_local char anchor;
  return &anchor;
}}
}}
"""


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("written", ctypes.c_bool),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (("entry", ctypes.c_void_p), ("anchor", ctypes.c_void_p))


def _bytes_of(array: mx.array) -> np.ndarray:
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8))


def _initial(size: int, dtype: mx.Dtype, value: float | None) -> np.ndarray:
    """Bytes of an output before the launch; those of no value are NaN."""
    if value is None:
        return np.full(size * dtype.size, 0xFF, np.uint8)
    return _bytes_of(mx.broadcast_to(mx.array(value).astype(dtype), (size,)))


def _strides(shape: Sequence[int]) -> list[int]:
    return [int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))]


def _constant(argument: tuple[str, Any]) -> str:
    name, value = argument
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"  constexpr int {name} = {value};\n"
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_TYPES[value]};\n"
    raise ValueError(f"template argument {name} is {value!r}: accepted are int, bool and Dtype")


def _as_cpp(source: str) -> str:
    """What no macro can turn into C++: includes, shared memory whose size is given at the launch, and tensor cores."""
    source = re.sub(r'^[ \t]*#\s*include\s*"(.*)"', _text_of, source, flags=re.MULTILINE)
    source = re.sub(r"^[ \t]*#\s*include\b", "// #include", source, flags=re.MULTILINE)
    dynamic = r"extern\s+__shared__\s+((?:__align__|alignas)\s*\([^)]*\)\s*)?([\w:\s]+?)\s*(\w+)\s*\[\s*\]\s*;"
    source = re.sub(dynamic, r"\2* \3 = static_cast<\2*>(emulated_place()->dynamic_shared);", source)
    multiply = (
        r'asm\s+volatile\s*\(\s*"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32 [^"]*"([^;]*)\)\s*;'
    )
    return re.sub(multiply, lambda found: f"emulated_mma({', '.join(_operands(found[1]))});", source)


def _text_of(include: re.Match[str]) -> str:
    """The included file, so that it is changed too; errors name its lines."""
    return f'#line 1 "{include[1]}"\n{Path(include[1]).read_text(encoding="utf-8")}'


def _operands(text: str) -> list[str]:
    """``: "+f"(c[0]) : "r"(a[0]), "r"(b.x)`` -> c[0], a[0], b.x."""
    return re.findall(r'"\+?[fr]"\s*\(((?:[^()]|\([^()]*\))*)\)', text)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Of the libraries; deleted at exit."""
    return tempfile.TemporaryDirectory(prefix="cuda_emulation_")


@cache
def _runtime() -> ctypes.CDLL:
    path = Path(_folder().name, "runtime.so")
    _build(*_COMMON, "-O1", "-shared", str(_HERE / "cuda_emulation.cpp"), "-o", str(path))
    runtime = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.emulated_launch.argtypes = [_Kernel, pointer, size, pointer, pointer, size, pointer, size]
    runtime.emulated_launch.restype = ctypes.c_bool
    return runtime


@cache
def _compiled(code: str) -> Path:
    """The library of one kernel. Compiled apart from linking: -fsanitize would link a library of its own."""
    runtime = _runtime()._name
    stem = Path(_folder().name, hashlib.sha256(code.encode()).hexdigest()[:16])
    text, made, library = (stem.with_suffix(end) for end in (".cpp", ".o", ".so"))
    text.write_text(code)
    _build(*_COMMON, *_KERNEL, "-c", str(text), "-o", str(made))
    _build("-shared", str(made), runtime, "-o", str(library))
    return library


@cache
def _loaded(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))


def _build(*arguments: str) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ refuses the kernel:\n{done.stderr}")


@pytest.fixture
def emulated_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vcpipe believes in a CUDA device whose kernels are emulated; MLX's own operations stay where they are.

    Nothing is compiled meanwhile: within ``mx.compile`` there are no values yet that a kernel could run on.
    """
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("CUDA kernels are emulated on Linux with g++ only")
    monkeypatch.setattr(mx.fast, "cuda_kernel", EmulatedKernel)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    mx.disable_compile()
    _forget()
    yield
    mx.enable_compile()
    _forget()


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> bool:
    """A CUDA device: True for a real one, False for its emulation where there is none."""
    real = mx.default_device().type == mx.gpu and bool(mx.cuda.is_available())
    if not real:
        request.getfixturevalue("emulated_cuda")
    return real


def _forget() -> None:
    """Empty the caches in which vcpipe's modules keep what they know of the device, and kernels."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vcpipe."):
            for value in list(vars(module).values()):
                getattr(value, "cache_clear", int)()
