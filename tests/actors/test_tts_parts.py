"""Parts of the speech decoder, each against an independent computation."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from vcpipe.actors.product import Activation, product
from vcpipe.actors.tts.backbone import Backbone
from vcpipe.actors.tts.cache import CacheLayout
from vcpipe.actors.tts.char_encoder import Spelling
from vcpipe.actors.tts.codebooks import Codebooks, depth_sum
from vcpipe.actors.tts.config import TtsConfig
from vcpipe.actors.tts.layers import GatedMlp, GemmaNorm, StackedMlp, dense_weight, prepare_layers
from vcpipe.actors.tts.mog import draw_component, gumbel_max, keep_top_p
from vcpipe.actors.tts.rng import next_key, session_key
from vcpipe.schemas.errors import ConfigError


# ------------------------------------------------------------------------------------------------ configuration
def test_defaults_are_those_of_the_11b_checkpoint() -> None:
    config = TtsConfig.from_dict({"some_new_key": 1, "mog_head": {"another": 2}})
    assert config.codebooks_per_pass() == (1, 1, 3, 4, 22)
    assert [i for i, window in enumerate(config.windows()) if window is None] == [5, 11, 17, 23]
    assert config.windows()[0] == 7500
    assert set(config.windows(history=3000)) == {3000} and set(config.windows(history=9000)) == {7500, 9000}


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
    uniform = mx.random.uniform(shape=logits.shape, key=session_key(8))
    drawn = np.array(gumbel_max(logits, uniform))[:, 0]
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    assert shares[2] == 0
    np.testing.assert_allclose(shares, probabilities, atol=0.015)
    assert all(draw_component(logits[:1, None], 0.6, numbers).item() == 3 for numbers in uniform[:20])


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
    np.testing.assert_array_equal(depth_sum(entries(dtype), mx.array(codes)), wanted)


def test_the_nearest_entry_wins_and_of_equals_the_first() -> None:
    tables = np.array(entries(mx.float32))
    tables[2, 11] = tables[2, 4]
    codebooks = Codebooks(mx.array(tables))
    rng = np.random.default_rng(6)
    for residual in [*rng.normal(size=(30, 8)).astype(np.float32), tables[2, 11]]:
        for q in range(5):
            choice = codebooks.choose(codebooks.begin(mx.array(residual)[None, None], None), q, 1)
            distances = ((tables[q].astype(np.float64) - residual) ** 2).sum(-1)
            code = int(distances.argmin())
            assert np.array(codebooks.codes_of(choice)).tolist() == [[[code * (column == q) for column in range(5)]]]
            np.testing.assert_array_equal(np.array(codebooks.sum_of(choice))[0, 0], tables[q, code])
    choice = codebooks.choose(codebooks.begin(mx.array(tables[2, 11])[None, None], None), 2, 1)
    assert codebooks.codes_of(choice)[0, 0, 2] == 4


def test_a_choice_takes_what_is_chosen_off_what_is_left() -> None:
    tables = np.array(entries(mx.float32))
    codebooks = Codebooks(mx.array(tables))
    first, second = np.random.default_rng(9).normal(size=(2, 8)).astype(np.float32)
    choice, codes, total, left = codebooks.begin(mx.array(first)[None, None], None), [], np.zeros(8, np.float32), first
    for q in range(5):
        if q == 2:  # the next pass has a residual of its own and keeps what was chosen
            choice, left = codebooks.begin(mx.array(second)[None, None], choice), second
        choice = codebooks.choose(choice, q, 1)
        codes.append(int(((tables[q] - left) ** 2).sum(-1).argmin()))
        left, total = left - tables[q, codes[-1]], total + tables[q, codes[-1]]
    assert np.array(codebooks.codes_of(choice)).astype(int).tolist() == [[codes]]
    np.testing.assert_array_equal(np.array(codebooks.sum_of(choice))[0, 0], total)
    np.testing.assert_array_equal(depth_sum(codebooks.entries, mx.array([[codes]])), codebooks.sum_of(choice))


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


SMALL = TtsConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window_pattern=3,
)


def small_backbone(window: int, history: int | None = None, head_width: int | None = None) -> Backbone:
    backbone = Backbone(replace(SMALL, sliding_window=window), history, head_width)
    randomised(backbone, mx.float32)
    prepare_layers(backbone)
    return backbone


def stepped(backbone: Backbone, x: mx.array) -> tuple[np.ndarray, list[mx.array]]:
    """Prefill of 37 and steps over the rest of x (2, T, H) -> hidden (2, T, H), caches."""
    hidden, entries = backbone.prefill(x[:, :37].reshape(1, 74, -1))
    caches = backbone.layout.open(entries, 37)
    step, rows = mx.compile(backbone.step), [np.array(hidden).reshape(2, 37, -1)]
    for position in range(37, x.shape[1]):
        caches = backbone.layout.make_room(caches, position)
        slots = backbone.layout.slots(position)
        hidden, caches = step(x[:, position].reshape(1, 2, -1), mx.array([position]), slots, caches)
        mx.eval(hidden, caches)
        rows.append(np.array(hidden).reshape(2, 1, -1))
    return np.concatenate(rows, axis=1), caches


def at_once(backbone: Backbone, x: mx.array) -> np.ndarray:
    """The same in one call over all positions, with masks."""
    hidden, _ = backbone.prefill(x.reshape(1, -1, x.shape[-1]))
    return np.array(hidden).reshape(x.shape)


@pytest.mark.parametrize(("window", "history"), [(20, None), (48, None), (400, None), (400, 45), (30, 60)])
def test_steps_equal_one_call_past_every_growth_and_rotation(window: int, history: int | None) -> None:
    backbone = small_backbone(window, history)
    x = mx.array(np.random.default_rng(2).normal(size=(2, 270, 16)), mx.float32)
    hidden, caches = stepped(backbone, x)
    np.testing.assert_allclose(hidden, at_once(backbone, x), atol=1e-4, rtol=0)
    local, everywhere = min(window, history or 512), min(history or 512, 512)
    assert [buffer.shape[2] for buffer in caches] == [local, local, everywhere]


def test_the_padding_of_heads_changes_nothing() -> None:
    x = mx.array(np.random.default_rng(2).normal(size=(2, 60, 16)), mx.float32)
    narrow, _ = stepped(small_backbone(48), x)
    wide, caches = stepped(small_backbone(48, head_width=64), x)
    assert caches[0].shape == (4, 4, 48, 64)
    np.testing.assert_allclose(wide, narrow, atol=1e-5, rtol=0)


def test_buffers_double_and_stop_at_the_window() -> None:
    layout = CacheLayout([700, None], 37, mx.zeros((2, 1, 1, 1, 4)))
    caches = layout.open([mx.ones((4, 1, 37, 4))] * 2, 37)
    sizes: list[tuple[int, ...]] = []
    for position in range(37, 1100):
        caches = layout.make_room(caches, position)
        size = tuple(buffer.shape[2] for buffer in caches)
        if not sizes or sizes[-1] != size:
            sizes.append(size)
    assert sizes == [(256, 256), (512, 512), (700, 1024), (700, 2048)]
    held = layout.held(caches, 1100)
    assert [entries.shape[2] for entries in held] == [700, 1100]
    assert [buffer.shape[2] for buffer in layout.open(held, 1100)] == [700, 2048]
    assert (np.array(layout.open(held, 1100)[1]).sum(axis=(0, 1, 3))[:37] == 16).all()


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_prepared_once_changes_nothing_but_rounding(packed: bool) -> None:
    norm, plain, stacked = GemmaNorm(64, 1e-6), GatedMlp(64, 128), StackedMlp(64, 128)
    for module in (norm, plain, stacked):
        randomised(module, mx.bfloat16)
    if packed:
        for module in (plain, stacked):
            nn.quantize(module, group_size=32, bits=8)
    x = mx.array(np.random.default_rng(7).normal(size=(1, 2, 64)), mx.float32)
    wanted_norm, wanted = mx.fast.rms_norm(x, 1.0 + norm.weight, 1e-6), plain(x)
    weight = dense_weight(plain.up_proj)
    assert weight.dtype == mx.float32 and weight.shape == (128, 64)
    norm.prepare(), stacked.prepare()
    np.testing.assert_array_equal(norm(x), wanted_norm)
    np.testing.assert_allclose(
        product(product(x, stacked.gate_up, activation=Activation.GATED_GELU), stacked.down),
        wanted,
        atol=1e-5,
        rtol=1e-5,
    )
    assert not stacked.parameters()  # nothing is held twice
