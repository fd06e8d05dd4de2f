"""Sizes of the embedded checkpoint: the published architecture with 31 codebooks and its frame clock, everything else small."""

from __future__ import annotations

from typing import Any

PAD, BOS, EOS, SILENCE = 12, 1, 2, 11
PROMPT_FRAMES = 37

CODEBOOKS, CODES, LATENT = 31, 128, 64

#: The sound of a reply lies this many frames after its text, so that the speech decoder hears a word before it speaks it.
SPEECH_DELAY = 2


def mini_config(vocabulary: int, pieces: list[str]) -> dict[str, Any]:
    """The runtime config for a tokenizer of ``vocabulary`` ids and the transcript's ``pieces``.

    What it leaves out has the value of the 11B checkpoint.
    """
    return {
        "model_type": "nemotron_voicechat",
        "architectures": ["NemotronVoiceChatForConditionalGeneration"],
        "text_config": _language(vocabulary),
        "audio_config": _perception(len(pieces), output=_language(vocabulary)["hidden_size"]),
        "tts_config": _speech(),
        "codec_config": _codec(),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "silence_token_id": SILENCE,
        "rnnt_blank_id": len(pieces),
        "input_sample_rate": 16000,
        "output_sample_rate": 22050,
        "frame_duration": 0.08,
        "function_channel_weight": 2.0,
        "speaker": "Aria",
        "rnnt_vocabulary": pieces,
    }


def _language(vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "nemotron_h",
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 416,
        "num_hidden_layers": 10,
        "hybrid_override_pattern": "M-M*-M-M*-",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 32,
        "n_groups": 2,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "mamba_proj_bias": False,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 131072,
    }


def _perception(pieces: int, output: int) -> dict[str, Any]:
    width, joint = 160, 160
    return {
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
            "n_layers": 6,
            "d_model": width,
            "n_heads": 4,
            "ff_expansion_factor": 4,
            "subsampling_factor": 8,
            "subsampling_conv_channels": 40,
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
        "decoder": {"pred_hidden": joint, "pred_rnn_layers": 1, "vocab_size": pieces, "blank_as_pad": True},
        "joint": {
            "joint_hidden": joint,
            "activation": "relu",
            "encoder_hidden": width,
            "pred_hidden": joint,
            "num_classes": pieces,
        },
        "output_dim": output,
        "max_symbols": 10,
    }


def _speech() -> dict[str, Any]:
    width, heads = 192, 4
    attention = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width // heads}
    return {
        "hidden_size": width,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        **attention,
        # Layers see 20 seconds back. The last is global (i + 1 divides by the pattern); it is trained not to attend.
        "sliding_window": 250,
        "sliding_window_pattern": 6,
        "latent_size": LATENT,
        "num_quantizers": CODEBOOKS,
        "codebook_size": CODES,
        "guidance_scale": 0.5,
        "top_p": 1.0,
        "noise_scale": 0.001,
        "num_delay_speech_tokens": SPEECH_DELAY,
        "character_encoder": {
            "hidden_size": width,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            **attention,
        },
        "mog_head": {"intermediate_size": 384, "low_rank": 16, "num_layers": 2, "num_predictions": 64},
    }


def _codec() -> dict[str, Any]:
    return {
        "sample_rate": 22050,
        "base_channels": 36,
        "channel_multipliers": [1, 3, 6],
        "downsample_rates": [7, 7, 9],
        "blocks_per_stage": 2,
        "block_kernel_size": 7,
        "latent_dim": LATENT,
        "n_fft": 16,
        "hop_length": 4,
        "num_quantizers": CODEBOOKS,
        "codebook_size": CODES,
    }
