"""Joins trained parts into a checkpoint folder of the public layout.

    python -m vcpipe.bench.mini.export --codec RUN --perception RUN --tts RUN --language RUN --start FOLDER --out FOLDER

A run is a folder with ``weights.safetensors``, float32, whose names are the checkpoint's below a root of its part. A part
without a run gets random weights, so that the others can be tried early. Weights are stored in bfloat16. The folder is
loaded by every stage before it counts as written; ``--check-peer`` also compares a session of it with mlx-vlm's.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from vcpipe.actors.checkpoint import read_config, resolve_checkpoint
from vcpipe.actors.perception.mel import slaney_filters
from vcpipe.bench.folders import load_stage, write_json, write_weights
from vcpipe.bench.mini.card import model_card
from vcpipe.bench.mini.shape import BOS, EOS
from vcpipe.bench.mini.tokens import TextTokens
from vcpipe.bench.tensor_shapes import Shapes, tensor_shapes
from vcpipe.launch.console import warn
from vcpipe.schemas.errors import VcpipeError, WeightsError
from vcpipe.schemas.geometry import STAGES

Arrays = dict[str, np.ndarray]

#: What each part's names may be below; a name that is complete below one of them belongs there.
ROOTS = {
    "codec": ("tts_model.audio_codec.",),
    "perception": ("stt_model.", "stt_model.perception.", "stt_model.perception.encoder."),
    "tts": ("tts_model.", "tts_model.tts_model."),
    "language": ("stt_model.", "stt_model.perception."),
}

MOST_PARAMETERS = 15_000_000
MOST_BYTES = 32_000_000

#: Sizes of the flag tables: those of the 11B checkpoint's vocabulary, which the public code has as constants.
_FLAGS = 131072

_START_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_FEATURIZER = "stt_model.perception.preprocessor.featurizer."
_CODEC_BOOKS = "tts_model.audio_codec.prvq.mus_list."
_DECODER_BOOKS = "tts_model.tts_model.rvq_embs"
#: Part of the checkpoint, but nothing reads it.
_UNREAD = "tts_model.tts_model.audio_prompt_projection_W"


# ------------------------------------------------------------------------------------------------ parts
def part_of(name: str) -> str | None:
    """Which part trains the tensor ``name``; None for what is not trained."""
    if name.startswith(_FEATURIZER):
        return None
    if name.startswith("tts_model."):
        return "codec" if name.startswith("tts_model.audio_codec.") else "tts"
    heard = ("stt_model.perception.encoder.", "stt_model.rnnt_")
    return "perception" if name.startswith(heard) else "language"


def read_run(part: str, run: Path, shapes: Shapes) -> Arrays:
    """The weights of a part by their full names. WeightsError naming what is missing, unknown, mis-shaped or not finite."""
    path = run / "weights.safetensors"
    if not path.is_file():
        raise WeightsError(f"{part}: {run} has no weights.safetensors; expected the folder of a training run")
    wanted = {name: shape for name, shape in shapes.items() if part_of(name) == part}
    found: Arrays = {}
    unknown = []
    stored = cast("dict[str, mx.array]", mx.load(str(path)))
    for name, value in stored.items():
        full = next((root + name for root in ROOTS[part] if root + name in wanted), None)
        if full is None:
            unknown.append(name)
        else:
            found[full] = np.array(value.astype(mx.float32))
    faults = {
        "unknown": unknown,
        "missing": sorted(wanted.keys() - found.keys()),
        "not of their shape": [name for name, value in found.items() if value.shape != wanted[name]],
        "not finite": [name for name, value in found.items() if not np.isfinite(value).all()],
    }
    if any(faults.values()):
        told = (f"{kind}: {', '.join(names[:8])}" for kind, names in faults.items() if names)
        raise WeightsError(f"{part}: {path} has tensors that are {'; '.join(told)}")
    return found


def random_part(part: str, shapes: Shapes, rng: np.random.Generator) -> Arrays:
    """Weights that keep activations near 1, in place of a part that has no run."""
    return {name: _draw(name, shape, rng) for name, shape in shapes.items() if part_of(name) == part}


def _draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    last = name.rpartition(".")[2]
    if last in ("variance", "D"):
        return np.ones(shape, np.float32)
    if last == "A_log":
        return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
    if "norm" in name or len(shape) < 2:
        # The speech decoder's norms add 1 to their weights.
        is_scale = last == "weight" and not name.startswith("tts_model.tts_model.")
        return (0.1 * rng.standard_normal(shape) + is_scale).astype(np.float32)
    fan_in = math.prod(shape[1:])
    return (rng.standard_normal(shape) / math.sqrt(fan_in)).astype(np.float32)


# ------------------------------------------------------------------------------------------------ whole
def join(runs: Mapping[str, Path | None], config: dict[str, Any], tokens: TextTokens) -> Arrays:
    """Every tensor of the checkpoint but the silence codes, which take its codec. WeightsError where parts do not fit."""
    shapes, rng = tensor_shapes(config), np.random.default_rng(0)
    arrays: Arrays = {}
    for part in ROOTS:
        run = runs[part]
        if run is None:
            warn(f"{part}: no run, so its weights are random numbers")
        arrays |= random_part(part, shapes, rng) if run is None else read_run(part, run, shapes)
    _share_books(arrays, runs, config["codec_config"]["num_quantizers"])
    arrays[_UNREAD] = np.eye(len(arrays[_UNREAD]), dtype=np.float32)
    frontend = config["audio_config"]["preprocessor"]
    filters = slaney_filters(frontend["sample_rate"], frontend["n_fft"], frontend["features"])
    arrays[_FEATURIZER + "fb"] = np.array(filters)[None]
    window = np.hanning(*shapes[_FEATURIZER + "window"])
    arrays[_FEATURIZER + "window"] = window.astype(np.float32)
    return arrays | integer_tables(config, tokens)


def _share_books(arrays: Arrays, runs: Mapping[str, Path | None], count: int) -> None:
    """Codec and speech decoder hold the same codebooks: a part without a run takes them from the other."""
    names = [f"{_CODEC_BOOKS}{i}" for i in range(count)]
    if runs["codec"] is None and runs["tts"] is not None:
        arrays.update(zip(names, arrays[_DECODER_BOOKS], strict=True))
    books = np.stack([arrays[name] for name in names])
    if runs["tts"] is None:
        arrays[_DECODER_BOOKS] = books
    stored, decoder = (mx.array(tables).astype(mx.bfloat16) for tables in (books, arrays[_DECODER_BOOKS]))
    if not mx.array_equal(stored, decoder):
        raise WeightsError("tts: its codebooks (rvq_embs) are not those of the codec's run; train it on that codec")


def integer_tables(config: dict[str, Any], tokens: TextTokens) -> Arrays:
    """Flags of the text ids, control codes, and room for the codes of silence."""
    subword = "tts_model.tts_model.embed_subword."
    continuation, special = np.zeros(_FLAGS + 1, np.int32), np.zeros(_FLAGS, np.int32)
    continuation[: tokens.size] = tokens.continuations()
    special[BOS], special[EOS] = 1, 2
    codes, books = config["tts_config"]["codebook_size"], config["tts_config"]["num_quantizers"]
    return {
        subword + "subword_flag_emb.is_continuation": continuation,
        subword + "subword_flag_emb.pad_tensor": np.array(_FLAGS, np.int32),
        subword + "bos_eos_emb.special_flags": special,
        subword + "bos_eos_emb.pad_tensor": np.array(_FLAGS - 1, np.int32),
        "tts_model._control_codes": np.array([codes + 2, codes + 1, codes], np.int32),
        "tts_model.codec_silence_tokens": np.zeros(books, np.int32),
    }


def export(
    runs: Mapping[str, Path | None], start: Path, out: Path, measures: dict[str, Any] | None = None
) -> dict[str, int]:
    """Write the checkpoint into ``out``, replacing what is there; its numbers of parameters and bytes.

    ``measures``: what ``evaluate --json`` printed of an earlier export of the same runs, for the model card.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name in _START_FILES:
        shutil.copyfile(start / name, out / name)
    source = json.loads((start / "config.json").read_text(encoding="utf-8"))
    if any(run is None for run in runs.values()):
        source.setdefault("vcpipe", {})["random_weights"] = True
    write_json(out / "config.json", source)
    config = read_config(out)
    arrays = join(runs, config, TextTokens(out))
    parameters = sum(value.size for value in arrays.values() if value.dtype == np.float32)
    if parameters > MOST_PARAMETERS:
        raise WeightsError(f"{parameters:,} parameters; at most {MOST_PARAMETERS:,} are wanted")
    write_weights(out, arrays)
    # Silence is what the codec itself makes of zeros, as in the 11B checkpoint: its most frequent frame.
    frames, counts = np.unique(load_stage("codec", out).prompt_codes, axis=0, return_counts=True)
    arrays["tts_model.codec_silence_tokens"] = frames[counts.argmax()].astype(np.int32)
    write_weights(out, arrays)
    per_part = {
        part: sum(value.size for name, value in arrays.items() if value.dtype == np.float32 and part_of(name) == part)
        for part in ROOTS
    }
    (out / "README.md").write_text(model_card(per_part, measures), encoding="utf-8")
    for line in check(out):
        warn(line)
    size = sum(path.stat().st_size for path in out.iterdir())
    if size > MOST_BYTES:
        raise WeightsError(f"{out} has {size:,} bytes; at most {MOST_BYTES:,} are wanted")
    return {"parameters": parameters, "bytes": size}


def check(folder: Path) -> list[str]:
    """Load every stage and run it once; what they find odd, which every user would be told at every start."""
    resolve_checkpoint(str(folder))
    odd = []
    for name in STAGES:
        stage = load_stage(name, folder)
        odd += stage.warnings
        stage.warm_up()
    return odd


def main() -> None:
    parser = argparse.ArgumentParser(description="Join trained parts into a checkpoint folder.")
    for part in ROOTS:
        parser.add_argument(f"--{part}", type=Path, metavar="RUN", help="folder of its run (default: random weights)")
    parser.add_argument("--start", type=Path, required=True, help="folder with config.json and the tokenizer's files")
    parser.add_argument("--out", type=Path, required=True, help="folder to replace")
    parser.add_argument(
        "--measures", type=Path, metavar="FILE", help="what evaluate --json printed, for the model card"
    )
    parser.add_argument(
        "--check-peer", type=Path, metavar="RECORDING", help="compare 100 frames of a spoken question with mlx-vlm's"
    )
    options = parser.parse_args()
    measures = json.loads(options.measures.read_text(encoding="utf-8")) if options.measures else None
    try:
        sizes = export({part: getattr(options, part) for part in ROOTS}, options.start, options.out, measures)
        print(f"{options.out}: {sizes['parameters']:,} parameters, {sizes['bytes'] / 1e6:.2f} MB, every stage loads")
        if options.check_peer:
            from vcpipe.bench.mini.peer_check import compare

            print(compare(options.out, frames=100, recording=options.check_peer))
    except VcpipeError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
