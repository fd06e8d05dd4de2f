"""CUDA kernels that stand in for runs of small operations: see ``kernels.cuh``.

The step is bound by the launches of its operations, not by what they compute. Each function here does in one launch what the
plain operations beside its caller do in many, equal but for the order in which sums are added.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from vcpipe.actors.product import RmsNorm, included, on_cuda

_THREADS = 256

#: Blocks that search a codebook together. They wait for each other, so all of them must be able to run at once.
_SEARCH_BLOCKS = 64

#: Numbers that fit into a block's shared memory beside a kernel's small things.
_MOST_SHARED = 11776


def norm_of_sum(x: mx.array, y: mx.array, post: RmsNorm, norm: RmsNorm) -> mx.array:
    """norm(x + post(y)), all (1, N, D) float32."""
    if not on_cuda():
        return norm(x + post(y))
    dims = x.shape[-1]
    names = ("x", "y", "post_scale", "post_eps", "scale", "eps")
    (normed,) = _kernel("norm_of_sum", ("DIMS",), names, "normed")(
        inputs=[x, y, post.scale, post.eps, norm.scale, norm.eps],
        template=[("DIMS", dims)],
        grid=(x.size // dims * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[mx.float32],
    )
    return normed


def key_chain(state: mx.array, count: int) -> mx.array:
    """(1 + count, 2) uint32: the state after ``count`` draws, then the key of each draw."""
    (keys,) = _kernel("key_chain", ("COUNT",), ("state",), "keys")(
        inputs=[state],
        template=[("COUNT", count)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1 + count, 2)],
        output_dtypes=[mx.uint32],
    )
    return keys


def can_fix_codes(components: int, rank: int, dims: int, latent: int) -> bool:
    """Whether :func:`fix_codes` takes sizes P, rank, H and Z."""
    return dims % 4 == 0 and latent % 4 == 0 and 2 * components + rank + dims + latent <= _MOST_SHARED


def fix_codes(
    projected: mx.array,
    x: mx.array,
    scale: mx.array,
    to_low: mx.array,
    from_low: mx.array,
    entries: mx.array,
    norms: mx.array,
    settings: mx.array,
    uniform: mx.array,
    normal: mx.array,
    choice: mx.array | None,
    first: int,
    count: int,
) -> mx.array:
    """The end of a refinement pass -> the choice after it: see :func:`sums_of` and :func:`codes_of`.

    ``projected``: (1, 2, P + Z + 1), the MoG head's logits, offsets and log_std of the norm, with ``scale`` (H,), of ``x``
    (1, 2, H). ``to_low`` (P, rank, H) and ``from_low`` (P, Z, rank): of its components. ``entries`` (Q, K, Z) and ``norms``
    (Q, K) float32: of the codebooks, of which ``count`` are fixed from ``first`` on. ``settings`` (5,): the norm's epsilon,
    guidance scale, top_p, least log_std, noise scale. ``uniform`` (1, 1, P) and ``normal`` (1, 1, Z) numbers. ``choice``: None
    before the first pass. The three tables may have any dtype.
    """
    (components, rank, dims), (books, size, latent) = to_low.shape, entries.shape
    template = {"P": components, "RANK": rank, "H": dims, "Z": latent, "Q": books, "K": size}
    inputs = {
        "projected": projected,
        "x": x,
        "scale": scale,
        "to_low": to_low,
        "from_low": from_low,
        "uniform": uniform,
        "normal": normal,
        "previous": normal if choice is None else choice,
        "entries": entries,
        "norms": norms,
        "span": mx.array([first, count], mx.int32),
        "settings": settings,
    }
    (chosen,) = _kernel("fix_codes", tuple(template), tuple(inputs), "chosen")(
        inputs=list(inputs.values()),
        template=list(template.items()),
        grid=(_SEARCH_BLOCKS * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1, 1, _sums_at(entries) + 2 * latent + books)],
        output_dtypes=[mx.float32],
        init_value=0.0,
    )
    return chosen


def sums_of(choice: mx.array, entries: mx.array) -> mx.array:
    """(1, 2, Z): the chosen entries, added in the order of the codebooks, once for each row under guidance."""
    start, latent = _sums_at(entries), entries.shape[-1]
    return choice[..., start : start + 2 * latent].reshape(1, 2, latent)


def codes_of(choice: mx.array, entries: mx.array) -> mx.array:
    """(1, 1, Q), whole numbers in float32."""
    return choice[..., _sums_at(entries) + 2 * entries.shape[-1] :]


def _sums_at(entries: mx.array) -> int:
    """A choice begins with the cells of 8 bytes in which blocks meet, one and one for each codebook, up to 16 bytes."""
    return -(-2 * (1 + entries.shape[0]) // 4) * 4


@cache
def _kernel(name: str, template: tuple[str, ...], inputs: tuple[str, ...], output: str) -> Any:
    return mx.fast.cuda_kernel(
        name=f"vcpipe_tts_{name}",
        input_names=list(inputs),
        output_names=[output],
        source=f"{name}<{', '.join(template)}>({', '.join([*inputs, output])});",
        header=included("vcpipe.actors", "warp.cuh")
        + included("vcpipe.actors.tts", "numbers.cuh")
        + included("vcpipe.actors.tts", "kernels.cuh"),
    )
