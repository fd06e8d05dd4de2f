"""A NeMo or MLX checkpoint folder -> a folder in the layout of the public MLX conversions.

Tensor names and kernel layouts stay those of the NeMo checkpoint; floats become one dtype, the language model's linears and
embeddings can be quantised, the config becomes a runtime config, and the weights are cut into shards with an index.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from vcpipe.actors.checkpoint import TOKENIZER_SOURCE, read_config
from vcpipe.actors.shards import INDEX_NAME, TensorInfo, list_tensors, runtime_name
from vcpipe.actors.stage import Progress
from vcpipe.schemas.errors import ConfigError, VcpipeError

_DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
_FLOATS = ("F64", "F32", "F16", "BF16")
_BITS = (4, 8)
_GROUP_SIZE = 64
_SHARD_BYTES = 5_000_000_000
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

#: Linears of a block of the language model, by the letter of the layer pattern.
_PACKED_LINEARS = {
    "M": ("in_proj", "out_proj"),
    "-": ("up_proj", "down_proj"),
    "*": ("q_proj", "k_proj", "v_proj", "o_proj"),
}


def convert(
    src: Path,
    dst: Path,
    *,
    tokenizer: Path | None = None,
    dtype: str = "bfloat16",
    bits: int | None = None,
    progress: Progress,
) -> None:
    """Write the checkpoint in ``src`` to the new folder ``dst``.

    ``tokenizer``: a folder with tokenizer.json, for sources without one. ``dtype``: of all floats. ``bits``: 4 or 8
    quantises embeddings, heads and linears of the language model; None leaves every module as it is.

    Tensors pass one by one, so memory is bounded by a shard (5 GB). Everything is written beside ``dst`` and renamed at
    the end: an aborted run leaves no ``dst``. Raises ConfigError where an option, the source or the destination will not
    do.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; accepted: {', '.join(_DTYPES)}")
    if bits is not None and bits not in _BITS:
        raise ConfigError(f"{bits} bits are not supported; accepted: {', '.join(map(str, _BITS))}, or none")
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise ConfigError(f"{dst} exists already; give a new or an empty folder")
    config = read_config(src)
    stored = list_tensors(src)
    if bits is not None and any(name.endswith(".scales") for name in stored):
        raise ConfigError(f"{src} is quantised already; convert to {bits} bits from a bfloat16 or float32 checkpoint")
    tokenizer_files = _find_tokenizer(src, tokenizer)
    recipe = _Recipe(dtype, bits, _packed_modules(config) if bits is not None else frozenset())
    shards = _plan(stored, recipe)

    dst.parent.mkdir(parents=True, exist_ok=True)
    _check_space(dst, sum(size for shard in shards for _, size in shard))
    partial = Path(tempfile.mkdtemp(prefix=f".{dst.name}-partial-", dir=dst.parent))
    try:
        packed = _write_shards(partial, shards, recipe, progress)
        for file in tokenizer_files:
            shutil.copyfile(file, partial / file.name)
        _write_json(partial / "config.json", _runtime_config(config, packed, bits))
        partial.chmod(0o755)  # mkdtemp makes it private
        partial.rename(dst)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What becomes of each tensor. ``modules``: runtime paths of those to quantise."""

    dtype: str
    bits: int | None
    modules: frozenset[str]

    def is_packed(self, info: TensorInfo) -> bool:
        path, _, part = runtime_name(info.name).rpartition(".")
        return part == "weight" and path in self.modules and info.shape[-1] % _GROUP_SIZE == 0

    def nbytes(self, info: TensorInfo) -> int:
        """Size of what :meth:`apply` gives."""
        count = math.prod(info.shape)
        item = _DTYPES[self.dtype].size
        if self.is_packed(info):
            assert self.bits is not None
            return count * self.bits // 8 + 2 * (count // _GROUP_SIZE) * item
        return count * item if info.dtype in _FLOATS else info.nbytes

    def apply(self, info: TensorInfo, array: mx.array) -> dict[str, mx.array]:
        """Name -> evaluated array; three of them for a module that is quantised."""
        if info.dtype in _FLOATS:
            array = array.astype(_DTYPES[self.dtype])
        arrays = {info.name: array}
        if self.is_packed(info):
            path = info.name.removesuffix(".weight")
            packed = mx.quantize(array, group_size=_GROUP_SIZE, bits=self.bits)
            parts = zip(("weight", "scales", "biases"), packed, strict=True)
            arrays = {f"{path}.{part}": value for part, value in parts}
        mx.eval(list(arrays.values()))
        return arrays


def _packed_modules(config: dict[str, Any]) -> frozenset[str]:
    """Runtime paths of all modules of the language model that hold a matrix."""
    paths = ["stt_model.embed_tokens", "stt_model.lm_head", "stt_model.function_head"]
    for layer, letter in enumerate(config["text_config"]["hybrid_override_pattern"]):
        paths += [f"stt_model.llm.layers.{layer}.mixer.{linear}" for linear in _PACKED_LINEARS[letter]]
    return frozenset(paths)


def _plan(stored: dict[str, TensorInfo], recipe: _Recipe) -> list[list[tuple[TensorInfo, int]]]:
    """Tensors and their sizes after conversion, in shards of at most :data:`_SHARD_BYTES` (or one tensor)."""
    shards: list[list[tuple[TensorInfo, int]]] = [[]]
    filled = 0
    for info in stored.values():
        size = recipe.nbytes(info)
        if shards[-1] and filled + size > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((info, size))
        filled += size
    return shards


def _write_shards(
    folder: Path, shards: list[list[tuple[TensorInfo, int]]], recipe: _Recipe, progress: Progress
) -> list[str]:
    """Write all shards and their index; returns the runtime paths of the quantised modules."""
    total = max(1, sum(size for shard in shards for _, size in shard))
    done, total_size = 0, 0
    weight_map: dict[str, str] = {}
    packed = []
    reader = _Reader()
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays: dict[str, mx.array] = {}
        for info, size in shard:
            arrays |= recipe.apply(info, reader.take(info))
            if recipe.is_packed(info):
                packed.append(runtime_name(info.name).removesuffix(".weight"))
            done += size
            progress(f"converting shard {number} of {len(shards)}", done / total)
        mx.save_safetensors(str(folder / file), arrays, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(arrays, file)
        total_size += sum(array.nbytes for array in arrays.values())
    _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    return packed


class _Reader:
    """Gives each stored tensor once, in the order of the files, holding none."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._lazy: Any = {}

    def take(self, info: TensorInfo) -> mx.array:
        if info.file != self._file:
            self._file, self._lazy = info.file, mx.load(str(info.file))
        return self._lazy.pop(info.name)


def _find_tokenizer(src: Path, tokenizer: Path | None) -> list[Path]:
    folder = src if tokenizer is None else tokenizer
    if not (folder / "tokenizer.json").is_file():
        hint = "give the folder of one" if tokenizer is None else "accepted: a folder that has one"
        raise ConfigError(f"{folder} has no tokenizer.json; {hint}, from {TOKENIZER_SOURCE} on the Hub")
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def _runtime_config(config: dict[str, Any], packed: list[str], bits: int | None) -> dict[str, Any]:
    """What goes into config.json: strict JSON, and the quantisation as the public folders say it."""
    config = dict(config)
    text = dict(config["text_config"])
    if math.isinf(text["time_step_limit"][1]):
        del text["time_step_limit"]  # the default; strict JSON has no word for infinity
    config["text_config"] = text
    if packed:
        entry = {"group_size": _GROUP_SIZE, "bits": bits}
        config["quantization"] = entry | {path: dict(entry) for path in packed}
    if config["quantization"] is None:
        del config["quantization"]
    else:
        config["quantization_config"] = config["quantization"]
    return config


def _check_space(dst: Path, needed: int) -> None:
    free = shutil.disk_usage(dst.parent).free
    if free < needed:
        raise ConfigError(
            f"{dst.parent} has {free / 1e9:.1f} GB free; the converted checkpoint takes {needed / 1e9:.1f} GB"
        )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def main() -> None:
    """``python -m vcpipe.actors.convert``, the process behind ``vcpipe convert``: a line of JSON for every progress."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--tokenizer", type=Path)
    given = parser.parse_args()

    def progress(step: str, fraction: float) -> None:
        print(json.dumps({"step": step, "fraction": fraction}), flush=True)

    try:
        convert(
            given.source,
            given.destination,
            tokenizer=given.tokenizer,
            dtype=given.dtype,
            bits=given.bits,
            progress=progress,
        )
    except VcpipeError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
