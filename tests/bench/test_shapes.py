"""Sizes of checkpoints: names and shapes of a real layout, and folders that tests and measurements can be made of."""

from __future__ import annotations

from pathlib import Path

from vcpipe.actors.checkpoint import geometry, read_config
from vcpipe.actors.shards import list_tensors
from vcpipe.bench.shapes import SHAPES, write_checkpoint
from vcpipe.bench.tensor_shapes import tensor_shapes
from vcpipe.launch.library import EMBEDDED_CHECKPOINT
from vcpipe.schemas.geometry import FrameGeometry

TINY = Path(__file__).parents[1] / "data" / "tiny" / "bf16"


def test_shapes_are_those_of_a_real_layout() -> None:
    """The tiny checkpoint was written by the peer's own model: same names, same shapes."""
    stored = {name: info.shape for name, info in list_tensors(TINY).items() if info.dtype == "BF16"}
    assert tensor_shapes(read_config(TINY)) == stored


def test_every_shape_has_the_frame_clock_of_the_public_model(tmp_path: Path) -> None:
    for shape in SHAPES:
        (tmp_path / shape).mkdir()
        write_checkpoint(tmp_path / shape, shape, 0)
        assert geometry(read_config(tmp_path / shape)) == FrameGeometry()


def test_the_shape_mini_is_that_of_the_embedded_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mini", 0)
    assert tensor_shapes(read_config(tmp_path)) == tensor_shapes(read_config(EMBEDDED_CHECKPOINT))
