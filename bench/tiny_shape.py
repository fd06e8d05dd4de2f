"""The whole architecture in miniature: sizes and a tokenizer that make every part run in moments, for tests and measurements.

Frame clock, codec rates, 31 codebooks and token ids are those of the 11B checkpoint, so every message has its real size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vcpipe.bench.folders import write_json

_SPECIALS = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, 32))]
_PAD, _BOS, _EOS = 12, 1, 2

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
def tiny_config(vocab_size: int) -> dict[str, Any]:
    """The runtime config; what it leaves out has the value of the 11B checkpoint."""
    return {
        "model_type": "nemotron_voicechat",
        "architectures": ["NemotronVoiceChatForConditionalGeneration"],
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
