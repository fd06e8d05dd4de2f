"""Counters of the speech routes, as Prometheus text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from vcpipe.launch.server.metrics import Histogram


class SpeechMetrics:
    """Turns since the server's start. For the event loop. ``error``: counts an error by its code, with those of all routes."""

    def __init__(self, error: Callable[[str], None]) -> None:
        self.error = error
        self._turns: Counter[str] = Counter()
        self._first_sound = Histogram()

    def turn_ended(self, end: str) -> None:
        """A turn ended: done, cancelled, disconnected, limit, fault."""
        self._turns[end] += 1

    def first_sound(self) -> Callable[[], None]:
        """A watch that is started with a turn's first text, to be called with its sound; the first call counts."""
        started = time.monotonic()
        heard = False

        def hear() -> None:
            nonlocal heard
            if not heard:
                heard = True
                self._first_sound.add(time.monotonic() - started)

        return hear

    def text(self) -> str:
        """Prometheus text, version 0.0.4."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterable[str]:
        yield "# TYPE vcpipe_speech_turns_total counter"
        for end, count in sorted(self._turns.items()):
            yield f'vcpipe_speech_turns_total{{end="{end}"}} {count}'
        yield "# TYPE vcpipe_speech_first_sound_seconds histogram"
        yield from self._first_sound.lines("vcpipe_speech_first_sound_seconds", "")
