"""Compiling a stage's step, with a plain step where that is impossible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx

_log = logging.getLogger("vcpipe.actors")

#: Whether this process has met a compiler that does not work, and said so.
_refused = False


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``mx.compile(function)``, whose first call also evaluates what it returns.

    On a CPU MLX has a C++ compiler build the kernels, once for a machine. One that fails is met only when a result is
    evaluated; where MLX finds none it says nothing and calls ``function`` every time. The process goes on uncompiled then, to
    the same results, and says so once. Positions and lengths must be arrays: every new Python value would be traced anew.
    """
    fast = mx.compile(function)
    proven = False

    def call(*arguments: Any) -> Any:
        nonlocal proven
        if proven:
            return fast(*arguments)
        proven = True
        try:
            outputs = fast(*arguments)
            mx.eval(outputs)
        except RuntimeError as error:
            mx.disable_compile()  # for the process: no other step would fare better
            _refuse(str(error).strip().partition("\n")[0])
            return fast(*arguments)
        if not _traces_once():
            _refuse("no C++ compiler was found")
        return outputs

    return call


def _traces_once() -> bool:
    """Whether a compiled function is called to be traced, and no more. MLX may trace the first one of a process twice."""
    traces = []

    def probe(x: mx.array) -> mx.array:
        traces.append(x.shape)
        return 2 * x + 1

    fast, x = mx.compile(probe), mx.array(1.0)
    fast(x), fast(x)
    before = len(traces)
    fast(x)
    return len(traces) == before


def _refuse(problem: str) -> None:
    global _refused
    if not _refused:
        _log.warning("steps run uncompiled, which is slower: %s", problem)
    _refused = True
