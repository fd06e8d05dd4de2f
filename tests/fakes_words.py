"""A perception that says what a test wants: the environment variable ``FAKE_WORDS`` maps frames to texts, as JSON.

A text of ``!`` ends the process in that frame.
"""

from __future__ import annotations

import json
import os
import time

from fakes import FakeSession, FakeStage

from vcpipe.actors.stage import Emitter, Progress, StageConfig
from vcpipe.schemas.messages import OpenSession, PcmFrame
from vcpipe.schemas.reports import Transcribed, Transcript


class ScriptedStage(FakeStage):
    def open(self, request: OpenSession) -> tuple[FakeSession, OpenSession]:
        _, answer = super().open(request)
        return ScriptedSession(self.name, {}, 0, request.task), answer


class ScriptedSession(FakeSession):
    def _perception(self, message: PcmFrame, emit: Emitter) -> None:
        text = json.loads(os.environ["FAKE_WORDS"]).get(str(self._frame))
        if text == "!":
            time.sleep(0.2)  # what was said before is sent by another thread
            os._exit(9)
        if text is not None:
            emit.report(Transcript(text))

    def end(self, emit: Emitter) -> None:
        emit.report(Transcribed(self._frame))


def load(config: StageConfig, progress: Progress) -> FakeStage:
    return ScriptedStage(config.stage)
