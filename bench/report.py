"""Numbers as they are printed: summaries of milliseconds, JSON or a few lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.progress import track

from vcpipe.launch.console import stderr
from vcpipe.pipeline.profile import summarise

T = TypeVar("T")

#: Whoever prints tables indents by this.
_INDENT = "  "


@dataclass(frozen=True, slots=True)
class Measured:
    """``result`` is what is printed; ``stages`` (p50 and p95 in ms) and ``frame_ms`` by name are what is drawn."""

    result: dict[str, Any]
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)
    frame_ms: dict[str, list[float]] = field(default_factory=dict)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p95, max, and the means of the first and the last tenth: growth with history is what users feel."""
    whole, tenth = summarise(values), max(len(values) // 10, 1)
    return {
        "mean": round(whole.mean, 3),
        "p50": round(whole.p50, 3),
        "p95": round(whole.p95, 3),
        "max": round(whole.max, 3),
        "first_tenth": round(summarise(values[:tenth]).mean, 3),
        "last_tenth": round(summarise(values[-tenth:]).mean, 3),
    }


def with_bar(items: Sequence[T]) -> Iterable[T]:
    """The items, with a bar on stderr where that is a terminal."""
    return track(items, "blocks", console=stderr, transient=True, disable=not stderr.is_terminal)


def ratio(numerator: float, denominator: float) -> float:
    """The quotient, three decimals; 0 where nothing was measured."""
    return round(numerator / denominator, 3) if denominator else 0.0


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print to stdout: one line of JSON, or a line a number."""
    if as_json:
        print(json.dumps(result))
        return
    _show(result, "")


def _show(values: dict[str, Any], indent: str) -> None:
    width = max(len(name) for name in values)
    for name, value in values.items():
        if isinstance(value, dict) and not any(isinstance(inner, dict) for inner in value.values()):
            print(f"{indent}{name:<{width}}  " + "  ".join(f"{key} {_text(inner)}" for key, inner in value.items()))
        elif isinstance(value, dict):
            print(f"{indent}{name}")
            _show(value, indent + _INDENT)
        else:
            print(f"{indent}{name:<{width}}  {_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
