"""The whole architecture in miniature: sizes and a tokenizer that make every part run in moments, for tests and measurements.

Frame clock, codec rates, 31 codebooks and token ids are those of the 11B checkpoint, so every message has its real size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vcpipe.bench.folders import write_json

_SPECIALS = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, 32))]

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
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
        "audio_config": {
            "encoder": {"n_layers": 2, "d_model": 48, "n_heads": 4, "subsampling_conv_channels": 12},
            "decoder": {"pred_hidden": 24, "vocab_size": len(_PIECES)},
            "joint": {"joint_hidden": 32, "encoder_hidden": 48, "pred_hidden": 24, "num_classes": len(_PIECES)},
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
            "codebook_size": 64,
            "character_encoder": {
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
                "head_dim": 16,
            },
            "mog_head": {"intermediate_size": 96, "low_rank": 4, "num_predictions": 32},
        },
        "codec_config": {"base_channels": 12, "latent_dim": 24, "codebook_size": 64},
        "rnnt_blank_id": len(_PIECES),
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
