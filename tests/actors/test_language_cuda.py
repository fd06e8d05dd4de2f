"""The language step with its CUDA kernels, beside the plain operations that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from vcpipe.actors.defaults import DEFAULTS
from vcpipe.actors.language import attention_kernel, matrices, model, nemotron_h
from vcpipe.actors.language.cache import KV_ROWS, Caches
from vcpipe.actors.language.config import LanguageConfig
from vcpipe.actors.language.model import LanguageModel
from vcpipe.actors.language.nemotron_h import MambaMixer, Precision
from vcpipe.actors.language.parameters import LanguageParameters, merge

pytestmark = pytest.mark.usefixtures("cuda")

PATTERN = "M*-"
#: Many sizes are equal, so that few kernels must be made: the parts are tested at more of them.
CONFIG = replace(
    LanguageConfig.from_runtime(DEFAULTS), vocab_size=64, hidden_size=64, intermediate_size=64, bos_token_id=1,
    eos_token_id=2, pad_token_id=3, silence_token_id=4, hybrid_override_pattern=PATTERN, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, mamba_num_heads=16, mamba_head_dim=8, ssm_state_size=44, n_groups=2,
)  # fmt: skip

Pack = Callable[[str], bool | dict[str, int]]


@contextmanager
def plain() -> Iterator[None]:
    """What is made meanwhile takes every product, and all else, by MLX's operations."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (matrices, model, nemotron_h, attention_kernel):
            patch.setattr(module, "on_cuda", lambda: False)
        yield


def make_model(pack: Pack, config: LanguageConfig = CONFIG) -> LanguageModel:
    """Random weights in bfloat16. ``pack``: what becomes of a linear layer with this path, as ``nn.quantize`` has it."""
    rng = np.random.default_rng(4)
    stored = LanguageParameters(config)
    stored.update(tree_map(lambda a: mx.array(rng.normal(0, 0.2, a.shape), mx.bfloat16), stored.parameters()))
    nn.quantize(stored, class_predicate=lambda path, module: isinstance(module, nn.Linear) and pack(path))
    return LanguageModel(config, stored)


def dense(path: str) -> bool:
    return False


def packed(path: str) -> dict[str, int]:
    return {"bits": 4, "group_size": 64}


def filled_caches(length: int) -> Caches:
    """Of a session that has seen ``length`` positions of float32 rows."""
    rng = np.random.default_rng(length)
    caches = Caches.empty(CONFIG, mx.float32)
    caches.length = length
    seen = mx.arange(caches.rows)[:, None] < length
    for i, block in enumerate(caches.blocks):
        values = [mx.array(rng.normal(size=a.shape), mx.float32) for a in block]
        caches.blocks[i] = tuple(mx.where(seen, a, 0) if PATTERN[i] == "*" else a for a in values)
    return caches


def walk(stepped: LanguageModel, dtypes: list[mx.Dtype], caches: Caches) -> tuple[list[np.ndarray], list[mx.Dtype]]:
    """The hidden rows, and what dtypes they had, of random rows of these dtypes."""
    rng = np.random.default_rng(2)
    ids, rows, seen = mx.array([3, 5], mx.uint32), [], []
    for dtype in dtypes:
        row = mx.array(rng.normal(size=(1, 1, CONFIG.hidden_size)), dtype)
        _, hidden = stepped.step(row, ids, caches)
        mx.eval(hidden, caches.blocks)
        rows.append(np.array(hidden.astype(mx.float32)))
        seen.append(hidden.dtype)
    return rows, seen


@pytest.mark.parametrize("pack", [dense, packed])
def test_float32_steps_equal_plain_ones_while_a_buffer_doubles(pack: Pack) -> None:
    fused = make_model(pack)
    with plain():
        wanted = make_model(pack)
    after, wanted_after = filled_caches(KV_ROWS - 2), filled_caches(KV_ROWS - 2)
    rows, dtypes = walk(fused, [mx.float32] * 4, after)
    wanted_rows, _ = walk(wanted, [mx.float32] * 4, wanted_after)
    assert after.rows == 2 * KV_ROWS and set(dtypes) == {mx.float32}
    np.testing.assert_allclose(rows, wanted_rows, atol=1e-4)
    for block, wanted_block in zip(after.blocks, wanted_after.blocks, strict=True):
        for array, wanted_array in zip(block, wanted_block, strict=True):
            assert array.dtype == wanted_array.dtype and array.shape == wanted_array.shape
            np.testing.assert_allclose(np.array(array), np.array(wanted_array), atol=1e-4)


def test_a_bfloat16_prompt_and_float32_rows_behind_it() -> None:
    """Keys and values are rounded into the prompt's buffer, and read from there."""
    fused = make_model(dense)
    with plain():
        wanted = make_model(dense)
    dtypes = [mx.bfloat16] * 2 + [mx.float32] * 2
    after = Caches.empty(CONFIG, mx.bfloat16)
    rows, seen = walk(fused, dtypes, after)
    wanted_rows, _ = walk(wanted, dtypes, Caches.empty(CONFIG, mx.bfloat16))
    assert seen == dtypes
    assert after.blocks[1][0].dtype == mx.bfloat16
    np.testing.assert_allclose(rows, wanted_rows, atol=0.06)  # at values up to 3 a bfloat16 has steps of 0.016


def test_matrices_of_several_widths_at_one_input_are_multiplied_one_by_one() -> None:
    pack: Pack = lambda path: "v_proj" in path and {"bits": 8, "group_size": 64}  # noqa: E731
    fused = make_model(pack)
    with plain():
        wanted = make_model(pack)
    rows, _ = walk(fused, [mx.float32] * 2, filled_caches(3))
    wanted_rows, _ = walk(wanted, [mx.float32] * 2, filled_caches(3))
    np.testing.assert_allclose(rows, wanted_rows, atol=1e-4)


@pytest.mark.parametrize(("pack", "product"), [(dense, "dense_product"), (packed, "packed_product")])
def test_kernels_of_a_step(pack: Pack, product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its projections a Mamba-2 block starts one kernel, an attention block two, and an MLP none."""
    started: list[str] = []
    make = mx.fast.cuda_kernel

    def recording(name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        kernel = make(name, *args, **kwargs)
        return lambda *a, **k: (started.append(name), kernel(*a, **k))[1]

    monkeypatch.setattr(mx.fast, "cuda_kernel", recording)
    monkeypatch.setattr(model, "compiled", lambda function: function)  # or a second step would start none from here
    fused = make_model(pack)
    walk(fused, [mx.float32], filled_caches(3))
    started.clear()  # at first a step is tried out
    walk(fused, [mx.float32], filled_caches(3))
    names = [name.removeprefix("vcpipe_") for name in started]
    assert names == [
        *(product, "mamba_step", product),
        *(product, "attend_share", "attend_join", product),
        *(product, product),
        product,
    ]


@pytest.mark.parametrize(
    ("size", "columns", "taps", "limits", "dtype"),
    [
        (19, 40, 3, (0.1, 0.9), mx.float32),  # neither warps nor shares of rows are full
        (32, 64, 4, (0.0, float("inf")), mx.float32),
        (32, 40, 1, (0.0, float("inf")), mx.bfloat16),
    ],
)
def test_state_space_of_one_position(
    size: int, columns: int, taps: int, limits: tuple[float, float], dtype: mx.Dtype
) -> None:
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": size, "ssm_state_size": columns, "conv_kernel": taps}
    config = replace(CONFIG, **sizes, time_step_limit=limits)
    rng = np.random.default_rng(2)

    def draw(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape), dtype)

    stored = LanguageParameters(config)
    stored.update(tree_map(lambda a: draw(*a.shape), stored.parameters()))
    merge(stored)
    mixer = MambaMixer(config, stored.llm.layers[0].mixer, Precision(dtype, False))
    assert mixer._fused is not None
    projected = draw(1, 1, config.inner_size + config.conv_size + config.mamba_num_heads)
    past = [draw(1, 1, config.conv_size) for _ in range(taps - 1)]
    state = draw(1, config.n_groups, 2, size, columns).astype(mx.float32)
    made, wanted = mixer._fused(projected, past, state), mixer._gated(projected, past, state)
    for array, wanted_array, exact in zip(made, wanted, (1e-5, 0, 1e-5), strict=True):
        assert array.dtype == wanted_array.dtype
        numbers, wanted_numbers = (np.array(a.astype(mx.float32)) for a in (array, wanted_array))
        tolerance = exact if dtype == mx.float32 or exact == 0 else 2e-2
        np.testing.assert_allclose(numbers, wanted_numbers, atol=tolerance * np.abs(wanted_numbers).max())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("filled", "rows"), [(1, 8), (333, 512)])
def test_attention_of_one_position(filled: int, rows: int, dtype: mx.Dtype) -> None:
    heads, kv_heads, size = 6, 2, 40
    rng = np.random.default_rng(filled)
    qkv = mx.array(rng.normal(size=(1, 1, (heads + 2 * kv_heads) * size)), mx.float32)
    buffer = mx.array(rng.normal(size=(1, 2 * kv_heads, rows, size)), dtype)
    attended = attention_kernel.attend(qkv, buffer, mx.array([filled - 1]), heads)
    queries = qkv[..., : heads * size].reshape(1, heads, 1, size)
    keys, values = mx.split(buffer[:, :, :filled].astype(mx.float32), 2, axis=1)
    wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=size**-0.5)
    np.testing.assert_allclose(np.array(attended).ravel(), np.array(wanted).ravel(), atol=1e-5)
