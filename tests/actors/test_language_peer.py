"""Nemotron-H beside the peer's, on random tiny networks: same ids, and floats that differ in their last bits at most."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from vcpipe.actors.language.cache import Caches
from vcpipe.actors.language.config import LanguageConfig
from vcpipe.actors.language.model import LanguageModel
from vcpipe.actors.language.parameters import LanguageParameters

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
    our_config = LanguageConfig(
        **sizes,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=PAD,
        silence_token_id=11,
        function_channel_weight=2.0,
        default_system_prompt="",
    )
    ours = LanguageParameters(our_config)
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
    return peer, LanguageModel(our_config, ours)


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
@pytest.mark.usefixtures("uncompiled")  # compilation is tested elsewhere; here it would cost a kernel a size
def test_cached_steps(pattern, prompt, frames, options):
    peer, ours = make_pair(pattern, **options)
    rows = timeline(np.random.default_rng(5), peer, prompt, frames)
    theirs, mine = peer_caches(pattern), Caches.empty(ours.config, rows[0].dtype)
    previous = (PAD, PAD)
    for t, row in enumerate(rows):
        x = peer_fuse(peer, row, *previous)
        wanted = peer.llm(inputs_embeds=x, cache=theirs)
        ids, hidden = ours.step(row, mx.array(previous), mine)
        mx.eval(ids, hidden, mine.blocks, wanted)
        assert hidden.dtype == wanted.dtype
        np.testing.assert_allclose(np.array(hidden.astype(mx.float32)), np.array(wanted.astype(mx.float32)), atol=1e-4)
        if t < prompt:
            continue
        previous = tuple(ids.tolist())
        assert previous == tuple(int(mx.argmax(head(wanted)[:, -1])) for head in (peer.lm_head, peer.function_head))
    buffers = [block[0] for letter, block in zip(pattern, mine.blocks, strict=True) if letter == "*"]
    references = [cache for cache in theirs if hasattr(cache, "keys")]
    for buffer, reference in zip(buffers, references, strict=True):
        assert buffer.dtype == reference.keys.dtype
        held = mx.concatenate([reference.keys, reference.values], axis=1)
        filled = (slice(None), slice(None), slice(mine.length))
        assert mx.allclose(buffer[filled], held[filled], rtol=1e-2)  # one bit of bfloat16 either way


@pytest.mark.parametrize("positions", [1, 2, 40, 300])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_all_positions_at_once(positions, dtype):
    peer, ours = make_pair("M-*M", dtype=dtype)
    x = mx.array(np.random.default_rng(positions).normal(size=(1, positions, SIZES["hidden_size"])).astype(np.float32))
    ids, hidden = ours.over_history(x)
    wanted = peer.llm(inputs_embeds=x)[:, -1:]
    np.testing.assert_allclose(np.array(hidden), np.array(wanted), atol=1e-4)
    assert ids.tolist() == [int(mx.argmax(head(wanted)[:, -1])) for head in (peer.lm_head, peer.function_head)]
