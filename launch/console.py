"""What a person at a terminal sees: text on stdout as it comes, progress and tables on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from vcpipe.actors.checkpoint import is_random
from vcpipe.schemas.reports import Loading

stderr = Console(stderr=True, highlight=False)

#: What a decoder shows for bytes that are not a character yet.
_INCOMPLETE = "\ufffd"


def warn(text: str) -> None:
    """One line on stderr."""
    stderr.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


def tell_of(warnings: Iterable[str], checkpoint_config: dict[str, Any]) -> None:
    """What is odd about a model that was loaded: ``warnings`` of its stages, and weights that are random numbers."""
    for line in warnings:
        warn(line)
    if is_random(checkpoint_config):
        stderr.print("random weights: the output is noise")


def fail(text: str) -> None:
    """What went wrong, on stderr."""
    stderr.print(f"[red]error:[/] {escape(text)}", soft_wrap=True)


class StreamedText:
    """Prints a growing text whose end may still be revised: an incomplete character waits until it is whole.

    Without the space that a first word's token begins with.
    """

    def __init__(self) -> None:
        self._printed = 0

    def show(self, text: str) -> None:
        """Print what is new and final in the cumulative ``text``."""
        final = text.rstrip(_INCOMPLETE)
        if len(final) > self._printed:
            print(self._new_in(final), end="", flush=True)
            self._printed = len(final)

    def finish(self, text: str) -> None:
        """Print what is left and end the line."""
        print(self._new_in(text), flush=True)

    def _new_in(self, text: str) -> str:
        new = text[self._printed :]
        return new if text[: self._printed].strip() else new.lstrip()


@contextmanager
def live(console: Console, render: Callable[[], RenderableType]) -> Iterator[None]:
    """Show what still changes below what is printed, inside the block and on a terminal only."""
    if not console.is_terminal:
        yield
    else:
        with Live(console=console, refresh_per_second=10, transient=True, get_renderable=render):
            yield


class LoadingBar:
    """Progress of all stages while they load."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[stage]:>10}"),
            BarColumn(),
            TextColumn("{task.fields[step]}"),
            TimeElapsedColumn(),
            console=stderr,
            transient=True,
            disable=not stderr.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def update(self, loading: Loading) -> None:
        """Show one report; called from the coordinator's thread."""
        if loading.stage not in self._tasks:
            self._tasks[loading.stage] = self._progress.add_task("", total=1.0, stage=loading.stage, step="")
        self._progress.update(self._tasks[loading.stage], completed=loading.fraction, step=loading.step)

    @contextmanager
    def shown(self) -> Iterator[LoadingBar]:
        """Show the bars inside the block."""
        with self._progress:
            yield self


@contextmanager
def frame_bar(total_s: float | None) -> Iterator[Any]:
    """A bar over seconds of audio; yields ``show(seconds)``. Hidden where text and bar would share one terminal."""
    progress = Progress(
        TextColumn("frames"),
        BarColumn(),
        TextColumn("{task.completed:.1f} s of audio"),
        TimeElapsedColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal or sys.stdout.isatty(),
    )
    with progress:
        task = progress.add_task("", total=total_s)
        yield lambda seconds: progress.update(task, completed=seconds)


def print_profile(profile: dict[str, Any]) -> None:
    """Per-stage table of a profiler's summary."""
    table = Table(
        title=f"{profile['frames']} frames, {profile['dropped_cold_frames']} cold ones dropped; milliseconds",
        caption="wait: median time in the stage's queue; first, last: mean of the first and last 100 frames",
    )
    for column in ("stage", "mean", "p50", "p95", "max", "wait", "first", "last"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    rows = {**profile["stages"], "total": profile["total"], "end_to_end": profile["end_to_end"]}
    for name, row in rows.items():
        wait = profile["queue_wait"].get(name)
        window = profile["windows"].get(name)
        table.add_row(
            name.replace("_", " "),
            *(f"{row[key]:.2f}" for key in ("mean", "p50", "p95", "max")),
            f"{wait['p50']:.2f}" if wait else "",
            f"{window['first']:.2f}" if window else "",
            f"{window['last']:.2f}" if window else "",
        )
    stderr.print(table)
    stderr.print(
        f"one frame every {profile['period_ms']:.2f} ms ({profile['pipelined_frames_per_second']:.1f} frames/s, real-time "
        f"factor {profile['pipelined_realtime_factor']:.3f}); the stages one after the other would take "
        f"{profile['total']['mean']:.2f} ms ({profile['realtime_factor']:.3f})"
    )
