"""What the network hears of a batch, made on the device: conversations laid out, disturbed, encoded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vcpipe.bench.mini.augment import Segments, augment, lay
from vcpipe.bench.mini.conversations import Laid
from vcpipe.bench.mini.timeline import USER_FRAME


class Stage:
    """``sound``: int16 samples of all renderings at 16 kHz."""

    def __init__(self, sound: np.ndarray, device: torch.device, seed: int) -> None:
        self._sound = torch.from_numpy(sound).to(device)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def lay(self, stretches: list[Laid], rows: int, frames: int) -> Tensor:
        """(rows, frames * 1280) float32; the stretches do not overlap."""
        return lay(self._sound, Segments.of(stretches).to(self.device), rows, frames * USER_FRAME)

    def heard(self, speech: Segments, echo: Segments, rows: int, frames: int) -> Tensor:
        """(rows, n): what users say and the assistant's echo on the way to the microphone, other ones in every call."""
        said, replied = (lay(self._sound, segments, rows, frames * USER_FRAME) for segments in (speech, echo))
        return augment(said, replied, self.generator)
