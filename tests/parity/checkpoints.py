"""Writes random small VoiceChat checkpoints in the layout of the public ones: NeMo's names, PyTorch's kernels.

A seed decides every size that may differ: block pattern, grouped heads, contexts, kernels, windows, codebooks, codec rates.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from parity.compare import TINY

#: Tokens of the tiny checkpoint's tokenizer, and its character table (256 characters and one for padding).
TOKENIZER_IDS, CHARACTERS = 384, 257
PAD, SILENCE, EOS = 12, 11, 2


@dataclass(frozen=True)
class Recipe:
    """What a checkpoint is made from. ``bits``: of the language model, 0 for none. ``changes``: over the random config."""

    seed: int
    bits: int = 0
    group_size: int = 64
    dtype: str = "bfloat16"
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return f"seed{self.seed}-{f'q{self.bits}' if self.bits else self.dtype}"


def write_checkpoint(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Fill ``folder`` with config, weights and tokenizer; returns the config."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(recipe.seed)
    config = random_config(rng)
    for path, value in recipe.changes:
        _set(config, path, value)
    weights = _public_layout(_random_weights(config, rng), config["codec_config"])
    arrays = {name: _stored(value, getattr(mx, recipe.dtype)) for name, value in weights.items()}
    if recipe.bits:
        _quantise(config, arrays, recipe)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(TINY / "bf16" / name, folder)
    return config


# ------------------------------------------------------------------------------------------------ config
def random_config(rng: np.random.Generator) -> dict[str, Any]:
    """A runtime config with random sizes on the 80 ms frame clock."""

    def pick(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    # Widths are multiples of 64, so that every matrix of the language model could be quantised.
    hidden = pick(64, 128)
    heads, kv_heads, head_dim = pick((4, 2, 16), (4, 4, 32), (8, 1, 8), (6, 3, 32), (5, 1, 64))
    mamba_heads, groups, mamba_dim = pick((8, 2, 8), (6, 3, 32), (4, 4, 16), (16, 1, 4))
    letters = list("M*-") + [pick("M", "M", "-", "*") for _ in range(rng.integers(1, 6))]
    encoder_heads = pick(1, 2, 4)
    d_model = encoder_heads * pick(8, 10, 12)
    pieces, pred_hidden = int(rng.integers(20, 50)), int(rng.integers(6, 24))
    tts_heads, tts_kv_heads = pick((2, 2), (4, 2), (4, 1), (3, 3), (6, 2))
    tts_width, quantizers, codebook = pick(24, 32, 40), pick(3, 8, 17, 31), pick(16, 32, 50)
    tts_layers, tts_pattern = pick((1, 1), (2, 1), (2, 2), (3, 2), (3, 3))  # the peer needs at least one global layer
    rates, multipliers = pick(
        ([7, 7, 9], [1, 2, 4]), ([9, 7, 7], [1, 3, 2]), ([21, 21], [1, 2]), ([3, 3, 7, 7], [1, 1, 2, 2])
    )
    return {
        "model_type": "nemotron_voicechat",
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "silence_token_id": SILENCE,
        "rnnt_blank_id": pieces,
        "input_sample_rate": 16000,
        "output_sample_rate": 22050,
        "frame_duration": 0.08,
        "function_channel_weight": pick(2.0, 1.5, 0.7),
        "speaker": "Aria",
        "rnnt_vocabulary": ["<unk>", "<en-US>", *(pick("▁", "") + chr(97 + k % 26) + str(k) for k in range(2, pieces))],
        "text_config": {
            "model_type": "nemotron_h",
            "vocab_size": TOKENIZER_IDS,
            "hidden_size": hidden,
            "intermediate_size": pick(64, 192),
            "num_hidden_layers": len(letters),
            "hybrid_override_pattern": "".join(rng.permutation(letters)),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "attention_bias": False,
            "mlp_bias": False,
            "use_bias": False,
            "mamba_num_heads": mamba_heads,
            "mamba_head_dim": mamba_dim,
            "mamba_proj_bias": False,
            "ssm_state_size": pick(8, 16, 32),
            "n_groups": groups,
            "conv_kernel": pick(2, 3, 4),
            "use_conv_bias": pick(True, False),
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 4096,
        },
        "audio_config": {
            "preprocessor": {"sample_rate": 16000, "normalize": "NA", "features": 128, "n_fft": 512},
            "encoder": {
                "feat_in": 128,
                "n_layers": pick(1, 2, 3),
                "d_model": d_model,
                "n_heads": encoder_heads,
                "ff_expansion_factor": pick(2, 4),
                "subsampling_conv_channels": pick(4, 8),
                "conv_kernel_size": pick(3, 5, 9),
                "causal_downsampling": True,
                "conv_context_size": "causal",
                "conv_norm_type": "layer_norm",
                "self_attention_model": "rel_pos",
                "att_context_style": "chunked_limited",
                "att_context_size": [[pick(2, 5, 8, 70), 0]],
                "use_bias": pick(False, True),
            },
            "decoder": {"pred_hidden": pred_hidden, "pred_rnn_layers": pick(1, 2, 3), "vocab_size": pieces},
            "joint": {
                "joint_hidden": int(rng.integers(8, 30)),
                "encoder_hidden": d_model,
                "pred_hidden": pred_hidden,
                "num_classes": pieces,
            },
            "output_dim": hidden,
            "max_symbols": pick(1, 3, 10),
        },
        "tts_config": {
            "hidden_size": tts_width,
            "intermediate_size": pick(32, 50),
            "num_hidden_layers": tts_layers,
            "num_attention_heads": tts_heads,
            "num_key_value_heads": tts_kv_heads,
            "head_dim": pick(8, 12),
            "sliding_window": pick(20, 37, 42, 60),
            "sliding_window_pattern": tts_pattern,
            "latent_size": pick(10, 16),
            "num_quantizers": quantizers,
            "codebook_size": codebook,
            "exponent": pick(2.0, 3.0),
            "num_iterations": pick(3, 8),
            "guidance_scale": pick(0.2, 1.0),
            "top_p": pick(0.5, 0.95, 1.0),
            "noise_scale": pick(0.001, 0.1),
            "character_encoder": {
                "hidden_size": tts_width,
                "intermediate_size": pick(20, 64),
                "num_hidden_layers": pick(1, 2),
                "num_attention_heads": 4,
                "num_key_value_heads": pick(1, 2, 4),
                "head_dim": pick(4, 8),
                "char_vocab_size": CHARACTERS,
            },
            "mog_head": {
                "intermediate_size": pick(32, 48),
                "low_rank": pick(1, 4),
                "min_log_std": pick(-4.0, -1.0),
                "num_layers": pick(1, 3),
                "num_predictions": pick(7, 24),
            },
        },
        "codec_config": {
            "sample_rate": 22050,
            "base_channels": pick(4, 6),
            "channel_multipliers": multipliers,
            "downsample_rates": rates,
            "blocks_per_stage": pick(1, 2, 3),
            "block_kernel_size": pick(3, 7),
            "latent_dim": pick(8, 12),
            "n_fft": pick(8, 16),
            "hop_length": 4,
            "num_quantizers": quantizers,
            "codebook_size": codebook,
        },
    }


def _set(config: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        config = config[section]
    config[key] = value


# ------------------------------------------------------------------------------------------------ weights
#: Part of a name -> mean and deviation; the first that fits wins, others are scaled by their fan-in. Chosen so that ids,
#: codes and pieces vary from frame to frame and no branch dominates.
_SPREADS = (
    ("residual_scale", 0.4, 0.0),
    ("fusion_audio_text.gate", 0.0, 0.7),
    ("A_log", 1.2, 0.5),
    ("dt_bias", -1.0, 0.5),
    ("mixer.D", 1.0, 0.2),
    ("variance", 1.0, 0.0),
    ("pos_bias", 0.0, 0.3),
    ("embed_subword.backbone.encoder.norm", 0.0, 0.15),
    ("Aria", 0.0, 0.8),
    ("bos_emb", 0.0, 0.7),
    ("null_emb", 0.0, 0.7),
    ("low_mat", 0.0, 0.8),
    ("mus_list", 0.0, 0.6),
    ("rvq_embs", 0.0, 0.5),
    ("embed", 0.0, 0.5),
    ("special_emb", 0.0, 0.5),
    ("cont_emb", 0.0, 0.5),
    ("_head.weight", 0.0, 0.3),
    ("bias", 0.0, 0.1),
)


def _random_weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Every parameter of the running model under its name there."""
    from mlx_vlm.models.nemotron_voicechat import Model, ModelConfig

    weights = {}
    for name, parameter in sorted(tree_flatten(Model(ModelConfig.from_dict(config)).parameters())):
        shape = parameter.shape
        if mx.issubdtype(parameter.dtype, mx.floating):
            weights[name] = _draw(name, shape, rng)
        elif name.endswith("special_flags"):
            weights[name] = np.eye(3, shape[0], dtype=np.int64).T @ np.array([0, 1, 2])
        elif name.endswith("is_continuation"):
            weights[name] = rng.integers(0, 2, shape)
        else:
            weights[name] = np.array(parameter).astype(np.int64)
    codebook = config["codec_config"]["codebook_size"]
    # Control codes that do occur, so that their replacement shows.
    weights["tts_model.control_codes"] = np.array([codebook, 3, 11])
    weights["tts_model.codec_silence_tokens"] = rng.integers(0, codebook, config["codec_config"]["num_quantizers"])
    _balance_ids(config, weights)
    return weights


def _draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(shape)
    mean_and_spread = next(((mean, spread) for part, mean, spread in _SPREADS if part in name), None)
    if "norm" in name and not name.endswith("bias"):
        # The speech decoder's norms store their weight less one.
        return 0.15 * noise + (0.0 if name.startswith("tts_model.tts_model.") else 1.0)
    if mean_and_spread is not None:
        mean, spread = mean_and_spread
        return mean + spread * noise
    return noise * 1.3 / math.sqrt(max(1, math.prod(shape[1:])))


def _balance_ids(config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    """Make PAD, EOS and blank frequent, but not all there is, and the codec's output no louder than it may be."""
    for head, gain in (("lm_head", 1.9), ("function_head", 2.6)):
        weights[f"stt_model.{head}.weight"][PAD] *= gain
        weights[f"stt_model.{head}.weight"][[EOS, SILENCE]] *= 1.7
    weights["stt_model.rnnt_joint.enc.weight"] *= 4.0
    weights["stt_model.rnnt_joint.pred.weight"] *= 4.0
    weights["stt_model.rnnt_joint.joint_net.2.bias"][config["rnnt_blank_id"]] += 5.0
    codec = config["codec_config"]
    last_layer = (codec["blocks_per_stage"] + 1) * len(codec["downsample_rates"])
    weights[f"tts_model.audio_codec.decoder.layers.{last_layer}.weight"] *= 0.15


# ------------------------------------------------------------------------------------------------ layout
def _public_layout(weights: dict[str, np.ndarray], codec: dict[str, Any]) -> dict[str, np.ndarray]:
    """Runtime names and MLX kernels -> NeMo's names and PyTorch's kernels, with the buffers nobody reads."""
    blocks, stages = codec["blocks_per_stage"] + 1, len(codec["downsample_rates"])
    upsamplings = {f"tts_model.audio_codec.decoder.layers.{blocks * stage}.weight" for stage in range(stages)}
    public: dict[str, np.ndarray] = {
        "stt_model.perception.preprocessor.featurizer.fb": np.zeros((1, 128, 257)),
        "stt_model.perception.preprocessor.featurizer.window": np.zeros(400),
    }
    for name, value in weights.items():
        stem, is_lstm, tail = name.partition(".dec_rnn.lstm.")
        if is_lstm:
            layer, part = tail.split(".")
            parts = {"Wx": {"weight_ih": 1.0}, "Wh": {"weight_hh": 1.0}, "bias": {"bias_ih": 0.25, "bias_hh": 0.75}}[
                part
            ]
            public.update({f"{stem}.dec_rnn.lstm.{kind}_l{layer}": value * share for kind, share in parts.items()})
            continue
        if name in upsamplings:
            value = value.transpose(2, 0, 1)
        elif value.ndim == 4:
            value = value.transpose(0, 3, 1, 2)
        elif value.ndim == 3 and name.endswith(".weight"):
            value = value.transpose(0, 2, 1)
        name = name.replace("tts_model.control_codes", "tts_model._control_codes")
        public[name.replace("prvq.variance_list.", "prvq._variance_list.")] = value
    return public


def _stored(value: np.ndarray, dtype: mx.Dtype) -> mx.array:
    if value.dtype.kind == "i":
        return mx.array(value)
    return mx.array(np.array(value, dtype=np.float32, order="C")).astype(dtype)


def _quantise(config: dict[str, Any], arrays: dict[str, mx.array], recipe: Recipe) -> None:
    """Pack the matrices of the language model, as the public 4- and 8-bit checkpoints do."""
    packing = {"group_size": recipe.group_size, "bits": recipe.bits}
    config["quantization"] = dict(packing)
    matrices = ("stt_model.embed_tokens.", "stt_model.lm_head.", "stt_model.function_head.", "stt_model.llm.")
    for name in [name for name in arrays if name.startswith(matrices) and name.endswith(".weight")]:
        if arrays[name].ndim == 2:
            path = name.removesuffix(".weight")
            arrays[name], arrays[f"{path}.scales"], arrays[f"{path}.biases"] = mx.quantize(arrays[name], **packing)
            config["quantization"][path] = dict(packing)
