"""Writes the embedded checkpoint: the whole architecture in miniature, with random weights.

    python -m vcpipe.bench.make_embedded [--out FOLDER]

It runs everywhere without a download: a smoke test of processes, clock and sound output. Its frame clock, codec rates, 31
codebooks and token ids are those of the 11B checkpoint, so every message has its real size in samples and codes; what it
hears and says means nothing. The layout is that of the public MLX folders (NeMo names, PyTorch kernels, bfloat16).
The same script gives the same files.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from vcpipe.actors.checkpoint import read_config, resolve_checkpoint
from vcpipe.actors.stage import StageConfig
from vcpipe.bench.embedded_shapes import tensor_shapes
from vcpipe.schemas.geometry import STAGES

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "launch" / "embedded"

_SEED = 80
_SPECIALS = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, 32))]
_PAD, _BOS, _EOS = 12, 1, 2

#: Endings of tensors that are looked up or added as they are, not multiplied.
_EMBEDDINGS = (
    *("embed_tokens.weight", "prediction.embed.weight", "cont_emb.weight", "special_emb.weight", "rvq_embs"),
    *("bos_emb", "null_emb", "Aria", ".gate", "low_mat"),
)

#: Words that get a token of their own, so that what the model writes looks like words.
_TEXT = (
    "a about after all also and answer any are ask at be because but by can could day do each first for from go good have "
    "hear hello here how I if in is it just know let like listen little long make maybe me more my next no not now of on one "
    "open or our out please quiet right say see she so some soon speak still sure talk tell thank that the then there they "
    "think this time to today two up very voice wait want we well what when where will wind with word work yes you your"
)
_WORDS = _TEXT.split()

#: Pieces of the transcript: whole words and a few endings.
_PIECES = ["<unk>", *("▁" + word for word in _WORDS[: 56 - 1]), "s", "ed", "ing", "er", "ly", "n't", ".", "?"]


# ------------------------------------------------------------------------------------------------ config
def embedded_config(vocab_size: int) -> dict[str, Any]:
    """The runtime config; what it leaves out has the value of the 11B checkpoint."""
    return {
        "model_type": "nemotron_voicechat",
        "architectures": ["NemotronVoiceChatForConditionalGeneration"],
        "vcpipe": {"random_weights": True},
        "text_config": {
            "model_type": "nemotron_h",
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 8,
            "hybrid_override_pattern": "M-M-*-M-",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "attention_bias": False,
            "mlp_bias": False,
            "use_bias": False,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "mamba_proj_bias": False,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 131072,
        },
        "audio_config": {
            "preprocessor": {
                "sample_rate": 16000,
                "normalize": "NA",
                "window_size": 0.025,
                "window_stride": 0.01,
                "window": "hann",
                "features": 128,
                "n_fft": 512,
            },
            "encoder": {
                "feat_in": 128,
                "n_layers": 2,
                "d_model": 48,
                "n_heads": 4,
                "ff_expansion_factor": 4,
                "subsampling_factor": 8,
                "subsampling_conv_channels": 12,
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
            "decoder": {"pred_hidden": 24, "pred_rnn_layers": 2, "vocab_size": len(_PIECES), "blank_as_pad": True},
            "joint": {
                "joint_hidden": 32,
                "activation": "relu",
                "encoder_hidden": 48,
                "pred_hidden": 24,
                "num_classes": len(_PIECES),
            },
            "output_dim": 64,
            "max_symbols": 2,
        },
        "tts_config": {
            "hidden_size": 48,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "sliding_window": 750,
            "sliding_window_pattern": 2,
            "latent_size": 24,
            "num_quantizers": 31,
            "codebook_size": 64,
            "character_encoder": {
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_hidden_layers": 1,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
                "head_dim": 16,
            },
            "mog_head": {"intermediate_size": 96, "low_rank": 4, "num_layers": 3, "num_predictions": 32},
        },
        "codec_config": {
            "sample_rate": 22050,
            "base_channels": 12,
            "channel_multipliers": [1, 2, 4],
            "downsample_rates": [7, 7, 9],
            "blocks_per_stage": 3,
            "block_kernel_size": 7,
            "latent_dim": 24,
            "n_fft": 16,
            "hop_length": 4,
            "num_quantizers": 31,
            "codebook_size": 64,
        },
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
        "pad_token_id": _PAD,
        "silence_token_id": 11,
        "rnnt_blank_id": len(_PIECES),
        "input_sample_rate": 16000,
        "output_sample_rate": 22050,
        "frame_duration": 0.08,
        "function_channel_weight": 2.0,
        "speaker": "Aria",
        "rnnt_vocabulary": _PIECES,
    }


# ------------------------------------------------------------------------------------------------ tokenizer
def write_tokenizer(folder: Path) -> dict[str, int]:
    """A byte-level BPE with one token for every word of :data:`_WORDS` (with its space); returns token -> id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate([*_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges = []
    for word in _WORDS:
        spelled = "Ġ"
        for letter in word:
            if spelled + letter not in vocab:
                merges.append((spelled, letter))
                vocab[spelled + letter] = len(vocab)
            spelled += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = names | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "special_tokens_map.json", names)
    return vocab


# ------------------------------------------------------------------------------------------------ weights
def random_weights(config: dict[str, Any], vocab: dict[str, int]) -> dict[str, np.ndarray]:
    """Name -> float32 or int32 array. Scaled so that activations stay near 1 through every network."""
    rng = np.random.default_rng(_SEED)
    arrays = {name: _draw(name, shape, rng) for name, shape in tensor_shapes(config).items()}
    _favour_silence(arrays, vocab)
    _quieten_codec(arrays, config["codec_config"])
    _fill_tables(arrays, vocab, config)
    return arrays


def _draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    noise = np.asarray(rng.standard_normal(shape), np.float32)
    last = name.rpartition(".")[2]
    is_offset_norm = name.startswith("tts_model.tts_model.") and ("norm" in name or "mlp_stack.3" in name)
    if "norm" in name and not is_offset_norm:
        return 0.1 * noise + (last != "bias")
    if last == "A_log":
        return np.log(1 + 7 * rng.random(shape)).astype(np.float32)
    if last == "dt_bias":
        return noise / 2 - 1
    if last in ("D", "variance"):
        return np.ones(shape, np.float32)
    if is_offset_norm or last.startswith("bias") or last == "residual_scale":
        return 0.1 * noise
    if name.endswith(_EMBEDDINGS) or "pos_bias" in last:
        return noise / 2
    if ".mus_list." in name:
        return noise * 0.6 * 0.92 ** int(last)
    # Linears and kernels: variance 1 / fan-in. The codec's upsampling kernels are (inputs, outputs, k), one tap an output.
    fan_in = shape[0] if _is_upsampling(name) else max(1, math.prod(shape[1:]))
    return noise * (1.2 / math.sqrt(fan_in))


def _is_upsampling(name: str) -> bool:
    return name in tuple(f"tts_model.audio_codec.decoder.layers.{i}.weight" for i in (0, 4, 8))


def _favour_silence(arrays: dict[str, np.ndarray], vocab: dict[str, int]) -> None:
    """Let PAD win most frames of both channels and whole words win most of the rest; blank most RNN-T steps."""
    embed = arrays["stt_model.embed_tokens.weight"]
    words = [vocab["Ġ" + word] for word in _WORDS]
    for name, pad_gain in (("lm_head", 0.32), ("function_head", 0.7)):
        head = arrays[f"stt_model.{name}.weight"]
        quiet = np.full(len(head), 0.3, np.float32)
        quiet[words] = 1.0
        head *= quiet[:, None]
        # The residual stream carries 2 or 3 times PAD's embedding whenever the last frame was silent.
        head[_PAD] = pad_gain * embed[_PAD]
    arrays["stt_model.perception.proj.weight"] *= 0.9
    # Blank is likely, but how likely depends on what is heard.
    arrays["stt_model.rnnt_joint.enc.weight"] *= 6
    arrays["stt_model.rnnt_joint.joint_net.2.bias"][-1] += 8


def _quieten_codec(arrays: dict[str, np.ndarray], codec: dict[str, Any]) -> None:
    """Soft noise instead of loud: a constant channel before the last layer holds the magnitudes down."""
    layers = len(codec["downsample_rates"]) * (codec["blocks_per_stage"] + 1)
    last = arrays[f"tts_model.audio_codec.decoder.layers.{layers}.weight"]
    bins = codec["n_fft"] // 2 + 1
    arrays[f"tts_model.audio_codec.decoder.layers.{layers - 1}.pwconv2.bias"][0] = 40.0
    last[:bins] *= 0.2
    last[:bins, 0] = -0.11


def _fill_tables(arrays: dict[str, np.ndarray], vocab: dict[str, int], config: dict[str, Any]) -> None:
    """Flag tables (their length is that of the 11B vocabulary), control codes and a place for the silence codes."""
    subword = "tts_model.tts_model.embed_subword."
    continuation = np.zeros(131073, np.int32)
    for token, token_id in vocab.items():
        continuation[token_id] = not token.startswith(("Ġ", "<"))
    special = np.zeros(131072, np.int32)
    special[_BOS], special[_EOS] = 1, 2
    arrays[subword + "subword_flag_emb.is_continuation"] = continuation
    arrays[subword + "subword_flag_emb.pad_tensor"] = np.array(131072, np.int32)
    arrays[subword + "bos_eos_emb.special_flags"] = special
    arrays[subword + "bos_eos_emb.pad_tensor"] = np.array(131071, np.int32)
    codes = config["tts_config"]["codebook_size"]
    arrays["tts_model._control_codes"] = np.array([codes + 2, codes + 1, codes], np.int32)
    arrays["tts_model.codec_silence_tokens"] = np.zeros(config["tts_config"]["num_quantizers"], np.int32)


# ------------------------------------------------------------------------------------------------ files
def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    import mlx.core as mx  # here, so that measurements may take config and tokenizer without MLX

    stored = {
        name: mx.array(value) if value.dtype == np.int32 else mx.array(value).astype(mx.bfloat16)
        for name, value in arrays.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), stored, metadata={"format": "mlx"})


def load_stage(name: str, folder: Path) -> Any:
    """The stage as its actor would load it."""
    actor = importlib.import_module(f"vcpipe.actors.{name}.actor")
    return actor.load(StageConfig(name, folder, device="cpu"), lambda step, fraction: None)


def make(folder: Path) -> None:
    """Write the checkpoint into ``folder``, replacing what is there, and load every stage of it once."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    vocab = write_tokenizer(folder)
    config = embedded_config(len(vocab))
    write_json(folder / "config.json", config)
    arrays = random_weights(read_config(folder), vocab)
    write_weights(folder, arrays)
    # Silence is what the codec itself makes of zeros, as in the 11B checkpoint: its most frequent frame.
    frames, counts = np.unique(load_stage("codec", folder).prompt_codes, axis=0, return_counts=True)
    arrays["tts_model.codec_silence_tokens"] = frames[counts.argmax()].astype(np.int32)
    write_weights(folder, arrays)
    resolve_checkpoint(str(folder))
    for name in STAGES:
        stage = load_stage(name, folder)
        if stage.warnings:
            raise SystemExit("\n".join(stage.warnings))
        stage.warm_up()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the embedded checkpoint with random weights.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to replace (default: launch/embedded)")
    out = parser.parse_args().out
    make(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {size / 1e6:.2f} MB, every stage loads")


if __name__ == "__main__":
    main()
