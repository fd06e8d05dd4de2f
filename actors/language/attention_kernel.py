"""Attention of one position as two CUDA kernels (``attention_kernel.cuh``), however many positions there are.

The filled rows of a key/value buffer are shared out among blocks, so that many multiprocessors read them, and the shares are
joined: a softmax over all rows, as each share says by which greatest score its weights are meant (Dao et al., 2023:
"Flash-Decoding for long-context inference"). Rows beyond are not read, so no mask is needed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from vcpipe.actors.product import included, on_cuda

_WARPS = 8
_THREADS = 32 * _WARPS

#: Blocks that share the rows of one key/value head.
_SHARES = 16

_SHARED_BYTES, _MOST_THREADS = 48 << 10, 1024


def usable(heads: int, kv_heads: int, size: int) -> bool:
    """Whether there is CUDA, and a block has room for what the warps of one key/value head find."""
    return on_cuda() and _WARPS * (heads // kv_heads) * (size + 2) * 4 <= _SHARED_BYTES and size <= _MOST_THREADS


def attend(qkv: mx.array, buffer: mx.array, position: mx.array, heads: int) -> mx.array:
    """qkv (1, 1, (heads + 2 kv_heads) * head_dim) and buffer (1, 2 kv_heads, rows, head_dim) -> (1, 1, heads * head_dim).

    Keys are first in the buffer, of which the rows up to and including ``position`` (1,) count. Scores and sums are float32.
    """
    _, kv_heads, _, size = buffer.shape
    kv_heads //= 2
    (parts,) = _share_kernel()(
        inputs=[qkv, buffer, position],
        template=[("KV_HEADS", kv_heads), ("REPEATS", heads // kv_heads), ("SIZE", size), ("SHARES", _SHARES)],
        grid=(_SHARES * _THREADS, kv_heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(heads, _SHARES, size + 2)],
        output_dtypes=[mx.float32],
    )
    (attended,) = _join_kernel()(
        inputs=[parts],
        template=[("SIZE", size), ("SHARES", _SHARES)],
        grid=(heads * size, 1, 1),
        threadgroup=(size, 1, 1),
        output_shapes=[(1, 1, heads * size)],
        output_dtypes=[qkv.dtype],
    )
    return attended


@cache
def _share_kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="vcpipe_attend_share",
        input_names=["qkv", "buffer", "position"],
        output_names=["parts"],
        source="attend_share<KV_HEADS, REPEATS, SIZE, SHARES>(qkv, buffer, buffer_shape[2], position[0] + 1, parts);",
        header=_header(),
    )


@cache
def _join_kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="vcpipe_attend_join",
        input_names=["parts"],
        output_names=["attended"],
        source="join_shares<SIZE, SHARES>(parts, attended);",
        header=_header(),
    )


def _header() -> str:
    return included("vcpipe.actors", "warp.cuh") + included("vcpipe.actors.language", "attention_kernel.cuh")
