"""A batch of conversations on its way from the process that drew it to the device: two flat arrays, unpacked there.

Few and plain arrays cost the receiving process little, and pinned ones are copied while the device works. All but the
stretches of sound has a shape that depends on rows and frames alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vcpipe.bench.mini.augment import Segments
from vcpipe.bench.mini.conversations import RECALLED_NUMBERS, RECALLED_WORDS, Batch

#: Frames of a row for each place in which something may have to be recalled: three of a short exchange of 36 frames.
_FRAMES_FOR_A_RECALL = 12

_COLUMNS = 2 + RECALLED_WORDS + RECALLED_NUMBERS + 1

#: In place of words where nothing is to be recalled, as cross-entropy wants it.
NO_WORD = -100


class Asked(NamedTuple):
    """What a batch's loss needs, see :class:`~vcpipe.bench.mini.conversations.Batch`.

    ``recall``: (Q, 2 + words + numbers + 1), the result last; rows past the last one are for frame 0 and hold none of these.
    """

    text: Tensor
    previous: Tensor
    prompt: Tensor
    weight: Tensor
    recall: Tensor

    @classmethod
    def of(cls, ids: Tensor, weight: Tensor) -> Asked:
        """From the flat ids of a :class:`Packed` and the weights (B, T)."""
        rows = ids[: 3 * weight.numel()].view(3, *weight.shape)
        recall = ids[3 * weight.numel() :].view(-1, _COLUMNS)
        return cls(rows[0], rows[1], rows[2], weight, recall)


@dataclass
class Packed:
    """``whole``: ids (text, previous, prompt, recall), then source, samples and place of all stretches; ``real``: weights,
    then pace and gain. ``speech`` and ``echo``: how many stretches, and samples in all."""

    whole: Tensor
    real: Tensor
    shape: tuple[int, int]
    speech: tuple[int, int]
    echo: tuple[int, int]

    @classmethod
    def of(cls, batch: Batch) -> Packed:
        rows, frames = batch.text.shape
        recall = np.full((rows * frames // _FRAMES_FOR_A_RECALL, _COLUMNS), -1, np.int64)
        recall[:, :2], recall[:, 2 : 2 + RECALLED_WORDS] = 0, NO_WORD
        columns = batch.recall_at, batch.recall_words, batch.recall_numbers, batch.recall_results[:, None]
        found = np.concatenate(columns, axis=1)[: len(recall)]
        recall[: len(found)] = found
        stretches = np.array([*batch.speech, *batch.echo], np.float64).reshape(-1, 5)
        whole = [batch.text, batch.previous, batch.prompt, recall, stretches[:, :3].T]
        real = [batch.weight, stretches[:, 3:].T]
        counts = [(len(some), sum(samples for _, samples, *_ in some)) for some in (batch.speech, batch.echo)]
        return cls(
            torch.from_numpy(np.concatenate([part.astype(np.int64).ravel() for part in whole])),
            torch.from_numpy(np.concatenate([part.astype(np.float32).ravel() for part in real])),
            (rows, frames),
            *counts,
        )

    def pin_memory(self) -> Packed:
        """What the loader calls when it pins."""
        self.whole, self.real = self.whole.pin_memory(), self.real.pin_memory()
        return self

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Segments, Segments]:
        """Ids and weights for :meth:`Asked.of`, and the stretches of speech and echo, on ``device``."""
        whole, real = self.whole.to(device, non_blocking=True), self.real.to(device, non_blocking=True)
        places, stretches = self.shape[0] * self.shape[1], self.speech[0] + self.echo[0]
        ids, table = whole[: len(whole) - 3 * stretches], whole[len(whole) - 3 * stretches :].view(3, stretches)
        weight, factors = real[:places].view(self.shape), real[places:].view(2, stretches)

        def some(part: slice, total: int) -> Segments:
            (source, samples, place), (pace, gain) = table[:, part], factors[:, part]
            return Segments(source, samples, place, pace, gain, total)

        count = self.speech[0]
        return ids, weight, some(slice(count), self.speech[1]), some(slice(count, None), self.echo[1])
