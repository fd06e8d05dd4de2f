"""``python -m vcpipe.bench``: the measurements, one command each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vcpipe.launch.library import EMBEDDED_CHECKPOINT

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Model = Annotated[
    Path, typer.Option("--model", "-m", metavar="FOLDER", help="Checkpoint folder.", show_default="the embedded one")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]


@app.command()
def overlap(
    model: Model = EMBEDDED_CHECKPOINT,
    frames: Annotated[int, typer.Option(metavar="N", help="Frames of each measured block.")] = 200,
    rounds: Annotated[int, typer.Option(metavar="N", help="Alternating blocks of each kind.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Throughput with frames overlapping against the same actors with one frame at a time."""
    from vcpipe.bench.overlap import measure, show

    show(measure(model, frames, rounds), as_json)


@app.command()
def soak(
    model: Model = EMBEDDED_CHECKPOINT,
    frames: Annotated[int, typer.Option(metavar="N", help="Length of the session.")] = 3000,
    as_json: AsJson = False,
) -> None:
    """A long session: time per frame and memory of each actor, early against late."""
    from vcpipe.bench.soak import measure, show

    show(measure(model, frames), as_json)


if __name__ == "__main__":
    app()
