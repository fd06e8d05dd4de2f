"""The CUDA kernels of the speech decoder beside plain computations, and the step made of them beside the plain step.

Products are plain here: ``test_product.py`` has their kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from vcpipe.actors import product
from vcpipe.actors.product import RmsNorm
from vcpipe.actors.stage import StageConfig
from vcpipe.actors.tts import actor, attention, cache, kernels
from vcpipe.actors.tts.actor import TtsStage
from vcpipe.actors.tts.codebooks import Codebooks, squared_norms
from vcpipe.actors.tts.mog import draw_component
from vcpipe.actors.tts.passes import CudaPass
from vcpipe.actors.tts.rng import draws, next_key, session_key

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is a CPU thread where kernels are emulated."""
    monkeypatch.setattr(kernels, "_SEARCH_BLOCKS", 2)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape), mx.float32)


def test_they_run_on_cuda_only() -> None:
    assert attention.usable(72) == kernels.on_cuda() == (mx.default_device().type == mx.gpu and mx.cuda.is_available())


@pytest.mark.usefixtures("cuda")
def test_sizes_that_are_taken() -> None:
    assert attention.usable(72) and attention.usable(8) and attention.usable(128)
    assert not attention.usable(74) and not attention.usable(76)  # 19 fours: too many for one lane, not to be shared
    assert kernels.can_fix_codes(1024, 64, 1152, 512)
    assert not kernels.can_fix_codes(1024, 64, 1150, 512) and not kernels.can_fix_codes(6000, 64, 1152, 512)


# ------------------------------------------------------------------------------------------------ attention
def attended(
    projected: np.ndarray, gains: np.ndarray, frequencies: np.ndarray, keys: np.ndarray, values: np.ndarray, at: int
):
    """One head of one row in float64: projections (3, D), keys and values (n, D) -> what it finds, key, value."""
    turned = []
    for raw, gain in zip(projected[:2], gains, strict=True):
        first, second = np.split(raw / np.sqrt((raw**2).mean() + 1e-6) * gain, 2)
        cosine, sine = np.cos(at * frequencies), np.sin(at * frequencies)
        turned.append(np.concatenate([first * cosine - second * sine, second * cosine + first * sine]))
    query, key = turned
    scores = np.append(keys @ query, key @ query) * 0.3
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ np.vstack([values, projected[2:]]), key, projected[2]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("position", "slot", "seen"),
    [
        (1, 0, range(1)),
        (40, 39, range(40)),
        (299, 298, range(299)),
        (1000, 17, [i for i in range(300) if i != 18]),  # a ring: the next slot is the oldest, out of the window
        (1001, 299, range(1, 300)),
    ],
)
def test_attention_sees_the_filled_slots_and_itself(position: int, slot: int, seen: list[int]) -> None:
    batch, heads, dims, capacity, layers, layer = 2, 2, 72, 300, 2, 1
    projected, gains, frequencies = (
        normal(1, batch, 3 * heads * dims),
        normal(2, dims, seed=1),
        mx.exp(-mx.arange(36) / 4),
    )
    buffer = normal(layers * 2 * batch, heads, capacity, dims, seed=2)
    unseen = np.setdiff1d(np.arange(capacity), list(seen))
    buffer[:, :, mx.array(unseen, mx.int32)] = float("nan") if len(unseen) > 1 else 50.0
    found, entry = attention.attend(
        projected,
        (gains[0], gains[1]),
        frequencies,
        mx.array([position], mx.int32),
        buffer,
        mx.array([layer], mx.int32),
        mx.array([[[[slot]]]], mx.uint32),
        scale=0.3,
        eps=1e-6,
    )
    assert entry.shape == (2 * batch, heads, 1, dims)
    roles = np.array(projected, np.float64).reshape(batch, 3, heads, dims)
    held = np.array(buffer, np.float64)[layer * 2 * batch :][:, :, list(seen)]
    for row in range(batch):
        for head in range(heads):
            wanted = attended(
                roles[row, :, head],
                np.array(gains, np.float64),
                np.array(frequencies, np.float64),
                held[row, head],
                held[batch + row, head],
                position,
            )
            got = (
                np.array(found).reshape(batch, heads, dims)[row, head],
                entry[row, head, 0],
                entry[batch + row, head, 0],
            )
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_allclose(one, other, atol=2e-4)


@pytest.mark.usefixtures("cuda")
def test_stack() -> None:
    entries = [normal(4, 3, 1, 8, seed=i) for i in range(5)]
    np.testing.assert_array_equal(attention.stack(entries), mx.concatenate(entries))


# ------------------------------------------------------------------------------------------------ small ones
@pytest.mark.usefixtures("cuda")
def test_norm_of_sum() -> None:
    post, norm = RmsNorm(normal(100), 1e-6), RmsNorm(normal(100, seed=1), 1e-5)
    x, y = normal(1, 2, 100, seed=3), normal(1, 2, 100, seed=4)
    np.testing.assert_allclose(kernels.norm_of_sum(x, y, post, norm), norm(x + post(y)), atol=1e-5)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, 2**64 - 1])
def test_the_key_chain_is_that_of_split_keys(seed: int) -> None:
    """To the bit."""
    state, keys = session_key(seed), []
    for _ in range(10):
        state, key = next_key(state)
        keys.append(key)
    np.testing.assert_array_equal(kernels.key_chain(session_key(seed), 10), mx.stack([state, *keys]))
    after, drawn = draws(session_key(seed), 5, 24, 16)
    np.testing.assert_array_equal(after, state)
    for index, (uniform, gaussian) in enumerate(drawn):
        np.testing.assert_array_equal(uniform, mx.random.uniform(shape=(1, 1, 24), key=keys[2 * index]))
        np.testing.assert_array_equal(gaussian, mx.random.normal((1, 1, 16), key=keys[2 * index + 1]))


# ------------------------------------------------------------------------------------------------ passes
P, RANK, H, Z, Q, K = 300, 12, 64, 36, 7, 50


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_pass_draws_a_component_and_fixes_codes(dtype: mx.Dtype) -> None:
    to_low, from_low, scale = (
        normal(P, RANK, H, seed=1).astype(dtype),
        normal(P, Z, RANK, seed=2).astype(dtype),
        normal(H),
    )
    tables = np.array(normal(Q, K, Z, seed=3) * 3)
    tables[3, 40] = tables[3, 10]  # of equals the first
    entries = mx.array(tables).astype(dtype)
    codebooks, choice, wanted = Codebooks(entries), None, None
    for index, (first, count) in enumerate([(0, 1), (1, 2), (3, 4)]):
        top_p = (0.5, 0.95, 1.0)[index]
        projected, x = normal(1, 2, P + Z + 1, seed=10 + index), normal(1, 2, H, seed=20 + index)
        if index < 2:
            projected = mx.concatenate([mx.round(projected[..., :P]), projected[..., P:]], axis=-1)  # many equal ones
        uniform, gaussian = (
            mx.random.uniform(shape=(1, 1, P), key=mx.random.key(index)),
            normal(1, 1, Z, seed=30 + index),
        )
        settings = mx.array([1e-6, 0.25, top_p, -4.0, 0.1])
        choice = kernels.fix_codes(
            projected, x, scale, to_low, from_low, entries, squared_norms(entries), settings, uniform, gaussian,
            choice, first, count,
        )  # fmt: skip
        normed = mx.fast.rms_norm(x, scale, 1e-6)
        guided, heads = (a[:, :1] + 0.25 * (a[:, :1] - a[:, 1:]) for a in (normed, projected))
        component = draw_component(heads[..., :P], top_p, uniform).item()
        spread = mx.exp(mx.maximum(heads[..., -1:], -4.0))
        low = guided @ to_low[component].astype(mx.float32).T
        mean = low @ from_low[component].astype(mx.float32).T * spread + heads[..., P:-1]
        wanted = codebooks.choose(codebooks.begin(mean + spread * gaussian * 0.1, wanted), first, count)
        np.testing.assert_array_equal(kernels.codes_of(choice, entries), codebooks.codes_of(wanted))
        sums = kernels.sums_of(choice, entries)
        np.testing.assert_array_equal(sums[:, :1], codebooks.sum_of(wanted))
        np.testing.assert_array_equal(sums[:, 0], sums[:, 1])


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("components", [24, 1000])
def test_components_are_drawn_as_the_plain_operations_draw(components: int) -> None:
    """The component shows in the code: each has an entry of its own."""
    rank, dims, latent = 4, 4, 8
    to_low = mx.ones((components, rank, dims))
    from_low = mx.broadcast_to(mx.arange(components, dtype=mx.float32)[:, None, None], (components, latent, rank))
    entries = mx.broadcast_to(16.0 * mx.arange(components, dtype=mx.float32)[None, :, None], (1, components, latent))
    to_low, from_low, entries = (mx.contiguous(a) for a in (to_low, from_low, entries))
    for seed in range(6):
        logits = normal(1, 1, components, seed=seed) * 3
        if seed % 3 == 0:
            logits = mx.round(logits * 2) / 2  # many equal ones
        uniform, top_p = mx.random.uniform(shape=logits.shape, key=mx.random.key(seed)), (0.5, 0.95, 1.0)[seed % 3]
        projected = mx.repeat(mx.concatenate([logits, mx.zeros((1, 1, latent + 1))], axis=-1), 2, axis=1)
        choice = kernels.fix_codes(
            projected, mx.ones((1, 2, dims)), mx.ones(dims), to_low, from_low, entries, squared_norms(entries),
            mx.array([0.0, 0.2, top_p, -4.0, 0.0]), uniform, mx.zeros((1, 1, latent)), None, 0, 1,
        )  # fmt: skip
        assert kernels.codes_of(choice, entries).item() == draw_component(logits, top_p, uniform).item()


# ------------------------------------------------------------------------------------------------ the step
def load(history: int | None) -> TtsStage:
    stage = actor.load(
        StageConfig("tts", DATA / "tiny" / "bf16", tts_history_frames=history), lambda step, fraction: None
    )
    hiddens: list[np.ndarray] = []
    refine = stage._model.refine
    stage._model.refine = lambda hidden, key: (hiddens.append(np.array(hidden)), refine(hidden, key))[1]
    stage.hiddens = hiddens  # type: ignore[attr-defined]
    return stage


def ran(stage: TtsStage, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and hidden activations of steps after the voice prompt, the second half of them from a snapshot."""
    columns = np.load(DATA / "golden" / "prompt_bf16.npz")["codes"][0].astype(np.int32)
    state, layout, codes = stage.start(3, columns, 0), stage._model.backbone.layout, []
    for step in range(steps):
        if step == steps // 2:
            state = state.open(state.snapshot(layout), layout)
        codes.append(stage.advance(state, 60 + step % 7))
    return np.stack(codes), np.stack(stage.hiddens)  # type: ignore[attr-defined]


@contextmanager
def cpu_alone() -> Iterator[None]:
    """MLX's CPU, also where there is a CUDA device."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    product.on_cuda.cache_clear()
    yield
    mx.set_default_device(device)
    product.on_cuda.cache_clear()


@pytest.mark.parametrize(("history", "steps"), [(None, 13), (40, 6)])
def test_the_step_gives_what_the_plain_one_gives(
    history: int | None, steps: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """While buffers grow at position 40 and the ring of 48 turns, or with ``history`` every layer's ring of 40."""
    monkeypatch.setattr(kernels, "_SEARCH_BLOCKS", 1)
    monkeypatch.setattr(cache, "_FIRST_CAPACITY", 40)
    monkeypatch.setattr(actor, "compiled", lambda function: function)
    with cpu_alone():
        codes, hiddens = ran(load(history), steps)
    request.getfixturevalue("cuda")
    monkeypatch.setattr(product, "launch", lambda *arguments: None)
    stage = load(history)
    assert isinstance(stage._model._pass, CudaPass) and stage._model.backbone.layout.shared
    fused_codes, fused_hiddens = ran(stage, steps)
    np.testing.assert_allclose(fused_hiddens, hiddens, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(fused_codes, codes)
