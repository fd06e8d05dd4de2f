"""The checkpoint in the package beside mlx-vlm: it is loaded unchanged there, and a spoken question gets the same reply."""

from __future__ import annotations

import pytest
from parity.compare import QUESTION_WAV

from vcpipe.bench.mini.peer_check import compare
from vcpipe.launch.library import EMBEDDED_CHECKPOINT

pytestmark = pytest.mark.parity


def test_the_public_code_gives_the_same_ids_and_codes() -> None:
    pytest.importorskip("mlx_vlm")
    said = compare(EMBEDDED_CHECKPOINT, frames=60, recording=QUESTION_WAV)
    assert said == "equal to mlx-vlm: ids and codes of 60 frames, 7 of them with text"
