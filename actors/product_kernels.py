"""The CUDA kernels of :mod:`vcpipe.actors.product`: what they take, and how they are launched.

A launch costs about as long as reading 10 MB, so one does as much as it can. The kernels' own texts are ``product.cuh``,
``product_dense.cuh`` and ``product_packed.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx

from vcpipe.actors.norms import LayerNorm, Norm, RmsNorm

_WARPS = 8
_THREADS = 32 * _WARPS

#: Blocks that run at once; with more to do, each does more. Two on every multiprocessor of a large card.
_MOST_BLOCKS = 264

#: Bytes of shared memory of every block, as MLX lets a kernel have what its first launch asked for. Small cards have 99 KB for
#: a block, large ones room for two of these.
_SHARED = 96 << 10

#: How many times 16 bytes of two rows a lane of a dense product has on their way.
_DENSE_AHEAD = 4

#: Steps of a packed matrix that a warp has on their way.
_AHEAD = 3

#: Rows that a warp takes in one step, and words of each of them.
_TILE_ROWS = 32
_STEP_WORDS = 8


@cache
def on_cuda() -> bool:
    """Whether steps run on a CUDA GPU. Asked once: the device is chosen before any stage is loaded."""
    return mx.default_device().type == mx.gpu and mx.cuda.is_available()


@dataclass(frozen=True, slots=True)
class DenseRows:
    """A matrix row by row: ``weight`` (O, I) float32, bfloat16 or float16, contiguous. ``bias`` (O,) is added to products.

    ``rows``: 1 or 2, as mostly are multiplied at once. A kernel is compiled for so many, and takes fewer.
    """

    weight: mx.array
    bias: mx.array | None = None
    rows: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        rows, columns = self.weight.shape
        return rows, columns


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """A matrix of 4 or 8 bit integers in the order in which tensor cores are fed. ``bias`` (O,) is added to products.

    A tile is 32 rows, a step 32 bytes of a row. ``weight`` (tiles, steps, 2, 8, 4, 2, 2) uint32: 16 rows, of 8 of them the
    quarters of their step, the same of the 8 rows after each, two words. ``scales`` (tiles, groups, 8, 4, 2): of the same 8
    rows and the three times 8 after them, scale and offset.
    """

    weight: mx.array
    scales: mx.array
    group_size: int
    bits: int
    bias: mx.array | None = None

    @classmethod
    def of(
        cls, weight: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int, bias: mx.array | None
    ) -> PackedTiles | None:
        """From what ``mx.quantize`` gives; None where the kernel does not take it."""
        rows, words = weight.shape
        if bits not in (4, 8) or rows % _TILE_ROWS or words % _STEP_WORDS or group_size * bits % (32 * _STEP_WORDS):
            return None
        tiles = weight.reshape(-1, 2, 2, 8, words // _STEP_WORDS, 4, 2).transpose(0, 4, 1, 3, 5, 2, 6)
        both = mx.stack([scales, biases], axis=-1).reshape(-1, 4, 8, scales.shape[1], 2).transpose(0, 3, 2, 1, 4)
        return cls(mx.contiguous(tiles), mx.contiguous(both), group_size, bits, bias)

    def unpacked(self) -> tuple[mx.array, mx.array, mx.array]:
        """Weight, scales and biases as they were before."""
        tiles, steps = self.weight.shape[:2]
        weight = self.weight.transpose(0, 2, 5, 3, 1, 4, 6).reshape(tiles * _TILE_ROWS, steps * _STEP_WORDS)
        both = self.scales.transpose(4, 0, 3, 2, 1).reshape(2, tiles * _TILE_ROWS, -1)
        return weight, both[0], both[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        tiles, steps = self.weight.shape[:2]
        return tiles * _TILE_ROWS, steps * _STEP_WORDS * 32 // self.bits


CudaMatrix = DenseRows | PackedTiles


class Activation(Enum):
    """What becomes of the outputs. The gated ones take the outputs' first half as a and their second as b."""

    NONE = 0
    SQUARED_RELU = 1  # max(a, 0)^2
    SILU = 2  # a sigmoid(a)
    GATED_GELU = 3  # gelu(a) b, gelu in its tanh form
    GATED_SIGMOID = 4  # a sigmoid(b)

    @property
    def gated(self) -> bool:
        return self in (Activation.GATED_GELU, Activation.GATED_SIGMOID)


@dataclass(frozen=True, slots=True)
class Input:
    """How a product's input is made: norm(h), h being x, x + carry(y) or carry(x)."""

    x: mx.array
    norm: Norm | None
    y: mx.array | None = None
    carry: Norm | None = None

    @property
    def rows(self) -> int:
        """How many rows x has."""
        return self.x.size // self.x.shape[-1]


def launch(
    made: Input, matrix: CudaMatrix, activation: Activation, residual: mx.array | None = None, factor: float = 1.0
) -> list[mx.array] | None:
    """[out], and h after it where something is carried; None for a product that no kernel takes."""
    if isinstance(matrix, PackedTiles):
        out = _launch_packed(made, matrix, activation, residual, factor)
        return None if out is None else [out]
    return _launch_dense(made, matrix, activation, residual, factor)


def _launch_dense(
    made: Input, matrix: DenseRows, activation: Activation, residual: mx.array | None, factor: float
) -> list[mx.array] | None:
    x, norm, carry = made.x, made.norm, made.carry
    outputs, columns = matrix.shape
    outputs //= 2 if activation.gated else 1
    rows = max(made.rows, matrix.rows)
    groups = norm.groups if isinstance(norm, RmsNorm) else 1
    summed_groups = carry.groups if isinstance(carry, RmsNorm) else 0
    areas = 2 if summed_groups else 1  # of the input's size, and what the norms scale and add
    shared = 4 * columns * (areas * rows + 2 * (carry is not None) + 2 * (norm is not None))
    shared += _DENSE_AHEAD * _THREADS * 32
    values = 16 // matrix.weight.dtype.size  # that a lane loads at once
    if (
        rows > 2
        or rows * groups > _WARPS
        or (summed_groups and max(groups, summed_groups) != 1)
        or (carry is not None and type(carry) is not type(norm))
        or columns % values
        or columns % (4 * groups)
        or shared > _SHARED
    ):
        return None
    adds = matrix.bias is not None or residual is not None or made.rows < rows
    inputs = {"x": x}
    if made.y is not None:
        inputs["y"] = made.y
    inputs |= _norm_inputs("carry", carry) | _norm_inputs("norm", norm)
    inputs["w"] = matrix.weight
    is_set = norm is not None or activation is not Activation.NONE or adds
    if is_set:
        biased, residual_given = matrix.bias is not None, residual is not None
        epsilons = (0.0 if carry is None else carry.eps, 0.0 if norm is None else norm.eps)
        inputs["settings"] = _settings(*epsilons, factor, activation, biased, residual_given, made.rows)
    if adds:
        inputs |= {"bias": x if matrix.bias is None else matrix.bias, "residual": x if residual is None else residual}
    template = {
        "T": x.dtype,
        "N": rows,
        "AHEAD": _DENSE_AHEAD,
        "NORM": 0 if norm is None else 1 if isinstance(norm, RmsNorm) else 2,
        "CARRY": carry is not None,
        "GROUPS": groups,
        "SET": is_set,
        "ADDS": adds,
    }
    tasks = outputs if activation.gated else -(-outputs // 2)  # two rows each
    most = _MOST_BLOCKS * _WARPS
    share = _WARPS  # of a task, where tasks are too few for all warps; the kernel knows it by the number of blocks
    while share > 1 and (share * tasks > most or share * 32 * values > columns):
        share //= 2
    blocks = -(-tasks * share // (_WARPS * -(-tasks // most)))
    shapes = [(*x.shape[:-1], outputs), *([] if carry is None else [x.shape])]
    return _run(_dense_kernel(tuple(inputs), tuple(template), carry is not None), inputs, template, blocks, shapes)


def _norm_inputs(name: str, norm: Norm | None) -> dict[str, mx.array]:
    if norm is None:
        return {}
    scale = {f"{name}_scale": norm.scale}
    return scale | {f"{name}_offset": norm.offset} if isinstance(norm, LayerNorm) else scale


@cache
def _settings(
    carry_eps: float, norm_eps: float, factor: float, activation: Activation, biased: bool, residual: bool, rows: int
) -> mx.array:
    """What differs between launches of one compiled kernel, as it reads it; the last number is made of bits."""
    return mx.array([carry_eps, norm_eps, factor, activation.value + 8 * biased + 16 * residual + 32 * (rows - 1)])


@cache
def _dense_kernel(inputs: tuple[str, ...], template: tuple[str, ...], carries: bool) -> Any:
    outputs = ["out", "carried"] if carries else ["out"]
    names = ("x", "y", "carry_scale", "carry_offset", "norm_scale", "norm_offset", "w", "settings", "bias", "residual")
    unused = {"settings": "nullptr"}  # the others have the type of x, so that templates find one
    arguments = [name if name in inputs else unused.get(name, "x") for name in names]
    sizes = ["w_shape[0]", "w_shape[1]"]
    arguments = [*sizes, *arguments, "out", "carried" if carries else "nullptr"]
    return mx.fast.cuda_kernel(
        name="vcpipe_dense_product",
        input_names=list(inputs),
        output_names=outputs,
        source=f"dense_product<{', '.join(template)}>({', '.join(arguments)});",
        header="".join(included("vcpipe.actors", name) for name in ("warp.cuh", "product.cuh", "product_dense.cuh")),
        shared_memory=_SHARED,
    )


def _launch_packed(
    made: Input, matrix: PackedTiles, activation: Activation, residual: mx.array | None, factor: float
) -> mx.array | None:
    x, norm = made.x, made.norm
    outputs, columns = matrix.shape
    tiles, steps = matrix.weight.shape[:2]
    runs = norm.groups if isinstance(norm, RmsNorm) else 1
    parts = 1 if x.dtype == mx.bfloat16 else 2
    step_bytes = 32 * 32 + 8 * 8 * matrix.scales.dtype.size
    shared = _WARPS * _AHEAD * step_bytes + 2 * parts * columns + 4 * steps
    if (
        made.rows != 1
        or made.carry is not None
        or isinstance(norm, LayerNorm)
        or activation not in (Activation.NONE, Activation.SQUARED_RELU)
        or factor != 1.0
        or runs > _WARPS
        or steps % runs
        or shared > _SHARED
    ):
        return None
    inputs = {
        "x": x,
        "norm_scale": x if norm is None else norm.scale,
        "w": matrix.weight,
        "scales": matrix.scales,
        "bias": x if matrix.bias is None else matrix.bias,
        "residual": x if residual is None else residual,
        "how": _how(
            norm is not None,
            activation is not Activation.NONE,
            matrix.bias is not None,
            residual is not None,
            runs,
            0.0 if norm is None else norm.eps,
        ),
    }
    template = {
        "T": x.dtype,
        "BITS": matrix.bits,
        "PACKED_GROUP": matrix.group_size,
        "AHEAD": _AHEAD,
    }
    rounds = -(-tiles // _MOST_BLOCKS)
    kernel = _packed_kernel(tuple(inputs), tuple(template))
    return _run(kernel, inputs, template, -(-tiles // rounds), [(*x.shape[:-1], outputs)])[0]


@cache
def _how(normed: bool, squared: bool, biased: bool, added: bool, runs: int, eps: float) -> mx.array:
    """Settings of a launch as the shape of an array: that MLX hands to a kernel as numbers, and nothing is compiled anew."""
    how = mx.full((1 + normed, 1 + squared, 1 + biased, 1 + added, runs), eps)
    mx.eval(how)
    return how


@cache
def _packed_kernel(inputs: tuple[str, ...], template: tuple[str, ...]) -> Any:
    arguments = [
        *inputs[:-1],
        "w_shape[0]",
        "w_shape[1]",
        *(f"how_shape[{i}] == 2" for i in range(4)),
        "how_shape[4]",
        "how",
        "out",
    ]
    return mx.fast.cuda_kernel(
        name="vcpipe_packed_product",
        input_names=list(inputs),
        output_names=["out"],
        source=f"packed_product<{', '.join(template)}>({', '.join(arguments)});",
        header="".join(included("vcpipe.actors", name) for name in ("warp.cuh", "product.cuh", "product_packed.cuh")),
        shared_memory=_SHARED,
    )


def _run(
    kernel: Any, inputs: dict[str, mx.array], template: dict[str, Any], blocks: int, shapes: list[tuple[int, ...]]
) -> list[mx.array]:
    results: list[mx.array] = kernel(
        inputs=list(inputs.values()),
        template=list(template.items()),
        grid=(blocks * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=shapes,
        output_dtypes=[inputs["x"].dtype] * len(shapes),
    )
    return results


@cache
def included(package: str, name: str) -> str:
    """The line that includes a file of ``package``: MLX hashes a kernel's text at every launch, so that is kept short."""
    return f'#include "{Path(str(files(package).joinpath(name))).resolve().as_posix()}"\n'
