"""NeMo training configs made from runtime configs, so that reading them can be tested."""

from __future__ import annotations

import copy
from typing import Any


def nemo_config(runtime: dict[str, Any]) -> dict[str, Any]:
    """The NeMo config that says the same as a runtime config."""
    audio, tts, codec = (copy.deepcopy(runtime[key]) for key in ("audio_config", "tts_config", "codec_config"))
    encoder = audio["encoder"] | {
        "_target_": "nemo.Encoder",
        "att_context_size": audio["encoder"]["att_context_size"][0],
    }
    joint, decoder = audio["joint"], audio["decoder"]
    tts_keys = ("latent_size", "num_quantizers", "codebook_size", "exponent")
    return {
        "text_config": runtime["text_config"],
        "data": {
            "source_sample_rate": runtime["input_sample_rate"],
            "target_sample_rate": runtime["output_sample_rate"],
            "frame_length": runtime["frame_duration"],
        },
        "model": {
            "stt": {
                "model": {
                    "perception": {
                        "preprocessor": audio["preprocessor"] | {"_target_": "nemo.Frontend"},
                        "encoder": encoder,
                        "output_dim": audio["output_dim"],
                    },
                    "duplex_function_channel_weight": runtime["function_channel_weight"],
                }
            },
            "speech_generation": {
                "model": {
                    "tts_config": {
                        "backbone_config": {key: value for key, value in tts.items() if key not in tts_keys},
                        **{key: tts[key] for key in tts_keys},
                        "cas_config": {"backbone_config": {"encoder": tts["character_encoder"]}},
                        "mog_head_config": tts["mog_head"],
                    },
                    "codec_config": {
                        "base_hidden_size": codec["base_channels"],
                        "channel_mult": codec["channel_multipliers"],
                        "rates": codec["downsample_rates"],
                        "num_blocks": codec["blocks_per_stage"],
                        "kernel_size": codec["block_kernel_size"],
                        "latent_size": codec["latent_dim"],
                        **{key: codec[key] for key in ("n_fft", "hop_length", "num_quantizers", "codebook_size")},
                    },
                    "inference_guidance_scale": tts["guidance_scale"],
                    "inference_top_p_or_k": tts["top_p"],
                    "inference_noise_scale": tts["noise_scale"],
                },
                "data": {"target_sample_rate": codec["sample_rate"], "audio_prompt_duration": 3.0},
            },
        },
        "_rnnt_merge_info": {
            "decoder_config": {
                "prednet": {key: decoder[key] for key in ("pred_hidden", "pred_rnn_layers")},
                "vocab_size": decoder["vocab_size"],
            },
            "joint_config": {
                "jointnet": {key: value for key, value in joint.items() if key != "num_classes"},
                "num_classes": joint["num_classes"],
                "vocabulary": runtime["rnnt_vocabulary"],
            },
        },
    }
