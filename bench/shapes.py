"""Checkpoint folders without weights: the sizes of a model, a tokenizer of as many tokens, and nothing to download.

``tiny``: the embedded checkpoint's sizes. ``mini``: what a CPU can speak with in real time. ``11b``: the public model's.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

from vcpipe.actors.defaults import DEFAULTS, fill_defaults
from vcpipe.bench.make_embedded import embedded_config, write_json, write_tokenizer
from vcpipe.schemas.errors import ConfigError

SHAPES = ("tiny", "mini", "11b")
BITS = (0, 4, 8)

_GROUP_SIZE = 64
#: Matrices of the language model's blocks that are packed, by the block's letter.
_PACKED = {"M": ("in_proj", "out_proj"), "-": ("up_proj", "down_proj"), "*": ("q_proj", "k_proj", "v_proj", "o_proj")}

_MINI_VOCABULARY, _MINI_PIECES = 1536, 160
_MINI: dict[str, Any] = {
    "text_config": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "hybrid_override_pattern": "M-M*-M-M*-",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 32,
        "n_groups": 2,
    },
    "audio_config": {
        "encoder": {"d_model": 160, "n_layers": 6, "n_heads": 4, "subsampling_conv_channels": 48},
        "decoder": {"pred_hidden": 160, "pred_rnn_layers": 1, "vocab_size": _MINI_PIECES},
        "joint": {"joint_hidden": 160, "encoder_hidden": 160, "pred_hidden": 160, "num_classes": _MINI_PIECES},
        "output_dim": 256,
    },
    "tts_config": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "sliding_window": 250,
        "latent_size": 64,
        "codebook_size": 256,
        "character_encoder": {
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        "mog_head": {"intermediate_size": 768, "low_rank": 16, "num_layers": 2, "num_predictions": 64},
    },
    "codec_config": {"base_channels": 32, "latent_dim": 64, "codebook_size": 256},
}


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
        config["quantization"] = packing_map(config["text_config"]["hybrid_override_pattern"], bits)
    write_json(folder / "config.json", config)


def shape_config(shape: str, vocabulary: int) -> dict[str, Any]:
    """The whole runtime config. ``vocabulary``: tokens of the tokenizer, all that ``tiny`` has."""
    if shape == "tiny":
        source = embedded_config(vocabulary)
    else:
        tokens, pieces = (
            (_MINI_VOCABULARY, _MINI_PIECES)
            if shape == "mini"
            else (DEFAULTS["text_config"]["vocab_size"], DEFAULTS["audio_config"]["joint"]["num_classes"])
        )
        source = json.loads(json.dumps(_MINI if shape == "mini" else {}))
        source.setdefault("text_config", {})["vocab_size"] = tokens
        source |= {"rnnt_vocabulary": [f"▁w{i}" for i in range(pieces)], "rnnt_blank_id": pieces}
    config = fill_defaults({**source, "model_type": "nemotron_voicechat", "vcpipe": {"random_weights": True}})
    config["text_config"]["model_type"] = "nemotron_h"
    del config["text_config"]["time_step_limit"]  # infinity, which strict JSON cannot say
    return config


def packing_map(pattern: str, bits: int) -> dict[str, Any]:
    """The config's ``quantization``: every matrix of the language model, as the public 4 and 8 bit folders have it."""
    packing = {"group_size": _GROUP_SIZE, "bits": bits}
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
