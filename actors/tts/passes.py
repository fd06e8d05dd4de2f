"""A refinement pass: a continuous code for what is still missing, and the next few codebooks fixed by it.

A *choice* is the state from pass to pass, in a form of each class here: what has been chosen so far.
"""

from __future__ import annotations

import mlx.core as mx

from vcpipe.actors.product import on_cuda
from vcpipe.actors.tts import kernels
from vcpipe.actors.tts.codebooks import Codebooks, squared_norms
from vcpipe.actors.tts.config import TtsConfig
from vcpipe.actors.tts.mog import MogHead, draw_component


class PlainPass:
    """By MLX's operations, from tables in float32.

    ``entries``: of the codebooks, (Q, K, Z).
    """

    def __init__(self, config: TtsConfig, head: MogHead, entries: mx.array) -> None:
        self._head, self._noise_scale = head, config.noise_scale
        to_low, from_low = (table.astype(mx.float32).swapaxes(1, 2) for table in head.take_tables())
        self._to_low, self._from_low = to_low, from_low  # (predictions, H, rank), (predictions, rank, Z)
        self._only = mx.zeros((1,), mx.uint32)
        self._codebooks = Codebooks(entries)
        mx.eval(to_low, from_low, self._only)

    def __call__(
        self, given: mx.array, uniform: mx.array, normal: mx.array, choice: mx.array | None, first: int, count: int
    ) -> mx.array:
        """``given`` (1, 2, H), uniform (1, 1, P) and normal (1, 1, Z) numbers -> the choice with ``count`` more codebooks."""
        head = self._head
        x, projected = head.guided(given)
        logits, rest, log_std = mx.split(projected, [head.predictions, head.predictions + head.latent_size], axis=-1)
        log_std = mx.maximum(log_std, head.min_log_std)
        component = draw_component(logits, head.top_p, uniform)
        low = mx.gather_mm(x, self._to_low, self._only, component)  # (1, 1, rank)
        mean = mx.gather_mm(low, self._from_low, self._only, component) * mx.exp(log_std) + rest
        noise = mx.exp(log_std) * normal * self._noise_scale
        return self._codebooks.choose(self._codebooks.begin(mean + noise, choice), first, count)

    @property
    def entries(self) -> mx.array:
        """(Q, K, Z)."""
        return self._codebooks.entries

    def rows_of(self, choice: mx.array) -> mx.array:
        """The sum of the chosen entries, a row for all."""
        return self._codebooks.sum_of(choice)

    def sum_of(self, choice: mx.array) -> mx.array:
        """(1, 1, Z): the chosen entries, added in the order of the codebooks."""
        return self._codebooks.sum_of(choice)

    def codes_of(self, choice: mx.array) -> mx.array:
        """(1, 1, Q), whole numbers in float32."""
        return self._codebooks.codes_of(choice)


class CudaPass:
    """By :func:`kernels.fix_codes`, from tables as they are stored."""

    def __init__(self, config: TtsConfig, head: MogHead, entries: mx.array) -> None:
        self._head, self.entries = head, entries
        to_low, from_low = head.take_tables()
        settings = [head.final_norm.eps, head.guidance_scale, head.top_p, head.min_log_std, config.noise_scale]
        self._tables = (head.final_norm.scale, to_low, from_low, entries, squared_norms(entries), mx.array(settings))
        mx.eval(self._tables)

    @staticmethod
    def usable(config: TtsConfig) -> bool:
        """Whether there is CUDA, and the kernel takes these sizes."""
        head = config.mog_head
        return on_cuda() and kernels.can_fix_codes(
            head.num_predictions, head.low_rank, config.hidden_size, config.latent_size
        )

    def __call__(
        self, given: mx.array, uniform: mx.array, normal: mx.array, choice: mx.array | None, first: int, count: int
    ) -> mx.array:
        """See :meth:`PlainPass.__call__`."""
        return kernels.fix_codes(*self._head.projected(given), *self._tables, uniform, normal, choice, first, count)

    def rows_of(self, choice: mx.array) -> mx.array:
        """The sum of the chosen entries, a row each for the conditional and the unconditional, (1, 2, Z)."""
        return kernels.sums_of(choice, self.entries)

    def sum_of(self, choice: mx.array) -> mx.array:
        """See :meth:`PlainPass.sum_of`."""
        return kernels.sums_of(choice, self.entries)[:, :1]

    def codes_of(self, choice: mx.array) -> mx.array:
        """See :meth:`PlainPass.codes_of`."""
        return kernels.codes_of(choice, self.entries)
