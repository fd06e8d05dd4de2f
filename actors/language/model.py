"""The language model as sessions use it: one compiled function a position, for any number of sessions."""

from __future__ import annotations

from collections import OrderedDict

import mlx.core as mx

from vcpipe.actors.compiled import compiled
from vcpipe.actors.language.cache import Caches
from vcpipe.actors.language.config import LanguageConfig
from vcpipe.actors.language.matrices import Embedding
from vcpipe.actors.language.nemotron_h import Network, Precision
from vcpipe.actors.language.parameters import LanguageParameters, merge
from vcpipe.actors.product import on_cuda

#: Dense matrices are held a second time, in float32, while that takes at most this much. Above, as with a large bfloat16
#: checkpoint, they are widened in every product: slower by the copying, but the memory stays that of the checkpoint.
WIDEN_LIMIT_BYTES = 8 << 30

#: Prompts whose states are remembered.
PROMPTS_KEPT = 2


class LanguageModel:
    """Networks over the same weights for the two dtypes that activations may have.

    Audio rows are float32. Prompt rows of a streaming session have the embeddings' dtype; in a float32 checkpoint both are
    one network. ``stored`` is used up: its linear layers are gone afterwards.
    """

    def __init__(self, config: LanguageConfig, stored: LanguageParameters) -> None:
        self.config = config
        merge(stored)
        widen = not on_cuda() and 4 * _dense_weights(stored) <= WIDEN_LIMIT_BYTES
        self.embedding = Embedding(stored.embed_tokens)
        self._wide = Network(config, stored, self.embedding, Precision(mx.float32, widen))
        self._networks = {mx.float32: self._wide}
        if (dtype := self.embedding.dtype) != mx.float32:
            self._networks[dtype] = Network(config, stored, self.embedding, Precision(dtype, False))
        self._steps = {dtype: compiled(network.step) for dtype, network in self._networks.items()}

    def step(self, row: mx.array, ids: mx.array, caches: Caches) -> tuple[mx.array, mx.array]:
        """One position: row (1, 1, hidden) of the audio channel and the previous ids (2,) -> ids (2,), hidden (1, 1, hidden).

        ``caches`` goes on to the next position. Nothing is evaluated: evaluate the caches with what else is wanted.
        """
        caches.make_ready(row.dtype)
        step = self._steps[row.dtype]
        ids, hidden, caches.blocks = step(row, ids, mx.array([caches.length]), caches.blocks)
        caches.length += 1
        return ids, hidden

    def fuse(self, rows: mx.array, ids: mx.array) -> mx.array:
        """Input rows (1, T, hidden) of positions that share their previous ids (2,)."""
        return self._wide.fuse(rows, ids)

    def over_history(self, fused: mx.array) -> tuple[mx.array, mx.array]:
        """All input rows so far, (1, T, hidden) float32 -> ids (2,) and hidden (1, 1, hidden) of the last position."""
        hidden = self._wide.backbone(fused)[:, -1:]
        return self._wide.next_ids(hidden), hidden


class PromptStates:
    """The caches behind the system prompts used last, so that a session with one of them opens at once.

    Whoever is handed caches steps on from a copy. Arrays are values: what a session makes of them never reaches the kept
    ones.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[bool, tuple[int, ...]], Caches] = OrderedDict()

    def find(self, prompt_ids: list[int], widened: bool) -> Caches | None:
        """``widened``: the prompt was taken in as float32."""
        key = (widened, tuple(prompt_ids))
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key].copy()

    def keep(self, prompt_ids: list[int], widened: bool, caches: Caches) -> None:
        """Remember evaluated caches, and forget the prompt that has not been used for longest."""
        self._kept[widened, tuple(prompt_ids)] = caches.copy()
        if len(self._kept) > PROMPTS_KEPT:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()


def _dense_weights(stored: LanguageParameters) -> int:
    """How many numbers stand in dense matrices."""
    modules = (stored, *(layer.mixer for layer in stored.llm.layers))
    return sum(getattr(module, name).dense_weights for module in modules for name in module.merged)
