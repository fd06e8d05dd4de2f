"""Waiting in tests. How long something takes on a machine that is busy with other things says nothing about the code."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

#: Bound of a wait for what must happen, in seconds: a test that has to wait so long has failed.
PATIENCE_S = 60.0


def wait_until(reached: Callable[[], object], what: str = "it", timeout_s: float = PATIENCE_S) -> None:
    """Return once ``reached`` is true."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; one that nobody has waited for yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_quick(attempt: Callable[[], float], within_s: float, attempts: int = 6) -> None:
    """One of a few attempts takes less than so long; each returns its seconds. Other work only ever makes them slower."""
    seconds: list[float] = []
    while not seconds or seconds[-1] >= within_s:
        assert len(seconds) < attempts, f"never within {within_s:g} s: {seconds}"
        seconds.append(attempt())
