"""Checkpoint folders without weights: the sizes of a model, a tokenizer of as many tokens, and nothing to download.

``tiny``: the whole architecture in miniature. ``mini``: the embedded checkpoint's sizes. ``11b``: the public model's.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

from vcpipe.actors.defaults import DEFAULTS, fill_defaults
from vcpipe.bench.folders import write_json
from vcpipe.bench.mini.shape import mini_config
from vcpipe.bench.tiny_shape import tiny_config, write_tokenizer
from vcpipe.schemas.errors import ConfigError

SHAPES = ("tiny", "mini", "11b")
BITS = (0, 4, 8)

#: Columns that share a scale where a matrix is packed; as in the public folders, but for one that is too narrow for it.
_GROUP_SIZES = {"tiny": 64, "mini": 32, "11b": 64}
#: Matrices of the language model's blocks that are packed, by the block's letter.
_PACKED = {"M": ("in_proj", "out_proj"), "-": ("up_proj", "down_proj"), "*": ("q_proj", "k_proj", "v_proj", "o_proj")}

#: Tokens and pieces of the embedded checkpoint, whose words do not matter here.
_MINI_VOCABULARY, _MINI_PIECES = 1060, 256


def write_checkpoint(folder: Path, shape: str, bits: int) -> None:
    """Write config.json and tokenizer.json for one of :data:`SHAPES`, its language model packed to ``bits`` (0: not)."""
    if shape not in SHAPES:
        raise ConfigError(f"shape {shape!r} is unknown; accepted: {', '.join(SHAPES)}")
    if bits not in BITS:
        raise ConfigError(f"the language model cannot have {bits} bits; accepted: {', '.join(map(str, BITS))} (0: all)")
    vocabulary = write_tokenizer(folder)
    config = shape_config(shape, len(vocabulary))
    _pad_tokenizer(folder / "tokenizer.json", config["text_config"]["vocab_size"])
    if bits:
        config["quantization"] = packing_map(
            config["text_config"]["hybrid_override_pattern"], bits, _GROUP_SIZES[shape]
        )
    write_json(folder / "config.json", config)


def shape_config(shape: str, vocabulary: int) -> dict[str, Any]:
    """The whole runtime config. ``vocabulary``: tokens of the tokenizer, all that ``tiny`` has."""
    if shape == "tiny":
        source = tiny_config(vocabulary)
    elif shape == "mini":
        source = mini_config(_MINI_VOCABULARY, _pieces(_MINI_PIECES))
    else:
        pieces = DEFAULTS["audio_config"]["joint"]["num_classes"]
        source = {"rnnt_vocabulary": _pieces(pieces), "rnnt_blank_id": pieces}
        source["text_config"] = {"vocab_size": DEFAULTS["text_config"]["vocab_size"]}
    config = fill_defaults({**source, "model_type": "nemotron_voicechat", "vcpipe": {"random_weights": True}})
    config["text_config"]["model_type"] = "nemotron_h"
    del config["text_config"]["time_step_limit"]  # infinity, which strict JSON cannot say
    return config


def _pieces(count: int) -> list[str]:
    return [f"▁w{i}" for i in range(count)]


def packing_map(pattern: str, bits: int, group_size: int) -> dict[str, Any]:
    """The config's ``quantization``: every matrix of the language model, as the public 4 and 8 bit folders have it."""
    packing = {"group_size": group_size, "bits": bits}
    names = ["embed_tokens", "lm_head", "function_head"]
    names += [f"llm.layers.{i}.mixer.{name}" for i, letter in enumerate(pattern) for name in _PACKED[letter]]
    return packing | {f"stt_model.{name}": dict(packing) for name in names}


def _pad_tokenizer(path: Path, size: int) -> None:
    """Add words of five letters, which no text is split into, until there are ``size`` tokens."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    words = ("Ġ" + "".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=5))
    while len(vocabulary) < size:
        vocabulary.setdefault(next(words), len(vocabulary))
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
