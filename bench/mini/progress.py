"""Lines on stderr that tell how far something slow is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from vcpipe.launch.console import stderr

T = TypeVar("T")

_SECONDS = 5.0


def told(items: Sequence[T], what: str) -> Iterator[T]:
    """The items; every few seconds a line with how many of them are done and how long the rest will take."""
    said = began = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - said > _SECONDS or done == len(items):
            said, left_s = now, (now - began) / done * (len(items) - done)
            stderr.print(f"{what}: {done} of {len(items)}, {left_s / 60:.1f} minutes left", markup=False)
