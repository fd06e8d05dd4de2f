"""Stages that compute nothing and send messages of the 11B model's real sizes: what is left is the messaging."""

from __future__ import annotations

from typing import Any

import numpy as np

from vcpipe.actors.stage import Emitter, Progress, StageConfig
from vcpipe.schemas.envelope import Header, Message, join, pack
from vcpipe.schemas.messages import Codes, OpenSession, PcmFrame, Projected, TextStep
from vcpipe.schemas.reports import AudioFrame, Tokens

_INPUT_SAMPLES, _HIDDEN, _CODEBOOKS, _OUTPUT_SAMPLES = 1280, 4480, 31, 1764
_CODES = np.zeros(_CODEBOOKS, np.int32)

#: What a stage passes on and what it reports, every frame.
_SENT: dict[str, Message] = {
    "perception": Projected(np.zeros((1, 1, _HIDDEN), np.float32)),
    "language": TextStep(12),
    "tts": Codes(_CODES),
}
_REPORTED: dict[str, Message] = {
    "language": Tokens(1000, 12, text_delta=" word", text_append=" word"),
    "codec": AudioFrame(np.zeros(_OUTPUT_SAMPLES, np.float32), _CODES),
}


def frame_bytes() -> list[int]:
    """Bytes of a frame's messages hop by hop: into each stage and, with the speech, out of the last."""
    messages = [PcmFrame(np.zeros(_INPUT_SAMPLES, np.float32)), *_SENT.values(), _REPORTED["codec"]]
    return [len(join(pack(Header("session", 0, 0, 0, 0), message))) for message in messages]


class NullStage:
    """Stage and session in one: there is no state."""

    prompt_codes: np.ndarray | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.warnings: list[str] = []

    def warm_up(self) -> None:
        """Nothing gets warm."""

    def open(self, request: OpenSession) -> tuple[NullStage, OpenSession]:
        """Itself."""
        return self, request

    def prefill(self) -> None:
        """No prompt is taken in."""

    def step(self, message: Any, emit: Emitter) -> None:
        """Pass on what a real stage would."""
        with emit.span(self.name):
            pass
        if self.name in _SENT:
            emit.send(_SENT[self.name])
        if self.name in _REPORTED:
            emit.report(_REPORTED[self.name])

    def end(self, emit: Emitter) -> None:
        """Nothing is due."""


def load(config: StageConfig, progress: Progress) -> NullStage:
    """A stage without weights."""
    return NullStage(config.stage)
