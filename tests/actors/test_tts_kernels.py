"""The CUDA kernels of the speech decoder beside the operations they stand in for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vcpipe.actors.tts import kernels
from vcpipe.actors.tts.codebooks import Codebooks
from vcpipe.actors.tts.layers import GemmaNorm, OffsetNorm, add_norm
from vcpipe.actors.tts.mog import draw_component

needs_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape), mx.float32)


def both(compute: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What the kernel and what the plain operations give."""
    assert kernels.usable()
    by_kernel = compute()
    mx.eval(by_kernel)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "ENABLED", False)
        plain = compute()
        mx.eval(plain)
    return by_kernel, plain


def test_they_run_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda = mx.default_device().type == mx.gpu and mx.cuda.is_available()
    assert kernels.usable() == on_cuda and kernels.can_draw(1024) == on_cuda and not kernels.can_draw(1025)
    monkeypatch.setattr(kernels, "ENABLED", False)
    assert not kernels.usable()


@needs_cuda
@pytest.mark.parametrize("dims", [100, 1152])
def test_add_norm(dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    post, following = GemmaNorm(dims, 1e-6), OffsetNorm(dims, 1e-5)
    for i, norm in enumerate((post, following)):
        norm.weight = normal(dims, seed=i)
        norm.prepare()
    x, y = normal(1, 2, dims, seed=3), normal(1, 2, dims, seed=4)
    by_kernel, plain = both(partial(add_norm, x, y, post, following), monkeypatch)
    for seen, wanted in zip(by_kernel, plain, strict=True):
        np.testing.assert_allclose(seen, wanted, atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("components", [24, 1000, 1024])
def test_draw(components: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        logits = normal(1, 1, components, seed=seed) * 3
        if seed % 3 == 0:
            logits = mx.round(logits * 2) / 2  # many equal ones
        uniform = mx.random.uniform(shape=logits.shape, key=mx.random.key(seed))
        top_p = (0.5, 0.95)[seed % 2]
        drawn, wanted = both(partial(draw_component, logits, top_p, uniform), monkeypatch)
        assert drawn.tolist() == wanted.tolist()


@needs_cuda
@pytest.mark.parametrize(("count", "size", "latent"), [(7, 100, 20), (31, 1024, 512)])
def test_choose(count: int, size: int, latent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = np.array(normal(count, size, latent))
    tables[3, 50] = tables[3, 10]  # of equals the first
    codebooks = Codebooks(mx.array(tables))
    for seed in range(5):
        begun = codebooks.begin(normal(1, 1, latent, seed=seed) * 3, None)
        by_kernel, plain = both(partial(codebooks.choose, begun, 0, count), monkeypatch)
        np.testing.assert_array_equal(codebooks.codes_of(by_kernel), codebooks.codes_of(plain))
        np.testing.assert_array_equal(codebooks.sum_of(by_kernel), codebooks.sum_of(plain))
