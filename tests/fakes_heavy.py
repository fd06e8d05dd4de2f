"""A fake stage whose every step takes 20 ms."""

from __future__ import annotations

from dataclasses import replace

from fakes import FakeSession, FakeStage

from vcpipe.actors.stage import Progress, StageConfig
from vcpipe.schemas.messages import OpenSession


class HeavyStage(FakeStage):
    def open(self, request: OpenSession) -> tuple[FakeSession, OpenSession]:
        slow = replace(request, system_prompt=f"{self.name}:sleep=0.02")
        return super().open(slow)[0], request


def load(config: StageConfig, progress: Progress) -> HeavyStage:
    return HeavyStage(config.stage)
