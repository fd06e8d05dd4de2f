"""The runtime config of VoiceChat: its keys with the 11B model's values, and what every config must fulfil. No MLX."""

from __future__ import annotations

import math
from typing import Any

from vcpipe.schemas.errors import ConfigError

MODEL_TYPE = "nemotron_voicechat"

_PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"

#: Names of blocks in configs that spell them out -> letters of the pattern.
_BLOCK_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-"}
_LETTERS = "M (Mamba-2), * (attention), - (MLP)"

_SPEAKERS = ("Aria",)

#: Sizes that two networks share.
_EQUAL = (
    ("audio_config.output_dim", "text_config.hidden_size"),
    ("audio_config.preprocessor.features", "audio_config.encoder.feat_in"),
    ("audio_config.decoder.pred_hidden", "audio_config.joint.pred_hidden"),
    ("audio_config.decoder.vocab_size", "audio_config.joint.num_classes"),
    ("audio_config.encoder.d_model", "audio_config.joint.encoder_hidden"),
    ("tts_config.num_quantizers", "codec_config.num_quantizers"),
    ("tts_config.codebook_size", "codec_config.codebook_size"),
)

#: Every key vcpipe reads. A value's type is the accepted type; None accepts anything.
DEFAULTS: dict[str, Any] = {
    "model_type": MODEL_TYPE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 12,
    "silence_token_id": 11,
    "rnnt_blank_id": 1024,
    "input_sample_rate": 16000,
    "output_sample_rate": 22050,
    "frame_duration": 0.08,
    "function_channel_weight": 2.0,
    "default_system_prompt": "",
    "speaker": "Aria",
    "rnnt_vocabulary": [],
    "quantization": None,
    "text_config": {
        "vocab_size": 131072,
        "hidden_size": 4480,
        "intermediate_size": 15680,
        "num_hidden_layers": len(_PATTERN),
        "hybrid_override_pattern": _PATTERN,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "mamba_proj_bias": False,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 131072,
        "time_step_limit": [0.0, math.inf],
    },
    "audio_config": {
        "preprocessor": {
            "sample_rate": 16000,
            "features": 128,
            "n_fft": 512,
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "normalize": "NA",
            "preemph": 0.97,
            "log_zero_guard_value": 2.0**-24,
            "pad_to": 0,
            "pad_value": 0.0,
        },
        "encoder": {
            "feat_in": 128,
            "n_layers": 24,
            "d_model": 1024,
            "n_heads": 8,
            "ff_expansion_factor": 4,
            "subsampling_factor": 8,
            "subsampling_conv_channels": 256,
            "conv_kernel_size": 9,
            "causal_downsampling": True,
            "conv_context_size": "causal",
            "conv_norm_type": "layer_norm",
            "self_attention_model": "rel_pos",
            "att_context_style": "chunked_limited",
            "att_context_size": [[70, 0]],
            "pos_emb_max_len": 5000,
            "use_bias": False,
            "xscaling": False,
        },
        "decoder": {"pred_hidden": 640, "pred_rnn_layers": 2, "vocab_size": 1024, "blank_as_pad": True},
        "joint": {
            "joint_hidden": 640,
            "activation": "relu",
            "encoder_hidden": 1024,
            "pred_hidden": 640,
            "num_classes": 1024,
        },
        "output_dim": 4480,
        "max_symbols": 10,
    },
    "tts_config": {
        "hidden_size": 1152,
        "intermediate_size": 4608,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
        "sliding_window": 7500,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256.0,
        "rope_global_base_freq": 1e6,
        "rope_local_base_freq": 1e4,
        "latent_size": 512,
        "num_quantizers": 31,
        "codebook_size": 1024,
        "exponent": 3.0,
        "num_iterations": 8,
        "guidance_scale": 0.2,
        "top_p": 0.95,
        "noise_scale": 0.001,
        "character_encoder": {
            "hidden_size": 1152,
            "intermediate_size": 4608,
            "num_hidden_layers": 1,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 72,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256.0,
            "attn_logit_softcapping": 50.0,
            "rope_base": 1e4,
            "char_vocab_size": 257,
        },
        "mog_head": {
            "intermediate_size": 4608,
            "low_rank": 64,
            "min_log_std": -4.0,
            "num_layers": 3,
            "num_predictions": 1024,
            "eps": 1e-6,
        },
    },
    "codec_config": {
        "sample_rate": 22050,
        "base_channels": 384,
        "channel_multipliers": [1, 2, 4],
        "downsample_rates": [7, 7, 9],
        "blocks_per_stage": 3,
        "block_kernel_size": 7,
        "latent_dim": 512,
        "n_fft": 16,
        "hop_length": 4,
        "num_quantizers": 31,
        "codebook_size": 1024,
    },
}

_TEXT_ALIASES = {
    "mamba_state_dim": "ssm_state_size",
    "mamba_num_groups": "n_groups",
    "rms_norm_eps": "layer_norm_epsilon",
}


def fill_defaults(source: dict[str, Any]) -> dict[str, Any]:
    """``source`` with every missing key filled in and alternative spellings made one; ConfigError for wrong types."""
    source = dict(source)
    source["quantization"] = source.get("quantization") or source.pop("quantization_config", None)
    source["text_config"] = _one_spelling(_section(source, "text_config"))
    audio = dict(_section(source, "audio_config"))
    encoder = dict(_section(audio, "encoder", "audio_config."))
    context = encoder.get("att_context_size")
    if isinstance(context, list) and context and isinstance(context[0], int):
        encoder["att_context_size"] = [context]
    audio["encoder"] = encoder
    source["audio_config"] = audio
    config = _merge(source, DEFAULTS, "")
    if source.get("rnnt_blank_id") is None:
        config["rnnt_blank_id"] = config["audio_config"]["joint"]["num_classes"]
    return config


def check_config(config: dict[str, Any]) -> None:
    """Raises ConfigError where parts of a filled config contradict each other or ask for what vcpipe cannot do."""
    if config["speaker"] not in _SPEAKERS:
        raise ConfigError(f"speaker {config['speaker']!r} is unknown; accepted: {', '.join(_SPEAKERS)}")
    _check_pattern(config["text_config"]["hybrid_override_pattern"])
    _check_input_clock(config)
    _check_output_clock(config)
    _check_widths(config)
    _check_quantization(config["quantization"])


# ------------------------------------------------------------------------------------------------ filling in
def _section(source: dict[str, Any], key: str, path: str = "") -> dict[str, Any]:
    value = source.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"config: {path}{key} must be an object, not {value!r}")
    return value


def _merge(source: dict[str, Any], defaults: dict[str, Any], path: str) -> dict[str, Any]:
    merged = dict(source)
    for key, default in defaults.items():
        if isinstance(default, dict):
            merged[key] = _merge(_section(source, key, path), default, f"{path}{key}.")
        elif source.get(key) is None:
            merged[key] = list(default) if isinstance(default, list) else default
        else:
            merged[key] = _checked_value(source[key], default, path + key)
    return merged


def _checked_value(value: Any, default: Any, path: str) -> Any:
    if default is None:
        return value
    wanted = type(default)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted is float and number:
        return float(value)
    if wanted is int and number and value == int(value):
        return int(value)
    if wanted is not int and type(value) is wanted:
        return value
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list"}
    raise ConfigError(f"config: {path} must be {words[wanted]}, not {value!r}")


def _one_spelling(text: dict[str, Any]) -> dict[str, Any]:
    text = dict(text)
    for other, name in _TEXT_ALIASES.items():
        if text.get(name) is None and text.get(other) is not None:
            text[name] = text[other]
    pattern = text.get("hybrid_override_pattern")
    blocks = text.get("layers_block_type")
    if pattern is None and isinstance(blocks, list):
        pattern = [_BLOCK_LETTERS.get(str(block), str(block)) for block in blocks]
    if isinstance(pattern, list):
        _check_pattern(pattern)
        pattern = "".join(pattern)
    if pattern is not None:
        text["hybrid_override_pattern"] = pattern
        text["num_hidden_layers"] = len(pattern)
    limit = text.get("time_step_limit")
    if limit is not None:
        text["time_step_limit"] = _time_step_limit(limit)
    return text


def _time_step_limit(limit: Any) -> list[float]:
    try:
        low, high = (float(value) for value in limit)
    except (TypeError, ValueError):
        raise ConfigError(f"config: text_config.time_step_limit must be two numbers, not {limit!r}") from None
    if not low <= high:
        raise ConfigError(f"config: text_config.time_step_limit must rise, not {limit!r}")
    return [low, high]


# ------------------------------------------------------------------------------------------------ checks
def _check_pattern(pattern: str | list[str]) -> None:
    if not pattern:
        raise ConfigError(f"config: text_config.hybrid_override_pattern is empty; accepted letters: {_LETTERS}")
    for position, letter in enumerate(pattern):
        if letter not in ("M", "*", "-"):
            raise ConfigError(
                f"config: block {position} of text_config.hybrid_override_pattern is {letter!r}; accepted: {_LETTERS}"
            )


def _check_input_clock(config: dict[str, Any]) -> None:
    frontend, encoder = config["audio_config"]["preprocessor"], config["audio_config"]["encoder"]
    rate, duration = config["input_sample_rate"], config["frame_duration"]
    if duration <= 0 or rate <= 0:
        raise ConfigError(f"config: input_sample_rate {rate} and frame_duration {duration} must be positive")
    if frontend["sample_rate"] != rate:
        raise ConfigError(
            f"config: input_sample_rate is {rate} Hz, audio_config.preprocessor.sample_rate {frontend['sample_rate']} Hz; "
            "they must be equal"
        )
    samples = int(frontend["window_stride"] * rate) * encoder["subsampling_factor"]
    if samples != round(rate * duration):
        raise ConfigError(
            f"config: one encoder frame takes {samples} samples (window_stride {frontend['window_stride']} s * {rate} Hz "
            f"* subsampling_factor {encoder['subsampling_factor']}), one frame of {duration} s has "
            f"{round(rate * duration)}; they must be equal"
        )
    for pair in encoder["att_context_size"]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(size) is int for size in pair)):
            raise ConfigError(f"config: audio_config.encoder.att_context_size must be pairs of integers, not {pair!r}")
    if not encoder["att_context_size"] or encoder["att_context_size"][0][1] != 0:
        raise ConfigError(
            f"config: audio_config.encoder.att_context_size is {encoder['att_context_size']}; the first pair must look at "
            "no later frame, as [70, 0] does"
        )


def _check_output_clock(config: dict[str, Any]) -> None:
    codec = config["codec_config"]
    rate, duration = config["output_sample_rate"], config["frame_duration"]
    if codec["sample_rate"] != rate:
        raise ConfigError(
            f"config: output_sample_rate is {rate} Hz, codec_config.sample_rate {codec['sample_rate']} Hz; "
            "they must be equal"
        )
    rates = codec["downsample_rates"]
    if not rates or not all(type(factor) is int and factor > 0 for factor in rates):
        raise ConfigError(f"config: codec_config.downsample_rates must be positive integers, not {rates!r}")
    if len(codec["channel_multipliers"]) != len(rates):
        raise ConfigError("config: codec_config.channel_multipliers and downsample_rates must have the same length")
    samples = math.prod(rates) * codec["hop_length"]
    if abs(rate * duration - samples) > 1e-6:
        raise ConfigError(
            f"config: the codec makes {samples} samples of one frame (hop_length {codec['hop_length']} * "
            f"downsample_rates {rates}), but {duration} s at {rate} Hz are {rate * duration:g}; they must be equal"
        )


def _check_widths(config: dict[str, Any]) -> None:
    for left, right in _EQUAL:
        value, other = _lookup(config, left), _lookup(config, right)
        if value != other:
            raise ConfigError(f"config: {left} is {value} and {right} is {other}; they must be equal")


def _lookup(config: dict[str, Any], path: str) -> Any:
    for key in path.split("."):
        config = config[key]
    return config


def _check_quantization(block: Any) -> None:
    """{"bits", "group_size", module path: {"bits", "group_size"} or false}; None for a checkpoint without."""
    if block is None:
        return
    if not isinstance(block, dict):
        raise ConfigError(f"config: quantization must be an object, not {block!r}")
    entries = {key: value for key, value in block.items() if isinstance(value, dict)}
    for path, entry in [("quantization", block), *entries.items()]:
        mode = entry.get("mode", "affine")
        if mode != "affine":
            raise ConfigError(f"config: {path} is quantised with mode {mode!r}; accepted: affine")
        for key, accepted in (("bits", (2, 3, 4, 5, 6, 8)), ("group_size", (32, 64, 128))):
            value = entry.get(key, block.get(key))
            if value not in accepted:
                raise ConfigError(f"config: {path} has {key} {value!r}; accepted: {', '.join(map(str, accepted))}")
