"""Compiling a stage's step, with a plain step where that is impossible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx

_log = logging.getLogger("vcpipe.actors")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``mx.compile(function)``, whose first call also evaluates what it returns.

    On a CPU MLX has a C++ compiler build the kernels, once for a machine, and meets its absence only when a result is
    evaluated: the process then goes on uncompiled, to the same results, and says so once. Positions and lengths must be
    arrays: every new Python value would be traced anew.
    """
    fast = mx.compile(function)
    proven = False

    def call(*arguments: Any) -> Any:
        nonlocal proven
        if proven:
            return fast(*arguments)
        try:
            outputs = fast(*arguments)
            mx.eval(outputs)
        except RuntimeError as error:
            mx.disable_compile()  # for the process: no other step would fare better
            _log.warning("steps run uncompiled, which is slower: %s", str(error).strip().partition("\n")[0])
            outputs = fast(*arguments)
        proven = True
        return outputs

    return call
