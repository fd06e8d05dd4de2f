"""Draws what runs logged: one row of panels a run, a panel for each number named.

python -m vcpipe.bench.mini.curves --out FILE.png RUN:loss,mel_all RUN:dev_wer ...
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any


def series(run: Path, name: str) -> tuple[list[float], list[float]]:
    """Seconds and values of a number in a run's log. ValueError where it was never logged."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [(line["seconds"], line[name]) for line in lines if name in line]
    if not found:
        known = sorted({key for line in lines for key in line} - {"seconds", "step"})
        raise ValueError(f"{run.name} logged no {name}; it logged {', '.join(known)}")
    seconds, values = zip(*found, strict=True)
    return list(seconds), list(values)


def draw(wanted: list[tuple[Path, list[str]]], out: Path) -> None:
    """Write the picture. Needs matplotlib."""
    figure_class: Any = importlib.import_module("matplotlib.figure").Figure
    columns = max(len(names) for _, names in wanted)
    figure = figure_class(figsize=(3.4 * columns, 2.3 * len(wanted)), layout="constrained")
    axes = figure.subplots(len(wanted), columns, squeeze=False)
    for row, (run, names) in zip(axes, wanted, strict=True):
        for panel in row[len(names) :]:
            panel.axis("off")
        for panel, name in zip(row, names, strict=False):
            panel.plot(*series(run, name), linewidth=1.2)
            panel.set_title(f"{run.name}: {name}", fontsize=9)
            panel.tick_params(labelsize=7)
            panel.grid(alpha=0.3)
        row[0].set_xlabel("seconds", fontsize=7)
    figure.savefig(out, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw what runs logged.")
    parser.add_argument("wanted", nargs="+", metavar="RUN:NAME,...", help="a run's folder and the numbers to draw")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    pairs = [entry.rpartition(":") for entry in options.wanted]
    draw([(Path(run), names.split(",")) for run, _, names in pairs], options.out)


if __name__ == "__main__":
    main()
