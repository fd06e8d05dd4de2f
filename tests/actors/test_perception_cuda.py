"""The perception step with its CUDA kernels beside the plain operations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from vcpipe.actors.perception.actor import PerceptionStage, load
from vcpipe.actors.perception.cache import Positions
from vcpipe.actors.perception.config import EncoderConfig
from vcpipe.actors.perception.dense import Dense
from vcpipe.actors.perception.kernels import Tables, attend, convolve
from vcpipe.actors.perception.live import Heard
from vcpipe.actors.product import LayerNorm
from vcpipe.actors.stage import StageConfig

CHECKPOINT = Path(__file__).parents[1] / "data" / "tiny" / "bf16"
FRAME = 1280


def load_tiny() -> PerceptionStage:
    return load(StageConfig("perception", CHECKPOINT), lambda step, fraction: None)


def hear(stage: PerceptionStage, frames: int) -> Iterator[Heard]:
    """Frames of noise, each scored beside another prediction."""
    rng = np.random.default_rng(0)
    perceive = stage.open_cached()
    states, from_prediction = stage.transducer.start
    for _ in range(frames):
        heard = perceive(rng.normal(0, 0.1, FRAME).astype(np.float32), from_prediction)
        yield heard
        from_frame, best = heard.scored
        states, from_prediction, _ = stage.transducer.advance(best, states, from_frame)


def test_frames_equal_plain_ones_beyond_where_the_rings_begin_anew(request: pytest.FixtureRequest) -> None:
    frames = 12  # rings of 7 and 9
    plain = list(hear(load_tiny(), frames))
    request.getfixturevalue("cuda")
    stage = load_tiny()
    first = stage.perception.encoder.layers[0].feed_forward1.linear1
    assert first.cuda.weight.dtype == mx.bfloat16  # as stored
    for seen, wanted in zip(hear(stage, frames), plain, strict=True):
        np.testing.assert_allclose(seen.projected, wanted.projected, atol=1e-4)
        np.testing.assert_allclose(seen.encoded, wanted.encoded, atol=1e-4)
        np.testing.assert_allclose(seen.scored[0], wanted.scored[0], atol=1e-4)
        assert seen.scored[1].tolist() == wanted.scored[1].tolist()


def test_parts_equal_plain_ones_where_sizes_are_no_multiples_of_a_warp(request: pytest.FixtureRequest) -> None:
    """More slots than warps, more channels than threads, in every slot as the newest, with a bias."""
    config = EncoderConfig(n_layers=1, d_model=600, n_heads=15, conv_kernel_size=4, left_context=19)
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32))

    projected, biases, norm = normal(40, 1, 1800), normal(2, 15, 1, 40), LayerNorm(normal(600), normal(600), 1e-5)
    gated, bias, positions, taps = normal(40, 1, 600), normal(600), normal(1, 15, 20, 40), normal(1, 4, 600)

    def run() -> list[np.ndarray]:
        tables, where, seen = Tables(positions, taps), Positions(config), []
        window, past = mx.zeros((1, 30, 20, 40)), mx.zeros((1, 4, 600))
        for frame in range(25):
            at = where[frame]
            ((places, kernel),) = tables.of(at)
            mixed, window = attend(projected[frame], biases, window, places, at)
            out, past = convolve(gated[frame], past, kernel, at, bias, norm)
            seen += [mixed, out]
        return [*map(np.array, seen), np.array(window), np.array(past)]

    plain = run()
    request.getfixturevalue("cuda")
    for seen, wanted in zip(run(), plain, strict=True):
        np.testing.assert_allclose(seen, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_many_rows_are_multiplied_alike(dtype: mx.Dtype, request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(2)
    weight = mx.array(rng.normal(size=(12, 24)).astype(np.float32)).astype(dtype)
    bias, x = mx.arange(12), mx.array(rng.normal(size=(9, 24)).astype(np.float32))
    plain = np.array(Dense(weight, bias)(x))
    request.getfixturevalue("cuda")
    matrix = Dense(weight, bias)
    assert matrix.rows.dtype == dtype and matrix(x).dtype == mx.float32
    np.testing.assert_allclose(matrix(x), plain, atol=1e-5)
