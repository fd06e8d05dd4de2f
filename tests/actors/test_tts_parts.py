"""Parts of the speech decoder, each against an independent computation."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from vcpipe.actors.tts.backbone import Backbone
from vcpipe.actors.tts.char_encoder import Spelling
from vcpipe.actors.tts.codebooks import Codebooks
from vcpipe.actors.tts.config import TtsConfig
from vcpipe.actors.tts.layers import GemmaNorm, prepare_layers, widen_linears
from vcpipe.actors.tts.mog import draw_component, keep_top_p
from vcpipe.actors.tts.rng import next_key, session_key
from vcpipe.schemas.errors import ConfigError


# ------------------------------------------------------------------------------------------------ configuration
def test_defaults_are_those_of_the_11b_checkpoint() -> None:
    config = TtsConfig.from_dict({"some_new_key": 1, "mog_head": {"another": 2}})
    assert config.codebooks_per_pass() == (1, 1, 3, 4, 22)
    assert [i for i in range(28) if config.window_of(i) is None] == [5, 11, 17, 23]
    assert config.window_of(0) == 7500


@pytest.mark.parametrize("quantizers", [1, 2, 8, 31, 64])
def test_every_codebook_is_fixed_once(quantizers: int) -> None:
    counts = TtsConfig(num_quantizers=quantizers).codebooks_per_pass()
    assert sum(counts) == quantizers and min(counts) > 0


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "at most 1, not 1.5"),
        ({"guidance_scale": 0}, "guidance_scale must be above 0"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, r"\(5\) must be a multiple .*\(2\)"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"character_encoder": {"head_dim": 3}}, "character_encoder.head_dim must be even"),
    ],
)
def test_impossible_settings_are_refused(values: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TtsConfig.from_dict(values)


# ------------------------------------------------------------------------------------------------ random numbers
@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, 2**64 - 1])
def test_the_key_of_a_session_draws_what_the_global_generator_draws(seed: int) -> None:
    shapes = [(1, 1, 24), (1, 1, 16), (3,), (2, 5)]
    mx.random.seed(seed)
    wanted = [np.array(draw(shape=shape)) for shape in shapes for draw in (mx.random.uniform, mx.random.normal)]
    state = session_key(seed)
    for i, values in enumerate(wanted):
        state, key = next_key(state)
        draw = (mx.random.uniform, mx.random.normal)[i % 2]
        np.testing.assert_array_equal(draw(shape=shapes[i // 2], key=key), values)


def nucleus(logits: np.ndarray, top_p: float) -> np.ndarray:
    """Which entries stay: from the most probable one down, until the mass passed has reached top_p. In float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    probabilities = weights / weights.sum()
    keep, mass = np.zeros(len(logits), bool), 0.0
    for index in np.argsort(-probabilities, kind="stable"):
        if mass >= top_p:
            break
        keep[index] = True
        mass += probabilities[index]
    return keep


@pytest.mark.parametrize("top_p", [1e-12, 0.1, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_top_p_keeps_the_nucleus(top_p: float, spread: float) -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        logits = rng.normal(0, spread, 24).astype(np.float32)
        kept = np.array(keep_top_p(mx.array(logits)[None, None], top_p))[0, 0]
        wanted = nucleus(logits, top_p)
        if top_p == 1.0:
            # In float32 the mass may round to 1 before the last entries; all that stays away is negligible.
            assert np.exp(logits - logits.max())[~np.isfinite(kept)].sum() < 1e-6
        else:
            np.testing.assert_array_equal(np.isfinite(kept), wanted)
        np.testing.assert_array_equal(kept[np.isfinite(kept)], logits[np.isfinite(kept)])


def test_top_p_compares_the_mass_above_strictly() -> None:
    logits = mx.log(mx.array([[[0.125, 0.5, 0.25, 0.125]]]))
    assert np.isfinite(keep_top_p(logits, 0.5)).tolist() == [[[False, True, False, False]]]
    assert np.isfinite(keep_top_p(logits, 0.51)).tolist() == [[[False, True, True, False]]]
    assert np.isfinite(keep_top_p(logits, 0.75)).tolist() == [[[False, True, True, False]]]
    # Of two equal entries the later one counts as the more probable.
    assert np.isfinite(keep_top_p(logits, 0.8)).tolist() == [[[False, True, True, True]]]


def test_components_are_drawn_by_their_probability_and_dropped_ones_never() -> None:
    probabilities = np.array([0.1, 0.2, 0.0, 0.7])
    logits = mx.broadcast_to(mx.log(mx.array(probabilities, mx.float32)), (20000, 4))
    drawn = np.array(draw_component(logits, session_key(8)))
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    assert shares[2] == 0
    np.testing.assert_allclose(shares, probabilities, atol=0.015)


# ------------------------------------------------------------------------------------------------ codebooks
def entries(dtype: mx.Dtype) -> mx.array:
    return mx.array(np.random.default_rng(3).normal(size=(5, 16, 8)), mx.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_code_sums_are_gathered_in_codebook_order(dtype: mx.Dtype) -> None:
    tables = np.array(entries(dtype).astype(mx.float32))
    codes = np.random.default_rng(5).integers(0, 17, (2, 9, 5))
    codes[0, 0] = 16
    wanted = np.zeros((2, 9, 8), np.float32)
    for q in range(5):
        wanted += np.concatenate([tables[q], np.zeros((1, 8), np.float32)])[codes[..., q]]
    np.testing.assert_array_equal(Codebooks(entries(dtype)).depth_sum(mx.array(codes)), wanted)


def test_the_nearest_entry_wins_and_of_equals_the_first() -> None:
    tables = np.array(entries(mx.float32))
    tables[2, 11] = tables[2, 4]
    codebooks = Codebooks(mx.array(tables))
    rng = np.random.default_rng(6)
    for residual in [*rng.normal(size=(30, 8)).astype(np.float32), tables[2, 11]]:
        for q in range(5):
            code, entry = codebooks.nearest(mx.array(residual)[None, None], q)
            distances = ((tables[q].astype(np.float64) - residual) ** 2).sum(-1)
            assert code.item() == int(distances.argmin())
            np.testing.assert_array_equal(np.array(entry)[0, 0], tables[q, code.item()])
    assert codebooks.nearest(mx.array(tables[2, 11])[None, None], 2)[0].item() == 4


# ------------------------------------------------------------------------------------------------ text
def test_spelling_ranks_single_characters_by_id() -> None:
    spelling = Spelling({"b": 9, "a": 30, "ab": 2, "<x>": 7, "Ġ": 4}, 4)
    assert [spelling(token_id) for token_id in (4, 9, 30, 2, 7, 1234)] == [[0], [1], [2], [2, 1], [], []]


# ------------------------------------------------------------------------------------------------ backbone
def randomised(module: nn.Module, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(1)
    module.update(
        tree_map(lambda p: mx.array(rng.normal(0, 0.2, p.shape), mx.float32).astype(dtype), module.parameters())
    )


@pytest.mark.parametrize("window", [20, 48, 400])
def test_steps_equal_one_call_over_all_positions_past_every_growth_and_rotation(window: int) -> None:
    config = TtsConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=window,
        sliding_window_pattern=3,
    )
    backbone = Backbone(config)
    randomised(backbone, mx.float32)
    prepare_layers(backbone)
    x = mx.array(np.random.default_rng(2).normal(size=(2, 270, 16)), mx.float32)
    at_once = x
    for layer in backbone.layers:
        at_once, _ = layer.prefill(at_once)
    at_once = np.array(backbone.norm(at_once))
    hidden, caches = backbone.prefill(x[:, :37])
    np.testing.assert_allclose(hidden, at_once[:, :37], atol=1e-4, rtol=0)
    steps = []
    for position in range(37, 270):
        caches = backbone.layout.make_room(caches, position)
        hidden, caches = backbone.step(x[:, position : position + 1], caches, backbone.layout.places(position))
        mx.eval(hidden, caches)
        steps.append(np.array(hidden))
    np.testing.assert_allclose(np.concatenate(steps, axis=1), at_once[:, 37:], atol=1e-4, rtol=0)
    assert [keys.shape[2] for keys, _ in caches] == [min(window, 512), min(window, 512), 512]


def test_buffers_double_and_stop_at_the_window() -> None:
    layout = Backbone(
        TtsConfig(hidden_size=8, num_hidden_layers=2, sliding_window=700, sliding_window_pattern=2)
    ).layout
    caches = layout.store([(mx.zeros((2, 1, 37, 4)), mx.zeros((2, 1, 37, 4)))] * 2)
    sizes = []
    for position in range(37, 1100):
        caches = layout.make_room(caches, position)
        size = tuple(keys.shape[2] for keys, _ in caches)
        if not sizes or sizes[-1] != size:
            sizes.append(size)
    assert sizes == [(256, 256), (512, 512), (700, 1024), (700, 2048)]
    assert all(after[1] == 2 * before[1] for before, after in pairwise(sizes))


def test_what_is_prepared_once_changes_no_bit() -> None:
    norm, linear = GemmaNorm(64, 1e-6), nn.Linear(64, 32)
    for module in (norm, linear):
        randomised(module, mx.bfloat16)
    x = mx.array(np.random.default_rng(7).normal(size=(2, 1, 64)), mx.float32)
    plain_norm, plain_linear = mx.fast.rms_norm(x, 1.0 + norm.weight, 1e-6), linear(x)
    norm.prepare()
    widen_linears(linear)
    np.testing.assert_array_equal(norm(x), plain_norm)
    np.testing.assert_array_equal(linear(x), plain_linear)
    assert linear.weight.dtype == linear.bias.dtype == mx.float32 and norm.weight.dtype == mx.bfloat16
