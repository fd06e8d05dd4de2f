"""One pipeline of fakes for all tests that leave it whole; helpers for those that do not."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FAKES
from waiting import wait_until

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.tracks import Delivery
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.geometry import STAGES

CHECKPOINT = Path(__file__).parents[1] / "data" / "tiny" / "bf16"


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for socket names."""
    folder = Path(tempfile.mkdtemp(prefix="vt-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


class Shared:
    """The shared pipeline, its tap's endpoint and everything its listener heard, by session."""

    def __init__(self, tap: str) -> None:
        self.tap = tap
        self.heard: list[tuple[str, Delivery]] = []
        config = PipelineConfig(CHECKPOINT, tap=tap)
        self.pipeline = Pipeline(config, listener=lambda session, d: self.heard.append((session, d)), modules=FAKES)

    def heard_of(self, session: str) -> list[Delivery]:
        return [delivery for name, delivery in self.heard if name == session]

    def all_heard_of(self, session: str) -> list[Delivery]:
        """Of a session that has ended. The listener is told after the session's reader."""
        wait_until(lambda: "ended" in self.heard_of(session), "the listener hears of the end")
        return self.heard_of(session)


@pytest.fixture(scope="session")
def shared(short_folder: Path, fakes_for_children: None) -> Iterator[Shared]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(short_folder))
        patch.setattr(tempfile, "tempdir", None)
        shared = Shared(f"ipc://{short_folder}/tap")
    with shared.pipeline:
        # The last connection of a start is that of the beats: from here on, open files are only those of sessions.
        wait_until(lambda: set(shared.pipeline.beats) == set(STAGES), "every stage's first beat")
        yield shared


@pytest.fixture
def pipeline(shared: Shared) -> Pipeline:
    return shared.pipeline


@pytest.fixture
def start() -> Iterator[Callable[..., Pipeline]]:
    """Starts a pipeline of fakes that the test may break: ``start("tts", "codec", tts="module", step_timeout_s=1.0)``.

    Stages by position (default: all), other modules than ``fakes`` and fields of PipelineConfig by name.
    """
    started: list[Pipeline] = []

    def start(*stages: str, **fields: Any) -> Pipeline:
        stages = stages or tuple(FAKES)
        modules = {stage: fields.pop(stage, "fakes") for stage in stages}
        on_progress = fields.pop("on_progress", lambda loading: None)
        on_start = fields.pop("on_start", lambda pipeline: None)
        config = PipelineConfig(CHECKPOINT, stages=stages, **fields)
        pipeline = Pipeline(config, on_progress, modules=modules, on_start=on_start)
        started.append(pipeline)
        return pipeline

    yield start
    for pipeline in started:
        pipeline.close(graceful_s=1.0)
