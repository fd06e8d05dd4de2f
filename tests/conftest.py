"""What every test may use: fakes that child processes can import too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def fakes_for_children() -> Iterator[None]:
    """Put tests/ on the path of the actor processes, where ``fakes`` lives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield
