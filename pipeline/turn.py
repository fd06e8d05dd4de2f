"""One session of the pipeline as the callers of transcription and speech hold it: a turn, one after the other."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

from vcpipe.pipeline.tracks import Delivery, Track
from vcpipe.schemas.errors import StageTimeoutError, VcpipeError

T = TypeVar("T", bound=Track)


@dataclass(frozen=True, slots=True)
class Turn(Generic[T]):
    """Its id, its frames on their way, and what comes back."""

    id: str
    track: T
    deliveries: queue.SimpleQueue[Delivery]

    def wait_opened(self, timeout_s: float) -> None:
        """Until every stage of the route has it. Raises what a stage says against it, StageTimeoutError after the time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                delivery = self.deliveries.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise StageTimeoutError(f"session {self.id} was not opened within {timeout_s:g} s") from None
            if isinstance(delivery, VcpipeError):
                raise delivery
            if delivery == "opened":
                return
