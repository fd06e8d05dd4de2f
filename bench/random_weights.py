"""Random weights made on the device, for any module whose parameters have the names of the runtime layout.

A tensor's numbers depend on its full name alone, so that two implementations of one model get the same weights. They are
scaled to keep activations near 1: no overflow, no constant outputs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from vcpipe.actors.stage import Progress

#: Added to the blank's logit: most frames of speech emit no piece, and none may emit the most that is allowed.
_BLANK_BIAS = 4.0
#: Tables whose rows are looked up one by one.
_TABLES = ("rvq_embs", "low_mat")


def fill(module: nn.Module, root: str, config: dict[str, Any], progress: Progress) -> None:
    """Give every parameter of ``module`` a value, in bfloat16 (A_log in float32); ``root`` completes their names.

    Modules named in ``config["quantization"]`` are packed. One module is evaluated at a time, so that next to the weights
    no more than one module's unpacked matrices exist.
    """
    packings: Mapping[str, Any] = config["quantization"] or {}
    codebook_size = config["tts_config"]["codebook_size"]
    drawn = [(name, _draw(root + name, like, codebook_size)) for name, like in tree_flatten(module.parameters())]
    module.update(tree_unflatten(drawn))
    drawn.clear()
    if packings:
        nn.quantize(module, class_predicate=lambda path, _: packings.get(root + path, False))
    leaves = [leaf for _, leaf in module.named_modules() if not leaf.children()]
    for index, leaf in enumerate(leaves):
        mx.eval(leaf.parameters())
        progress("making random weights", index / len(leaves))
    mx.eval(module.parameters())


def _draw(name: str, like: mx.array, codebook_size: int) -> mx.array:
    """The values of one tensor, to be evaluated."""
    key = mx.random.key(zlib.crc32(name.encode()))
    last = name.rpartition(".")[2]
    if not mx.issubdtype(like.dtype, mx.floating):
        if last == "control_codes":
            return codebook_size + mx.arange(3, dtype=like.dtype)
        if last == "codec_silence_tokens":
            return mx.random.randint(0, codebook_size, like.shape, like.dtype, key=key)
        return like
    if last == "A_log":
        return mx.log(1 + 7 * mx.random.uniform(shape=like.shape, key=key))
    if name.endswith("joint_net.2.bias"):
        return mx.where(mx.arange(like.size) == like.size - 1, _BLANK_BIAS, 0.0).astype(mx.bfloat16)
    if last == "dt_bias":
        return mx.random.normal(like.shape, mx.bfloat16, loc=-1.0, scale=0.5, key=key)
    if last in ("bias", "gate", "residual_scale") or _is_offset_norm(name):
        return mx.zeros(like.shape, mx.bfloat16)
    if "norm" in name or last in ("D", "variance"):
        return mx.ones(like.shape, mx.bfloat16)
    fan_in = like.shape[-1] if last in _TABLES else math.prod(like.shape[1:])
    return mx.random.normal(like.shape, mx.bfloat16, scale=max(fan_in, 1) ** -0.5, key=key)


def _is_offset_norm(name: str) -> bool:
    """Whether the weight is one of those to which its layer adds 1: all norms of the speech decoder."""
    stack = name.rpartition(".mlp_stack.")[2].split(".")
    return name.startswith("tts_model.tts_model.") and ("norm" in name or stack == [stack[0], "weight"])
