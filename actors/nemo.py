"""NeMo's training config of VoiceChat -> the runtime config. No MLX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vcpipe.actors.defaults import MODEL_TYPE
from vcpipe.schemas.errors import ConfigError

_BACKBONE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
)

_TTS_KEYS = ("latent_size", "num_quantizers", "codebook_size", "exponent")

#: Runtime name -> NeMo name.
_CODEC_KEYS = {
    "base_channels": "base_hidden_size",
    "channel_multipliers": "channel_mult",
    "downsample_rates": "rates",
    "blocks_per_stage": "num_blocks",
    "block_kernel_size": "kernel_size",
    "latent_dim": "latent_size",
    "n_fft": "n_fft",
    "hop_length": "hop_length",
    "num_quantizers": "num_quantizers",
    "codebook_size": "codebook_size",
}


def is_nemo(config: dict[str, Any]) -> bool:
    """Whether a config.json is NeMo's, told by its two models."""
    model = config.get("model")
    return isinstance(model, dict) and "stt" in model and "speech_generation" in model


def from_nemo(source: dict[str, Any]) -> dict[str, Any]:
    """The runtime config (without defaults) of a NeMo config. Raises ConfigError naming the missing path.

    The language model's own sizes are not part of a NeMo config: they are those of its base model, the defaults, unless
    a ``text_config`` was put into the file. The token ids are constants of the model.
    """
    tree = _Tree(source)
    stt = "model.stt.model"
    speech = "model.speech_generation"
    tts = f"{speech}.model.tts_config"
    joint = "_rnnt_merge_info.joint_config"
    decoder = "_rnnt_merge_info.decoder_config"
    tts_config: dict[str, Any] = {key: tree[f"{tts}.backbone_config.{key}"] for key in _BACKBONE_KEYS}
    tts_config |= {key: tree[f"{tts}.{key}"] for key in _TTS_KEYS}
    tts_config |= {
        "character_encoder": tree[f"{tts}.cas_config.backbone_config.encoder"],
        "mog_head": tree[f"{tts}.mog_head_config"],
        "guidance_scale": tree[f"{speech}.model.inference_guidance_scale"],
        "top_p": tree[f"{speech}.model.inference_top_p_or_k"],
        "noise_scale": tree[f"{speech}.model.inference_noise_scale"],
    }
    codec = f"{speech}.model.codec_config"
    codec_config = {name: tree[f"{codec}.{nemo_name}"] for name, nemo_name in _CODEC_KEYS.items()}
    codec_config["sample_rate"] = tree[f"{speech}.data.target_sample_rate"]
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["NemotronVoiceChatForConditionalGeneration"],
        "text_config": source.get("text_config"),
        "audio_config": {
            "preprocessor": _without_target(tree[f"{stt}.perception.preprocessor"]),
            "encoder": _without_target(tree[f"{stt}.perception.encoder"]),
            "decoder": {
                **tree[f"{decoder}.prednet"],
                "vocab_size": tree[f"{decoder}.vocab_size"],
                "blank_as_pad": tree.get(f"{decoder}.blank_as_pad", True),
            },
            "joint": {**tree[f"{joint}.jointnet"], "num_classes": tree[f"{joint}.num_classes"]},
            "output_dim": tree[f"{stt}.perception.output_dim"],
        },
        "tts_config": tts_config,
        "codec_config": codec_config,
        "input_sample_rate": tree["data.source_sample_rate"],
        "output_sample_rate": tree["data.target_sample_rate"],
        "frame_duration": tree["data.frame_length"],
        "function_channel_weight": tree[f"{stt}.duplex_function_channel_weight"],
        "rnnt_vocabulary": tree.get(f"{joint}.vocabulary", None),
        "quantization": _flat_quantization(tree.get("mlx_conversion.quantization", None)),
    }


def read_vocabulary(folder: Path) -> list[str]:
    """RNN-T pieces of ``rnnt_tokenizer/vocab.json`` (a list, or a map of pieces to ids); [] where there is none."""
    path = folder / "rnnt_tokenizer" / "vocab.json"
    if not path.is_file():
        return []
    try:
        pieces = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(pieces, dict):
            pieces = sorted(pieces, key=lambda piece: int(pieces[piece]))
        return [str(piece) for piece in pieces]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} must be a list of pieces or a map of pieces to ids: {error}") from None


class _Tree:
    """Looks up dotted paths in nested dictionaries."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root

    def __getitem__(self, path: str) -> Any:
        value = self.get(path, None)
        if value is None:
            raise ConfigError(f"the NeMo config has no {path}")
        return value

    def get(self, path: str, default: Any) -> Any:
        node: Any = self._root
        for key in path.split("."):
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return node


def _without_target(section: dict[str, Any]) -> dict[str, Any]:
    """Drop the name of the Python class that NeMo builds from a section."""
    return {key: value for key, value in section.items() if key != "_target_"}


def _flat_quantization(block: dict[str, Any] | None) -> dict[str, Any] | None:
    """{"bits", "group_size", "modules": {path: entry}} -> one flat map."""
    if not block:
        return None
    flat = {key: block[key] for key in ("group_size", "bits") if key in block}
    return {**flat, **(block.get("modules") or {})}
