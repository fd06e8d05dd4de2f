"""Attention of one position on a CUDA GPU: from the projections of a layer to what its heads found, in one launch.

The position's own key and value are not read from the buffer but come out beside it, to be written before the next step:
a buffer that a launch has read is copied when it is written to in the same step, and one write serves many layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from vcpipe.actors.product import included, on_cuda

_THREADS = 256

#: How many times four numbers a lane holds of a key, and of a value, at most.
_MOST_FOURS = 9


def usable(dims: int) -> bool:
    """Whether heads of ``dims`` dimensions are attended to here."""
    return on_cuda() and dims % 4 == 0 and _lanes(dims) is not None


def _lanes(dims: int) -> int | None:
    """How many lanes share a slot: as few as can hold it."""
    fours = dims // 4
    return next((n for n in (1, 2, 4, 8, 16) if fours % n == 0 and fours // n <= _MOST_FOURS), None)


def attend(
    projected: mx.array,
    gains: tuple[mx.array, mx.array],
    frequencies: mx.array,
    position: mx.array,
    buffer: mx.array,
    layer: mx.array,
    slot: mx.array,
    *,
    scale: float,
    eps: float,
) -> tuple[mx.array, mx.array]:
    """Queries, keys and values of one position -> what the heads found (1, B, heads * D), the entry (2 * B, heads, 1, D).

    ``projected``: (1, B, 3 * heads * D), neither normed nor turned. ``gains``: of the norms of queries and keys, (D,).
    ``frequencies``: rotary, (D / 2,). ``position``: (1,) int32. ``buffer``: (layers * 2 * B, heads, capacity, D) with all
    positions before this one, of which ``layer`` (1,) int32 is to be read. ``slot``: of the position before, one uint32.
    """
    batch, (_, heads, _, dims) = projected.shape[1], buffer.shape
    template = {"D": dims, "HEADS": heads, "BATCH": batch, "LANES": _lanes(dims)}
    names = (
        "projected",
        "query_gain",
        "key_gain",
        "frequencies",
        "position",
        "buffer",
        "layer",
        "slot",
        "scale",
        "eps",
    )
    arguments = ", ".join([*names, "buffer_shape[2]", "found", "entry"])
    kernel = _kernel("attend", names, ("found", "entry"), f"attend<{', '.join(template)}>({arguments});")
    found, entry = kernel(
        inputs=[projected, *gains, frequencies, position, buffer, layer, slot, scale, eps],
        template=list(template.items()),
        grid=(batch * heads * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1, batch, heads * dims), (2 * batch, heads, 1, dims)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return found, entry


def stack(entries: Sequence[mx.array]) -> mx.array:
    """Arrays of one shape (R, ...) -> (len(entries) * R, ...), in one launch."""
    names = tuple(f"entry_{i}" for i in range(len(entries)))
    source = f"stack<SIZE, {len(entries)}>({{{', '.join(names)}}}, stacked);"
    kernel = _kernel("stack", names, ("stacked",), source)
    first = entries[0]
    (stacked,) = kernel(
        inputs=list(entries),
        template=[("SIZE", first.size)],
        grid=(len(entries) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(len(entries) * first.shape[0], *first.shape[1:])],
        output_dtypes=[mx.float32],
    )
    return stacked


@cache
def _kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str) -> Any:
    return mx.fast.cuda_kernel(
        name=f"vcpipe_tts_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=included("vcpipe.actors", "warp.cuh")
        + included("vcpipe.actors.tts", "numbers.cuh")
        + included("vcpipe.actors.tts", "attention.cuh"),
    )
