"""Loading one stage's share of a checkpoint into its network.

Only tensors of the stage are ever read: MLX loads lazily, and those of the other stages are dropped unread. Names may be
those of the NeMo checkpoint (which the public MLX conversions keep) or those of the running model; convolution kernels may
be in PyTorch's or in MLX's layout; any linear or embedding may be quantised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from vcpipe.actors.checkpoint import read_config
from vcpipe.actors.shards import TensorInfo, few, list_tensors, runtime_name, unclaimed_names
from vcpipe.actors.stage import Progress
from vcpipe.schemas.errors import WeightsError

#: Bytes evaluated at once: bounds what loading needs beyond the weights themselves.
_BATCH_BYTES = 512 << 20

#: The mel filters and window a NeMo checkpoint stores; the frontend computes its own.
_DROPPED = "stt_model.perception.preprocessor."

#: Kind of kernel -> axes that take PyTorch's layout to MLX's.
#: conv1d (O, I, k) -> (O, k, I); conv2d (O, I, kH, kW) -> (O, kH, kW, I); conv_transpose1d (I, O, k) -> (O, k, I).
_KERNEL_AXES = {"conv1d": (0, 2, 1), "conv2d": (0, 2, 3, 1), "conv_transpose1d": (1, 2, 0)}

#: Affine quantisation as MLX packs it.
_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)


@dataclass(slots=True)
class LoadReport:
    """What loading found: ``warnings``, one line each, and ``nbytes``, the size of the stage's tensors in memory."""

    warnings: list[str] = field(default_factory=list)
    nbytes: int = 0


class WeightLoader(Protocol):
    """Fills a stage's module: :func:`load_stage`, or whatever a measurement puts in its place."""

    def __call__(
        self,
        module: nn.Module,
        checkpoint: Path,
        *,
        stage: str,
        root: str,
        names: tuple[str, ...],
        kernels: Mapping[str, str],
        dense: tuple[str, ...] = (),
        progress: Progress,
    ) -> LoadReport: ...


def load_stage(
    module: nn.Module,
    checkpoint: Path,
    *,
    stage: str,
    root: str,
    names: tuple[str, ...],
    kernels: Mapping[str, str],
    dense: tuple[str, ...] = (),
    progress: Progress,
) -> LoadReport:
    """Fill ``module`` with the tensors of ``checkpoint`` whose runtime names start with ``root`` + one of ``names``.

    ``root`` is stripped; what is left must be the module's parameter names. ``kernels``: fnmatch patterns of parameters
    that are kernels -> "conv1d", "conv2d" or "conv_transpose1d"; their layout is told by shape, PyTorch's where both fit.
    ``dense``: patterns of weights the network reads raw: where such a module, or one that cannot hold packed weights,
    comes quantised, it is dequantised here with a warning. Every other module with ``.scales`` becomes a quantised one.

    No dtype is changed. Raises WeightsError for missing, unexpected, mis-shaped or non-finite tensors; tensors that are
    zero throughout become warnings, as do (for the language stage) tensors that belong to no stage.
    """
    loader = _Loader(stage, root, LoadReport())
    stored = list_tensors(checkpoint)
    arrays = loader.open(stored, names)
    loader.quantise(module, arrays, dense, read_config(checkpoint)["quantization"] or {})
    expected: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    loader.check_names(set(arrays), set(expected), unclaimed_names(list(stored)))
    weights = loader.fit_shapes(arrays, expected, kernels)
    arrays.clear()  # what is evaluated below must be the only reference, or layouts changed on the way would stay too
    loader.read(weights, progress)
    module.load_weights(list(weights.items()), strict=True)
    return loader.report


@dataclass(frozen=True, slots=True)
class _Loader:
    """The steps of loading one stage; names without ``root`` inside, with it in messages."""

    stage: str
    root: str
    report: LoadReport

    def open(self, stored: dict[str, TensorInfo], names: tuple[str, ...]) -> dict[str, mx.array]:
        """The stage's tensors under their parameter names, not read yet; the two biases of an LSTM layer are summed."""
        prefixes = tuple(self.root + name for name in names)
        claimed: dict[str, list[TensorInfo]] = {}
        for info in stored.values():
            name = runtime_name(info.name)
            if name.startswith(prefixes) and not name.startswith(_DROPPED):
                claimed.setdefault(name.removeprefix(self.root), []).append(info)
        files = {info.file for infos in claimed.values() for info in infos}
        lazy: dict[Path, Any] = {file: mx.load(str(file)) for file in files}
        arrays = {}
        for name, infos in claimed.items():
            parts = [lazy[info.file][info.name] for info in infos]
            summed = infos[0].name.rpartition(".")[2].startswith(("bias_ih", "bias_hh"))
            if len(parts) != 1 + summed:
                stored_names = few([info.name for info in infos])
                raise WeightsError(f"{self.stage}: {self.root}{name} cannot be made of {stored_names}")
            arrays[name] = parts[0] + parts[1] if summed else parts[0]
        return arrays

    # -------------------------------------------------------------------------------------------- quantised modules
    def quantise(
        self, module: nn.Module, arrays: dict[str, mx.array], dense: tuple[str, ...], said: dict[str, Any]
    ) -> None:
        """Make the modules that come with scales quantised ones; dequantise the arrays of those that must stay dense.

        ``said``: the config's quantisation map. What is stored decides; where the config contradicts it, a warning says so.
        """
        modules = dict(module.named_modules())
        packed: dict[str, dict[str, int]] = {}
        unpacked = []
        for path in sorted(name.removesuffix(".scales") for name in arrays if name.endswith(".scales")):
            if not all(f"{path}.{part}" in arrays for part in ("weight", "biases")):
                raise WeightsError(f"{self.stage}: {self.root}{path}.scales lacks the weight or the biases beside it")
            target = modules.get(path)
            packing = self._packing(path, arrays, getattr(target, "weight", None))
            self._cross_check(path, packing, said)
            if hasattr(target, "to_quantized") and not any(fnmatchcase(f"{path}.weight", pattern) for pattern in dense):
                packed[path] = packing
            else:
                unpacked.append(self.root + path)
                _dequantise(arrays, path, packing)
        if unpacked:
            self.report.warnings.append(f"{self.stage}: dequantised, as the network reads them raw: {few(unpacked)}")
        if packed:
            nn.quantize(module, class_predicate=lambda path, _: packed.get(path, False))

    def _packing(self, path: str, arrays: dict[str, mx.array], dense: mx.array | None) -> dict[str, int]:
        """Bits and group size of a packed (O, I * bits / 32) weight with (O, I / group) scales, told by the shapes."""
        weight, scales = arrays[f"{path}.weight"], arrays[f"{path}.scales"]
        if dense is None or dense.ndim != 2:
            raise WeightsError(f"{self.stage}: {self.root}{path} is quantised but is not a matrix of this stage")
        columns = dense.shape[-1]
        bits, rest = divmod(32 * weight.shape[-1], columns)
        group, group_rest = divmod(columns, scales.shape[-1])
        if weight.dtype != mx.uint32 or rest or group_rest or bits not in _BITS or group not in _GROUP_SIZES:
            raise WeightsError(
                f"{self.stage}: {self.root}{path} is quantised in an unknown way: weight {weight.dtype} {weight.shape}, "
                f"scales {scales.shape} for {columns} columns; accepted: uint32 holding {_BITS} bits, groups of {_GROUP_SIZES}"
            )
        return {"bits": bits, "group_size": group}

    def _cross_check(self, path: str, packing: dict[str, int], said: dict[str, Any]) -> None:
        entry = said.get(self.root + path, {})
        if entry is False:
            told = "not quantised"
        else:
            values = entry if isinstance(entry, dict) else {}
            wanted = {key: values.get(key, said.get(key, packing[key])) for key in packing}
            if wanted == packing:
                return
            told = str(wanted)
        self.report.warnings.append(
            f"{self.stage}: {self.root}{path} is stored as {packing}, which holds; the config says {told}"
        )

    # -------------------------------------------------------------------------------------------- names and shapes
    def check_names(self, found: set[str], expected: set[str], leftover: list[str]) -> None:
        """``leftover``: names of the checkpoint that belong to no stage; one stage is enough to warn of them."""
        missing = [self.root + name for name in sorted(expected - found)]
        unexpected = [self.root + name for name in sorted(found - expected)]
        if missing or unexpected:
            problems = [f"{len(missing)} missing ({few(missing)})"] if missing else []
            problems += [f"{len(unexpected)} unexpected ({few(unexpected)})"] if unexpected else []
            problems += [f"{len(leftover)} of no stage ({few(leftover)})"] if leftover else []
            raise WeightsError(f"{self.stage}: the checkpoint's tensors do not fit: {', '.join(problems)}")
        if leftover and self.stage == "language":
            self.report.warnings.append(f"{self.stage}: ignored tensors of no stage: {few(leftover)}")

    def fit_shapes(
        self, arrays: dict[str, mx.array], expected: dict[str, mx.array], kernels: Mapping[str, str]
    ) -> dict[str, mx.array]:
        """Arrays in the layout of the running model; raises for those whose shape or kind of number does not fit."""
        fitted, wrong = {}, []
        for name, wanted in expected.items():
            kind = next((kind for pattern, kind in kernels.items() if fnmatchcase(name, pattern)), None)
            array = _runtime_layout(arrays[name], wanted.shape, kind)
            if array.shape != wanted.shape:
                wrong.append(f"{self.root}{name} {array.shape}, expected {wanted.shape}")
            elif mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(wanted.dtype, mx.floating):
                wrong.append(f"{self.root}{name} of {array.dtype}, expected {wanted.dtype}")
            fitted[name] = array
        if wrong:
            raise WeightsError(f"{self.stage}: {len(wrong)} tensors of another shape or type: {few(wrong)}")
        return fitted

    # -------------------------------------------------------------------------------------------- reading
    def read(self, weights: dict[str, mx.array], progress: Progress) -> None:
        """Read everything in bounded batches and look for broken tensors in the same pass."""
        total = sum(array.nbytes for array in weights.values())
        zero, broken, done = set(), [], 0
        progress(f"reading {total / 1e6:,.0f} MB", 0.0)
        for batch in _batches(weights):
            extremes = {name: _extremes(weights[name]) for name in batch if _is_checked(weights[name])}
            mx.eval([weights[name] for name in batch], list(extremes.values()))
            for name, pair in extremes.items():
                low, high = np.array(pair)
                if not (math.isfinite(low) and math.isfinite(high)):
                    broken.append(self.root + name)
                elif low == high == 0:
                    zero.add(name)
            done += sum(weights[name].nbytes for name in batch)
            progress(f"read {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", done / total)
        if broken:
            raise WeightsError(f"{self.stage}: NaN or infinite values in {few(broken)}")
        suspect = [self.root + name for name in sorted(zero) if _is_zero_weight(name, weights, zero)]
        if suspect:
            self.report.warnings.append(f"{self.stage}: tensors that are zero throughout: {few(suspect)}")
        self.report.nbytes = total


def _dequantise(arrays: dict[str, mx.array], path: str, packing: dict[str, int]) -> None:
    """Replace a packed weight by the dense one, in the dtype of its scales."""
    weight, scales, biases = (arrays.pop(f"{path}.{part}") for part in ("weight", "scales", "biases"))
    dense = mx.dequantize(weight, scales, biases, group_size=packing["group_size"], bits=packing["bits"])
    arrays[f"{path}.weight"] = dense


def _runtime_layout(array: mx.array, wanted: tuple[int, ...], kind: str | None) -> mx.array:
    if kind is not None and array.ndim == len(_KERNEL_AXES[kind]):
        moved = array.transpose(*_KERNEL_AXES[kind])
        if moved.shape == wanted:
            return mx.contiguous(moved)
    return array


def _is_checked(array: mx.array) -> bool:
    return array.dtype == mx.uint32 or mx.issubdtype(array.dtype, mx.floating)


def _is_zero_weight(name: str, weights: dict[str, mx.array], zero: set[str]) -> bool:
    """Whether a tensor found to be zero means a dead weight: parts of a quantised module may well be zero by themselves."""
    path, _, part = name.rpartition(".")
    if f"{path}.scales" not in weights or part == "bias":
        return weights[name].size > 1
    return part == "biases" and (f"{path}.weight" in zero or f"{path}.scales" in zero)


def _extremes(array: mx.array) -> mx.array:
    """(2,) float32: least and greatest value. Needs no temporary of the tensor's size, and NaN travels through both."""
    return mx.stack([mx.min(array), mx.max(array)]).astype(mx.float32)


def _batches(weights: dict[str, mx.array]) -> Iterator[list[str]]:
    """Names in groups of at most :data:`_BATCH_BYTES` (or one tensor)."""
    batch: list[str] = []
    size = 0
    for name, array in weights.items():
        if batch and size + array.nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += array.nbytes
    if batch:
        yield batch
