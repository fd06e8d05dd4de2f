"""What every test may use: fakes that child processes can import too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# On a CUDA card, so that plain products can be held against the kernels': MLX's default there has ten bits.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import pytest
from cuda_emulation import cuda, emulated_cuda

__all__ = ["cuda", "emulated_cuda", "fakes_for_children", "uncompiled"]


@pytest.fixture(scope="session", autouse=True)
def fakes_for_children() -> Iterator[None]:
    """Put tests/ on the path of the actor processes, where ``fakes`` lives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Steps run operation by operation, from when a test asks for this on."""
    mx.disable_compile()
    yield
    mx.enable_compile()
