"""``python -m vcpipe.bench``, also ``vcpipe bench``: the measurements, one command each."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vcpipe.bench.report import Measured, show

if TYPE_CHECKING:
    from vcpipe.bench.target import Target

app = typer.Typer(
    help="Measure on this machine. Neither --model nor --shape: the embedded checkpoint, which is very small.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Shape(str, Enum):
    """Sizes of models with random weights."""

    tiny = "tiny"
    mini = "mini"
    full = "11b"


class Device(str, Enum):
    """Where MLX computes."""

    cpu = "cpu"
    gpu = "gpu"


Model = Annotated[str | None, typer.Option("--model", "-m", metavar="DIR_OR_NAME", help="Checkpoint to measure.")]
ShapeOf = Annotated[
    Shape | None, typer.Option("--shape", metavar="tiny|mini|11b", help="Random weights in these shapes instead.")
]
Bits = Annotated[int | None, typer.Option(metavar="0|4|8", help="With --shape: bits of the language model.")]
DeviceName = Annotated[Device | None, typer.Option(metavar="cpu|gpu", help="Default: what MLX prefers.")]
Frames = Annotated[int, typer.Option(metavar="N", min=2, help="Frames measured in each block.")]
Warm = Annotated[int, typer.Option(metavar="N", min=1, help="Frames before them that do not count.")]
Rounds = Annotated[int, typer.Option(metavar="N", min=1, help="Blocks.")]
Peer = Annotated[bool, typer.Option("--peer", help="Alternate with mlx-vlm on the same weights; print ratios.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]
TtsHistory = Annotated[
    int | None,
    typer.Option(
        "--tts-history-frames", metavar="N", help="The speech decoder sees its last N frames; default: its own window."
    ),
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw stages and time per frame.")]


def _report(measure: Callable[[], Measured], as_json: bool, plot: Path | None = None) -> None:
    """Measure, draw, print."""
    from vcpipe.bench.plot import check_plot, draw

    if plot is not None:
        check_plot(plot)
    measured = measure()
    if plot is not None:
        draw(measured, plot)
    show(measured.result, as_json)


def _report_stage(
    part: str, target: Target, frames: int, warm: int, rounds: int, peer: bool, as_json: bool, plot: Path | None
) -> None:
    from vcpipe.bench.stage import measure

    _report(lambda: measure(part, target, frames, warm, rounds, peer), as_json, plot)


def _add_stage(part: str, title: str) -> None:
    def command(
        model: Model = None,
        shape: ShapeOf = None,
        bits: Bits = None,
        frames: Frames = 200,
        warm: Warm = 20,
        rounds: Rounds = 3,
        device: DeviceName = None,
        peer: Peer = False,
        as_json: AsJson = False,
        plot: Plot = None,
    ) -> None:
        from vcpipe.bench.target import open_target

        with open_target(model, shape and shape.value, bits, device and device.value) as target:
            _report_stage(part, target, frames, warm, rounds, peer, as_json, plot)

    app.command(part, help=title)(command)


_add_stage("perception", "The encoder: PCM to projected frames.")
_add_stage("rnnt", "The transcript of encoded frames.")
_add_stage("language", "Nemotron-H and both heads.")


@app.command()
def tts(
    model: Model = None,
    shape: ShapeOf = None,
    bits: Bits = None,
    frames: Frames = 200,
    warm: Warm = 20,
    rounds: Rounds = 3,
    device: DeviceName = None,
    tts_history_frames: TtsHistory = None,
    peer: Peer = False,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Text ids to codec codes."""
    from vcpipe.bench.target import open_target

    with open_target(model, shape and shape.value, bits, device and device.value, tts_history_frames) as target:
        _report_stage("tts", target, frames, warm, rounds, peer, as_json, plot)


_add_stage("codec", "Codes to samples.")


@app.command()
def pipeline(
    model: Model = None,
    shape: ShapeOf = None,
    bits: Bits = None,
    frames: Frames = 100,
    warm: Warm = 20,
    rounds: Rounds = 3,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", min=3, help="Length of the system prompt.")] = 200,
    device: DeviceName = None,
    tts_history_frames: TtsHistory = None,
    peer: Peer = False,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """All stages: throughput, latency, opening."""
    from vcpipe.bench.pipeline import Plan, measure
    from vcpipe.bench.target import open_target

    plan = Plan(frames, warm, rounds, prompt_tokens)
    with open_target(model, shape and shape.value, bits, device and device.value, tts_history_frames) as target:
        _report(lambda: measure(target, plan, peer), as_json, plot)


@app.command()
def hops(frames: Frames = 500, warm: Warm = 50, as_json: AsJson = False) -> None:
    """Messaging: actors that compute nothing."""
    from vcpipe.bench.hops import measure

    _report(lambda: measure(frames, warm), as_json)


@app.command()
def overlap(
    model: Model = None,
    shape: ShapeOf = None,
    bits: Bits = None,
    frames: Frames = 200,
    rounds: Rounds = 3,
    device: DeviceName = None,
    tts_history_frames: TtsHistory = None,
    as_json: AsJson = False,
) -> None:
    """Frames overlapping against one at a time."""
    from vcpipe.bench.overlap import measure
    from vcpipe.bench.target import open_target

    with open_target(model, shape and shape.value, bits, device and device.value, tts_history_frames) as target:
        _report(lambda: measure(target, frames, rounds), as_json)


@app.command()
def soak(
    model: Model = None,
    shape: ShapeOf = None,
    bits: Bits = None,
    frames: Annotated[int, typer.Option(metavar="N", min=400, help="Length of the session.")] = 12000,
    device: DeviceName = None,
    tts_history_frames: TtsHistory = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """A long session: does time or memory grow?"""
    from vcpipe.bench.soak import measure
    from vcpipe.bench.target import open_target

    with open_target(model, shape and shape.value, bits, device and device.value, tts_history_frames) as target:
        _report(lambda: measure(target, frames), as_json, plot)


def main(name: str = "python -m vcpipe.bench") -> None:
    """Entry point; ``name`` is what a user typed to get here."""
    from vcpipe.launch.cli import run_app

    run_app(lambda: app(prog_name=name))


if __name__ == "__main__":
    main()
