"""What an actor's loop needs of a stage. No MLX: the parent may import it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vcpipe.schemas.envelope import Message
from vcpipe.schemas.messages import OpenSession


@dataclass(frozen=True, slots=True)
class StageConfig:
    """Everything an actor is told at its start (it reads no environment variables).

    ``checkpoint``: an existing folder. ``device``: "cpu", "gpu" or None for MLX's default. ``tts_history_frames``: told to the
    tts stage alone, see :class:`vcpipe.schemas.config.PipelineConfig`.
    """

    stage: str
    checkpoint: Path
    device: str | None = None
    tts_history_frames: int | None = None


#: Called while a stage loads: what is being done, and how far it is (0..1).
Progress = Callable[[str, float], None]


class Emitter(Protocol):
    """Where a stage session puts what it has made."""

    def send(self, message: Message, frame_index: int | None = None) -> None:
        """Pass a data message to the next stage of the session's route, if there is one.

        ``frame_index`` defaults to that of the message being stepped.
        """

    def report(self, message: Message, frame_index: int | None = None) -> None:
        """Tell the coordinator."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the step; evaluate its outputs before leaving the block."""


class StageSession(Protocol):
    """State of one session in one stage."""

    def prefill(self) -> None:
        """Bring the state up to the first frame (system prompt, voice prompt).

        Called once, after the request was passed on, so that the stages do this side by side. Raises VcpipeError where
        the request cannot be met.
        """

    def step(self, message: Any, emit: Emitter) -> None:
        """Take one data message (PcmFrame, Projected, TextStep or Codes) through the network."""

    def end(self, emit: Emitter) -> None:
        """End of stream: emit what is still due (offline: everything). The session is dropped afterwards."""


class Stage(Protocol):
    """One network with its weights.

    Made by ``load(config: StageConfig, progress: Progress) -> Stage`` of ``vcpipe.actors.<stage>.actor``.
    """

    name: str
    warnings: list[str]

    @property
    def prompt_codes(self) -> np.ndarray | None:
        """(38, Q) int32 codes of silence; None for every stage but the codec."""

    def warm_up(self) -> None:
        """Run the whole step once on a throw-away session, so that the first frame is not the slow one."""

    def open(self, request: OpenSession) -> tuple[StageSession, OpenSession]:
        """Create a session; returns it and the request as the next stage must see it.

        Raises VcpipeError where the request cannot be met; the session is then refused, the stage goes on.
        """
