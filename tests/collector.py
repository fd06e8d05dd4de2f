"""Collects what a stage session sends and reports, so that a stage can be tested without processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Collector:
    """An Emitter that keeps everything: ``sent`` and ``reported`` hold (frame_index, message) in order."""

    def __init__(self) -> None:
        self.frame_index = 0
        self.sent: list[tuple[int, Any]] = []
        self.reported: list[tuple[int, Any]] = []
        self.spans: list[str] = []

    def send(self, message: Any, frame_index: int | None = None) -> None:
        self.sent.append((self.frame_index if frame_index is None else frame_index, message))

    def report(self, message: Any, frame_index: int | None = None) -> None:
        self.reported.append((self.frame_index if frame_index is None else frame_index, message))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.spans.append(name)
        yield
