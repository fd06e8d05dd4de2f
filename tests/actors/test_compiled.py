"""Compiling a step, and going on without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from vcpipe.actors import compiled as module
from vcpipe.actors.compiled import compiled


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_refused", False)


def double(x: mx.array) -> mx.array:
    return x * 2 + 0


def test_a_function_is_traced_and_then_runs_often() -> None:
    traces = []

    def traced(x: mx.array, rest: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
        traces.append(x.shape)
        return double(x), rest[::-1]

    step = compiled(traced)
    for value in range(5):
        x, rest = step(mx.array([value]), [mx.array(1), mx.array(value)])
        assert (x.tolist(), [item.item() for item in rest]) == ([2 * value], [value, 1])
    assert len(traces) <= 2  # MLX traces the first function of a process again


def test_without_a_compiler_steps_run_plain_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disabled = []

    def compile_in_vain(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if not disabled:
                raise RuntimeError("[Compile::eval_cpu] Failed to compile function F\nthe output of g++")
            return function(*arguments)

        return call

    monkeypatch.setattr(mx, "compile", compile_in_vain)
    monkeypatch.setattr(mx, "disable_compile", lambda: disabled.append(True))
    with caplog.at_level(logging.WARNING):
        steps = [compiled(double) for _ in range(3)]
        assert [step(mx.array([index])).item() for index, step in enumerate(steps) for _ in range(2)] == [
            0,
            0,
            2,
            2,
            4,
            4,
        ]
    assert [record.getMessage() for record in caplog.records] == [
        "steps run uncompiled, which is slower: [Compile::eval_cpu] Failed to compile function F"
    ]


def test_a_compiler_that_is_not_there_is_noticed_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLX says nothing then and calls the function every time."""
    monkeypatch.setattr(mx, "compile", lambda function: function)
    with caplog.at_level(logging.WARNING):
        steps = [compiled(double) for _ in range(3)]
        assert [step(mx.array([1])).item() for step in steps for _ in range(2)] == [2] * 6
    assert [record.getMessage() for record in caplog.records] == [
        "steps run uncompiled, which is slower: no C++ compiler was found"
    ]


def test_errors_of_the_function_itself_come_through() -> None:
    with pytest.raises(ValueError, match="shapes"):
        compiled(lambda x: x + mx.zeros((3,)))(mx.zeros((2,)))
