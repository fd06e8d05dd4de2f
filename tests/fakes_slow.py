"""A fake stage that loads for ever."""

from __future__ import annotations

import time

from fakes import FakeStage

from vcpipe.actors.stage import Progress, StageConfig


def load(config: StageConfig, progress: Progress) -> FakeStage:
    progress("loading", 0.1)
    time.sleep(3600)
    return FakeStage(config.stage)
