"""Which tensors a checkpoint folder holds, read from the headers of its safetensors files. No MLX.

A header is a few hundred kilobytes even for the 44 GB file, so every process may read all of them; the data stay
untouched.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from vcpipe.schemas.errors import ConfigError, WeightsError

INDEX_NAME = "model.safetensors.index.json"

#: A second copy of all weights in the layout of another runtime, seen in some Hub folders.
_IGNORED = "consolidated.safetensors"

_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}

#: Every tensor of a VoiceChat checkpoint begins with one of these (checkpoint names after the known renames).
_KNOWN_PREFIXES = (
    "stt_model.embed_tokens.",
    "stt_model.function_head.",
    "stt_model.llm.",
    "stt_model.lm_head.",
    "stt_model.perception.",
    "stt_model.rnnt_decoder.",
    "stt_model.rnnt_joint.",
    "tts_model.audio_codec.",
    "tts_model.audio_prompt_latents.",
    "tts_model.codec_silence_tokens",
    "tts_model.control_codes",
    "tts_model.tts_model.",
)

# Conversions made with the language model's own (Hugging Face) names. Longer prefixes first.
_PREFIX_RENAMES = (
    ("stt_model.llm.backbone.embeddings.", "stt_model.embed_tokens."),
    ("stt_model.llm.backbone.", "stt_model.llm."),
    ("stt_model.backbone.embeddings.", "stt_model.embed_tokens."),
    ("stt_model.backbone.", "stt_model.llm."),
    ("backbone.embeddings.", "stt_model.embed_tokens."),
    ("backbone.", "stt_model.llm."),
    ("lm_head.", "stt_model.lm_head."),
    ("function_head.", "stt_model.function_head."),
    ("tts_model._control_codes", "tts_model.control_codes"),
)

_LSTM_PARTS = {"weight_ih": "Wx", "weight_hh": "Wh", "bias_ih": "bias", "bias_hh": "bias"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: its name in the file, dtype as safetensors spells it ("BF16"), shape and size in bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def shard_files(folder: Path) -> list[Path]:
    """The weight files of a folder: those its index names, else every ``*.safetensors`` but a consolidated copy.

    Raises ConfigError where there is none, or where the index names a file that is not there.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{index} is not a safetensors index: it needs a weight_map of names and files") from None
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ConfigError(f"{folder} lacks {few(absent)}, named by {INDEX_NAME}: the download is not complete")
        files = [folder / name for name in names]
    else:
        files = sorted(path for path in folder.glob("*.safetensors") if path.name != _IGNORED)
    if not files:
        raise ConfigError(f"{folder} holds no weights: expected *.safetensors files")
    return files


def list_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Name -> description of every tensor of the folder. Raises WeightsError for a damaged or cut file."""
    tensors: dict[str, TensorInfo] = {}
    for file in shard_files(folder):
        tensors.update(_read_header(file))
    return tensors


def runtime_name(name: str) -> str:
    """Name in the checkpoint -> name in the running model; names that are known already come back unchanged.

    Both biases of an LSTM layer get one name (they are summed).
    """
    for old, new in _PREFIX_RENAMES:
        if name.startswith(old):
            name = new + name[len(old) :]
            break
    name = name.replace(".prvq._variance_list.", ".prvq.variance_list.")
    stem, found, tail = name.partition(".dec_rnn.lstm.")
    part, split, layer = tail.rpartition("_l")
    if found and split and part in _LSTM_PARTS and layer.isdigit():
        name = f"{stem}.dec_rnn.lstm.{layer}.{_LSTM_PARTS[part]}"
    return name


def unclaimed_names(names: list[str]) -> list[str]:
    """Those checkpoint names that belong to no stage at all."""
    return sorted(name for name in names if not runtime_name(name).startswith(_KNOWN_PREFIXES))


def few(names: list[str], limit: int = 4) -> str:
    """ "a, b, c, d and 25 more"."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= size - 8:
                raise WeightsError(f"{file} is not a safetensors file, or only its beginning")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        found = {}
        end = 0
        for name, entry in header.items():
            begin, stop = entry["data_offsets"]
            end = max(end, stop)
            found[name] = TensorInfo(name, file, entry["dtype"], tuple(entry["shape"]), stop - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} has a damaged safetensors header: {error}") from None
    for info in found.values():
        item = _ITEM_BYTES.get(info.dtype, 1)
        if info.nbytes != item * math.prod(info.shape):
            raise WeightsError(f"{file} has a damaged safetensors header: {info.name} has {info.nbytes} bytes")
    if 8 + length + end > size:
        raise WeightsError(
            f"{file} is cut short: {size} bytes, its header promises {8 + length + end}; download it again"
        )
    return found
