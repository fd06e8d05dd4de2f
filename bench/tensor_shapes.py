"""Names and shapes of every tensor of a VoiceChat checkpoint, as a function of its config.

NeMo names and PyTorch kernel layouts: conv (out, in, k...), transposed conv (in, out, k).
"""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: dict[str, Any]) -> Shapes:
    """All float tensors of a checkpoint with this runtime config (integer tables are not drawn from random numbers)."""
    shapes: Shapes = {}
    shapes |= _under("stt_model.", _language(config["text_config"]))
    shapes |= _under("stt_model.", _perception(config["audio_config"]))
    shapes |= _under("tts_model.tts_model.", _speech_decoder(config["tts_config"]))
    shapes["tts_model.audio_prompt_latents.Aria"] = (1, 37, config["tts_config"]["hidden_size"])
    shapes |= _under("tts_model.audio_codec.", _codec(config["codec_config"]))
    return shapes


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    return shapes | {f"{name}.bias": (outputs,)} if bias else shapes


def _norm(name: str, width: int, *, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (width,)}
    return shapes | {f"{name}.bias": (width,)} if bias else shapes


# ------------------------------------------------------------------------------------------------ language
def _language(text: dict[str, Any]) -> Shapes:
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    shapes = _norm("llm.norm_f", hidden)
    for name in ("embed_tokens", "lm_head", "function_head"):
        shapes |= _linear(name, vocab, hidden)
    mixers = {"M": _mamba(text), "-": _feed_forward(text), "*": _attention(text)}
    for layer, letter in enumerate(text["hybrid_override_pattern"]):
        shapes |= _norm(f"llm.layers.{layer}.norm", hidden)
        shapes |= _under(f"llm.layers.{layer}.mixer.", mixers[letter])
    return shapes


def _mamba(text: dict[str, Any]) -> Shapes:
    heads = text["mamba_num_heads"]
    inner = heads * text["mamba_head_dim"]
    channels = inner + 2 * text["n_groups"] * text["ssm_state_size"]
    return {
        **_linear("in_proj", inner + channels + heads, text["hidden_size"]),
        "conv1d.weight": (channels, 1, text["conv_kernel"]),
        "conv1d.bias": (channels,),
        **dict.fromkeys(("dt_bias", "A_log", "D"), (heads,)),
        **_norm("norm", inner),
        **_linear("out_proj", text["hidden_size"], inner),
    }


def _feed_forward(text: dict[str, Any]) -> Shapes:
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    return _linear("up_proj", inner, hidden) | _linear("down_proj", hidden, inner)


def _attention(text: dict[str, Any]) -> Shapes:
    hidden = text["hidden_size"]
    queries, keys = (text[key] * text["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    return {
        **_linear("q_proj", queries, hidden),
        **_linear("k_proj", keys, hidden),
        **_linear("v_proj", keys, hidden),
        **_linear("o_proj", hidden, queries),
    }


# ------------------------------------------------------------------------------------------------ perception
def _perception(audio: dict[str, Any]) -> Shapes:
    frontend, encoder, decoder, joint = (audio[key] for key in ("preprocessor", "encoder", "decoder", "joint"))
    width, features = encoder["d_model"], frontend["features"]
    shapes = _under("perception.encoder.pre_encode.", _subsampling(encoder, features))
    for layer in range(encoder["n_layers"]):
        shapes |= _under(f"perception.encoder.layers.{layer}.", _conformer(encoder))
    shapes |= _linear("perception.proj", audio["output_dim"], width, bias=True)
    # NeMo stores its mel filters and window; nothing reads them.
    shapes["perception.preprocessor.featurizer.fb"] = (1, features, frontend["n_fft"] // 2 + 1)
    shapes["perception.preprocessor.featurizer.window"] = (int(frontend["window_size"] * frontend["sample_rate"]),)
    hidden, classes = decoder["pred_hidden"], joint["num_classes"] + 1
    shapes |= _linear("rnnt_decoder.prediction.embed", decoder["vocab_size"] + 1, hidden)
    for layer in range(decoder["pred_rnn_layers"]):
        for part in ("ih", "hh"):
            shapes[f"rnnt_decoder.prediction.dec_rnn.lstm.weight_{part}_l{layer}"] = (4 * hidden, hidden)
            shapes[f"rnnt_decoder.prediction.dec_rnn.lstm.bias_{part}_l{layer}"] = (4 * hidden,)
    shapes |= _linear("rnnt_joint.enc", joint["joint_hidden"], joint["encoder_hidden"], bias=True)
    shapes |= _linear("rnnt_joint.pred", joint["joint_hidden"], joint["pred_hidden"], bias=True)
    return shapes | _linear("rnnt_joint.joint_net.2", classes, joint["joint_hidden"], bias=True)


def _subsampling(encoder: dict[str, Any], features: int) -> Shapes:
    channels = encoder["subsampling_conv_channels"]
    shapes: Shapes = {"conv.0.weight": (channels, 1, 3, 3)}
    for depthwise, pointwise in ((2, 3), (5, 6)):
        shapes[f"conv.{depthwise}.weight"] = (channels, 1, 3, 3)
        shapes[f"conv.{pointwise}.weight"] = (channels, channels, 1, 1)
    shapes |= {name.replace("weight", "bias"): (channels,) for name in list(shapes)}
    for _ in range(3):
        features = features // 2 + 1
    return shapes | _linear("out", encoder["d_model"], channels * features, bias=True)


def _conformer(encoder: dict[str, Any]) -> Shapes:
    width, heads = encoder["d_model"], encoder["n_heads"]
    inner = width * encoder["ff_expansion_factor"]
    shapes: Shapes = {
        "conv.pointwise_conv1.weight": (2 * width, width, 1),
        "conv.depthwise_conv.weight": (width, 1, encoder["conv_kernel_size"]),
        "conv.pointwise_conv2.weight": (width, width, 1),
        "self_attn.pos_bias_u": (heads, width // heads),
        "self_attn.pos_bias_v": (heads, width // heads),
    }
    for name in ("feed_forward1", "self_att", "conv", "feed_forward2", "out"):
        shapes |= _norm(f"norm_{name}", width, bias=True)
    shapes |= _norm("conv.batch_norm", width, bias=True)
    for name in ("feed_forward1", "feed_forward2"):
        shapes |= _linear(f"{name}.linear1", inner, width) | _linear(f"{name}.linear2", width, inner)
    for name in ("q", "k", "v", "out", "pos"):
        shapes |= _linear(f"self_attn.linear_{name}", width, width)
    return shapes


# ------------------------------------------------------------------------------------------------ speech decoder
def _gated_mlp(name: str, hidden: int, inner: int) -> Shapes:
    return {
        **_linear(f"{name}.gate_proj", inner, hidden),
        **_linear(f"{name}.up_proj", inner, hidden),
        **_linear(f"{name}.down_proj", hidden, inner),
    }


def _gemma_attention(sizes: dict[str, Any]) -> Shapes:
    hidden, queries = sizes["hidden_size"], sizes["num_attention_heads"] * sizes["head_dim"]
    keys = sizes["num_key_value_heads"] * sizes["head_dim"]
    return {
        **_linear("self_attn.q_proj", queries, hidden),
        **_linear("self_attn.k_proj", keys, hidden),
        **_linear("self_attn.v_proj", keys, hidden),
        **_linear("self_attn.o_proj", hidden, queries),
    }


def _speech_decoder(tts: dict[str, Any]) -> Shapes:
    hidden, latent = tts["hidden_size"], tts["latent_size"]
    shapes: Shapes = {
        "bos_emb": (hidden,),
        "null_emb": (hidden,),
        "audio_prompt_projection_W": (hidden, hidden),
        "rvq_embs": (tts["num_quantizers"], tts["codebook_size"], latent),
        **_linear("embed_code", hidden, latent),
        **_norm("backbone.norm", hidden),
    }
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    layer = _gemma_attention(tts) | _gated_mlp("mlp", hidden, tts["intermediate_size"])
    layer |= _norm("self_attn.q_norm", tts["head_dim"]) | _norm("self_attn.k_norm", tts["head_dim"])
    for name in norms:
        layer |= _norm(name, hidden)
    for i in range(tts["num_hidden_layers"]):
        shapes |= _under(f"backbone.layers.{i}.", layer)
    shapes |= _under("embed_subword.", _character_encoder(tts["character_encoder"], hidden))
    for name in ("audio_proj", "text_proj"):
        shapes |= _linear(f"gated_fusion_audio_text.{name}", hidden, hidden, bias=True)
    shapes |= _norm("gated_fusion_audio_text.final_norm", hidden)
    shapes |= {"gated_fusion_audio_text.gate": (hidden,), "gated_fusion_audio_text.residual_scale": ()}
    return shapes | _under("mog_head.", _mixture(tts["mog_head"], hidden, latent))


def _character_encoder(sizes: dict[str, Any], hidden: int) -> Shapes:
    width = sizes["hidden_size"]
    shapes: Shapes = {
        "embed_tokens.weight": (sizes["char_vocab_size"], width),
        "subword_flag_emb.cont_emb.weight": (2, hidden),
        "bos_eos_emb.special_emb.weight": (3, hidden),
        **_linear("proj_embedding", hidden, width),
        **_norm("backbone.encoder.norm", width),
    }
    layer = _gemma_attention(sizes) | _gated_mlp("mlp", width, sizes["intermediate_size"])
    for name in ("self_attn", "feedforward"):
        layer |= _norm(f"pre_{name}_layernorm", width) | _norm(f"post_{name}_layernorm", width)
    for i in range(sizes["num_hidden_layers"]):
        shapes |= _under(f"backbone.encoder.layers.{i}.", layer)
    return shapes


def _mixture(mog: dict[str, Any], hidden: int, latent: int) -> Shapes:
    predictions, rank = mog["num_predictions"], mog["low_rank"]
    shapes: Shapes = {
        "low_mat": (predictions, latent, rank),
        f"mlp_stack.{mog['num_layers']}.weight": (hidden,),
        **_linear("proj_logits", predictions, hidden),
        **_linear("proj_mus", predictions * rank, hidden),
        **_linear("proj_logs", 1, hidden),
        **_linear("proj_else", latent, hidden),
    }
    for i in range(mog["num_layers"]):
        shapes |= _norm(f"mlp_stack.{i}.pre_norm", hidden) | _norm(f"mlp_stack.{i}.post_norm", hidden)
        shapes |= _gated_mlp(f"mlp_stack.{i}.mlp", hidden, mog["intermediate_size"])
    return shapes


# ------------------------------------------------------------------------------------------------ codec
def _codec(codec: dict[str, Any]) -> Shapes:
    latent, spectrum = codec["latent_dim"], 2 * (codec["n_fft"] // 2 + 1)
    widths = [codec["base_channels"] * multiplier for multiplier in codec["channel_multipliers"]]
    rates, blocks = codec["downsample_rates"], codec["blocks_per_stage"]
    shapes: Shapes = {"encoder.layers.0.weight": (widths[0], spectrum, 1)}
    for stage, (width, rate) in enumerate(zip(widths, rates, strict=True)):
        first = stage * (blocks + 1) + 1
        for i in range(first, first + blocks):
            shapes |= _under(f"encoder.layers.{i}.", _convnext(width, codec["block_kernel_size"]))
        following = [*widths, latent][stage + 1]
        shapes[f"encoder.layers.{first + blocks}.weight"] = (following, width, rate)
    incoming = latent
    for stage, (width, rate) in enumerate(zip(reversed(widths), reversed(rates), strict=True)):
        first = stage * (blocks + 1)
        shapes[f"decoder.layers.{first}.weight"] = (incoming, width, rate)
        for i in range(first + 1, first + 1 + blocks):
            shapes |= _under(f"decoder.layers.{i}.", _convnext(width, codec["block_kernel_size"]))
        incoming = width
    shapes[f"decoder.layers.{len(rates) * (blocks + 1)}.weight"] = (spectrum, widths[0], 1)
    for i in range(codec["num_quantizers"]):
        shapes[f"prvq.mus_list.{i}"] = (codec["codebook_size"], latent)
        shapes[f"prvq._variance_list.{i}.variance"] = ()
    return shapes


def _convnext(width: int, kernel: int) -> Shapes:
    return {
        "dwconv.weight": (width, 1, kernel),
        "dwconv.bias": (width,),
        **_norm("norm", width, bias=True),
        "pwconv1.weight": (4 * width, width, 1),
        "pwconv1.bias": (4 * width,),
        "pwconv2.weight": (width, 4 * width, 1),
        "pwconv2.bias": (width,),
    }
