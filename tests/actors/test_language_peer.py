"""Nemotron-H beside the peer's, on random tiny networks: same floats bit for bit on the CPU, same ids."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from vcpipe.actors.language.config import LanguageConfig
from vcpipe.actors.language.nemotron_h import LanguageModel

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # the peer's own
]

PAD = 12
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "time_step_limit": (0.0, float("inf")),
}


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    """The peer takes another kernel on Metal, whose last bits differ."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


def make_pair(
    pattern: str, *, bits: int = 0, dtype: mx.Dtype = mx.bfloat16, **sizes
) -> tuple[nn.Module, LanguageModel]:
    """The peer's network and ours with the same random weights."""
    config = pytest.importorskip("mlx_vlm.models.nemotron_h.config")
    language = pytest.importorskip("mlx_vlm.models.nemotron_h.language")
    sizes = SIZES | {"hybrid_override_pattern": pattern} | sizes
    ours = LanguageModel(
        LanguageConfig(
            **sizes,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=PAD,
            silence_token_id=11,
            function_channel_weight=2.0,
            default_system_prompt="",
        )
    )
    rng = np.random.default_rng(len(pattern) + bits)
    weights = []
    for name, value in tree_flatten(ours.parameters()):
        scale = 1.0 if name.endswith(("A_log", "dt_bias", "D")) or value.ndim == 1 else 0.15
        weights.append((name, mx.array(rng.normal(size=value.shape) * scale).astype(dtype)))

    peer = nn.Module()
    peer.embed_tokens = nn.Embedding(sizes["vocab_size"], sizes["hidden_size"])
    peer.llm = language.NemotronHModel(
        config.ModelConfig.from_dict(
            sizes
            | {
                "model_type": "nemotron_h",
                "num_hidden_layers": len(pattern),
                "use_bias": False,
                "max_position_embeddings": 4096,
            }
        ),
        with_embeddings=False,
    )
    peer.lm_head = nn.Linear(sizes["hidden_size"], sizes["vocab_size"], bias=False)
    peer.function_head = nn.Linear(sizes["hidden_size"], sizes["vocab_size"], bias=False)
    for model in (peer, ours):
        model.update(tree_unflatten(weights))
        if bits:
            nn.quantize(model, group_size=64, bits=bits, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    assert dict(tree_flatten(peer.parameters())).keys() == dict(tree_flatten(ours.parameters())).keys()
    return peer, ours


def peer_caches(pattern: str) -> list:
    caches = pytest.importorskip("mlx_vlm.models.cache")
    return [caches.ArraysCache(size=2) if letter == "M" else caches.KVCache() for letter in pattern if letter != "-"]


def peer_fuse(peer: nn.Module, row: mx.array, text_id: int, function_id: int) -> mx.array:
    embed = peer.embed_tokens
    return embed(mx.array([[text_id]])) + row + 2.0 * embed(mx.array([[function_id]]))


def timeline(rng: np.random.Generator, peer: nn.Module, prompt: int, frames: int) -> list[mx.array]:
    """Rows of the audio channel: prompt embeddings, then float32 audio, each (1, 1, hidden)."""
    embedded = peer.embed_tokens(mx.array(rng.integers(0, SIZES["vocab_size"], (1, prompt)))) if prompt else None
    audio = mx.array(rng.normal(size=(frames, 1, 1, SIZES["hidden_size"])).astype(np.float32))
    return [embedded[:, t : t + 1] for t in range(prompt)] + list(audio)


@pytest.mark.parametrize(
    ("pattern", "prompt", "frames", "options"),
    [
        ("M-*M-*M-", 7, 30, {"num_key_value_heads": 1, "n_groups": 1}),
        ("*-MM", 0, 30, {"num_key_value_heads": 4, "n_groups": 8, "conv_kernel": 2, "use_conv_bias": False}),
        ("-M*", 3, 30, {"bits": 4, "mlp_bias": True, "time_step_limit": (0.01, 0.5)}),
        ("MM*-*", 0, 30, {"bits": 8, "head_dim": 32, "mamba_head_dim": 24, "n_groups": 4}),
        ("M*-M", 5, 30, {"dtype": mx.float32, "attention_bias": True}),
        ("M*-", 20, 300, {}),  # a bfloat16 prompt, float32 keys rounded behind it, growth in between
        ("*", 260, 270, {}),  # the prompt itself outgrows the first buffer; the second growth widens it
    ],
)
def test_cached_steps(pattern, prompt, frames, options):
    peer, ours = make_pair(pattern, **options)
    theirs, mine = peer_caches(pattern), ours.llm.empty_caches()
    previous = (PAD, PAD)
    for t, row in enumerate(timeline(np.random.default_rng(5), peer, prompt, frames)):
        x = peer_fuse(peer, row, *previous)
        assert mx.array_equal(ours.fuse(row, *previous), x)
        wanted = peer.llm(inputs_embeds=x, cache=theirs)
        hidden, mine = ours.llm.step(x, mine)
        mx.eval(hidden, mine, wanted)
        assert hidden.dtype == wanted.dtype
        assert mx.array_equal(hidden, wanted), f"position {t}"
        if t < prompt:
            continue
        previous = tuple(ours.next_ids(hidden).tolist())
        assert previous == tuple(int(mx.argmax(head(wanted)[:, -1])) for head in (peer.lm_head, peer.function_head))
    mine, theirs = ([cache for cache in caches if hasattr(cache, "keys")] for caches in (mine, theirs))
    for kv, reference in zip(mine, theirs, strict=True):
        assert kv.keys.dtype == reference.keys.dtype
        assert kv.keys.shape == reference.keys.shape


@pytest.mark.parametrize("positions", [1, 2, 40, 300])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_all_positions_at_once(positions, dtype):
    peer, ours = make_pair("M-*M")
    x = mx.array(np.random.default_rng(positions).normal(size=(1, positions, SIZES["hidden_size"]))).astype(dtype)
    assert mx.array_equal(ours.llm(x), peer.llm(inputs_embeds=x))
