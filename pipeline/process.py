"""One actor's process as its parent sees it.

The child is a fresh interpreter (never a fork: Metal and CUDA do not survive one) in a session of its own, so that Ctrl-C
reaches the parent alone. Two pipes tie them: the child's stdin, whose end tells it that the parent is gone, and its output,
whose end tells the parent that the child is gone and whose last lines say why where nothing else could.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from vcpipe.actors.entry import ActorConfig

_TAIL_BYTES = 8192


class ActorProcess:
    """A running actor. ``output_fd`` is readable when there is output or the process has ended."""

    def __init__(self, config: ActorConfig, environment: Mapping[str, str], folder: str) -> None:
        self.stage = config.stage
        self._tail = b""
        # An empty folder as working directory: the interpreter looks for modules there first.
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "vcpipe.actors.entry"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(environment),
            cwd=folder,
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._stdin = self._popen.stdin
        self._stdout = self._popen.stdout
        self.output_fd = self._stdout.fileno()
        os.set_blocking(self.output_fd, False)
        with contextlib.suppress(BrokenPipeError):  # it died already; its output's end will tell
            self._stdin.write(config.to_bytes())
            self._stdin.flush()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def output_tail(self) -> str:
        """The last lines the process printed."""
        return self._tail.decode("utf-8", "replace").strip()

    def read_output(self) -> bool:
        """Keep what was printed; returns whether the process can still print (False: it is gone)."""
        try:
            data = os.read(self.output_fd, 65536)
        except BlockingIOError:
            return True
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return bool(data)

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, or None if it still runs after ``timeout_s``."""
        try:
            return self._popen.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """SIGTERM."""
        self._popen.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        self._popen.kill()

    def release(self) -> None:
        """Close the pipes of a process that has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()


def describe_exit(code: int | None) -> str:
    """Exit code or signal in words."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def stop_all(processes: list[ActorProcess], graceful_s: float = 5.0, terminate_s: float = 1.0) -> None:
    """The lower rungs of the stop ladder: wait, SIGTERM, SIGKILL, each bounded; afterwards no process is left."""
    for wait_s, act in ((graceful_s, ActorProcess.terminate), (terminate_s, ActorProcess.kill)):
        deadline = time.monotonic() + wait_s
        for process in [p for p in processes if p.wait(deadline - time.monotonic()) is None]:
            act(process)
    for process in processes:
        process.wait(5.0)
