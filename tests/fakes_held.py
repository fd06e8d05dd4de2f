"""A perception that waits in a step while the file is there that the environment variable ``FAKE_HOLD`` names.

It leaves a file beside it, of the same name and ``.met``, when it begins to wait.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from fakes import FakeSession, FakeStage

from vcpipe.actors.stage import Emitter, Progress, StageConfig
from vcpipe.schemas.messages import OpenSession, PcmFrame


class HeldStage(FakeStage):
    def open(self, request: OpenSession) -> tuple[FakeSession, OpenSession]:
        _, answer = super().open(request)
        return HeldSession(self.name, {}, 0, request.task), answer


class HeldSession(FakeSession):
    def _perception(self, message: PcmFrame, emit: Emitter) -> None:
        hold = Path(os.environ["FAKE_HOLD"])
        while hold.exists():
            hold.with_suffix(".met").touch()
            time.sleep(0.005)
        super()._perception(message, emit)


def load(config: StageConfig, progress: Progress) -> FakeStage:
    return HeldStage(config.stage)
