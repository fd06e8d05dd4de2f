"""The embedded checkpoint is what its script writes, small, and honest about being random."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from vcpipe.actors.checkpoint import geometry, is_random, read_config, resolve_checkpoint
from vcpipe.actors.shards import list_tensors
from vcpipe.bench.embedded_shapes import tensor_shapes
from vcpipe.bench.make_embedded import DEFAULT_OUT, make
from vcpipe.schemas.geometry import FrameGeometry

TINY = Path(__file__).parents[1] / "data" / "tiny" / "bf16"


def test_the_script_writes_the_embedded_folder(tmp_path: Path) -> None:
    made = tmp_path / "made"
    make(made)
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in DEFAULT_OUT.iterdir())
    for path in made.glob("*.json"):
        assert path.read_bytes() == (DEFAULT_OUT / path.name).read_bytes(), path.name
    there, here = (mx.load(str(folder / "model.safetensors")) for folder in (DEFAULT_OUT, made))
    assert there.keys() == here.keys()
    for name, value in here.items():
        # One unit in the last place of bfloat16, should another platform's logarithm round otherwise.
        old, new = (np.array(array.astype(mx.float32)) for array in (there[name], value))
        np.testing.assert_allclose(new, old, rtol=2**-7, atol=1e-6, err_msg=name)


def test_it_is_small_and_says_that_it_is_random() -> None:
    folder = resolve_checkpoint(str(DEFAULT_OUT))
    config = read_config(folder)
    assert is_random(config)
    assert geometry(config) == FrameGeometry()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4_000_000


def test_shapes_are_those_of_a_real_layout() -> None:
    """The tiny checkpoint was written by the peer's own model: same names, same shapes."""
    stored = {name: info.shape for name, info in list_tensors(TINY).items() if info.dtype == "BF16"}
    assert tensor_shapes(read_config(TINY)) == stored
