"""The picture of a measurement: what each stage takes of the 80 ms, and the time per frame over the session."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from vcpipe.bench.report import Measured
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.geometry import FrameGeometry

_FRAME_MS = FrameGeometry().frame_duration_s * 1e3


def check_plot(path: Path) -> None:
    """Before anything is measured: ConfigError where the picture could not be drawn or written."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError("--plot needs matplotlib; python3 -m pip install 'vcpipe[bench]'") from None
    if path.suffix.lower() not in (".png", ".svg", ".pdf") or not path.resolve().parent.is_dir():
        raise ConfigError(
            f"the picture cannot be written to {path}; accepted: a .png, .svg or .pdf in a folder there is"
        )


def draw(measured: Measured, path: Path) -> None:
    """Write the picture."""
    figure_class: Any = importlib.import_module("matplotlib.figure").Figure
    figure = figure_class(figsize=(10, 4), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    names = list(measured.stages)
    bars.bar(names, [p95 for _, p95 in measured.stages.values()], color="#c8d6e5", label="p95")
    bars.bar(names, [p50 for p50, _ in measured.stages.values()], color="#1f5f99", label="p50")
    bars.axhline(_FRAME_MS, color="#b03030", linewidth=1, label=f"frame, {_FRAME_MS:.0f} ms")
    bars.set_ylabel("ms a frame")
    for name, values in measured.frame_ms.items():
        lines.plot(values, linewidth=0.8, label=name)
    lines.axhline(_FRAME_MS, color="#b03030", linewidth=1)
    lines.set_xlabel("frame")
    for axes in (bars, lines):
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    result = measured.result
    figure.suptitle(f"{result['bench']}: {result['model']} on {result['device']}, mlx {result['mlx']}")
    figure.savefig(path, dpi=120)
