"""Takes a checkpoint apart into runs, one for each part, which training can take up again by ``--resume``.

    python -m vcpipe.bench.mini.apart --model FOLDER --out RUNS

Weights stay as they are stored, in bfloat16. What exists in training alone (discriminators, the heads of the
language model that tell words and numbers, the CTC head of perception) begins anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import cast

import mlx.core as mx

from vcpipe.actors.checkpoint import resolve_checkpoint
from vcpipe.actors.shards import shard_files
from vcpipe.bench.mini.export import ROOTS, part_of
from vcpipe.schemas.errors import VcpipeError


def take_apart(folder: Path, out: Path) -> dict[str, int]:
    """Write ``out``/PART/weights.safetensors for each part; their numbers of parameters. Tables of integers belong to none."""
    parts: dict[str, dict[str, mx.array]] = {part: {} for part in ROOTS}
    for shard in shard_files(folder):
        for name, value in cast("dict[str, mx.array]", mx.load(str(shard))).items():
            part = part_of(name)
            if part is not None and mx.issubdtype(value.dtype, mx.floating):
                parts[part][name.removeprefix(ROOTS[part][0])] = value
    for part, tensors in parts.items():
        (out / part).mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(out / part / "weights.safetensors"), tensors)
    return {part: sum(value.size for value in tensors.values()) for part, tensors in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Take a checkpoint apart into runs that training can take up again.")
    parser.add_argument("--model", required=True, help="folder of a checkpoint of bench/mini's sizes")
    parser.add_argument("--out", type=Path, required=True, help="folder for codec/, perception/, tts/ and language/")
    options = parser.parse_args()
    try:
        for part, parameters in take_apart(resolve_checkpoint(options.model), options.out).items():
            print(f"{options.out / part}: {parameters:,} parameters")
    except VcpipeError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
