"""A child process that is asked for one thing at a time: JSON lines over its stdin and stdout.

Whatever uses MLX and is no actor runs in such a child, with the environment an actor gets. Between requests it is idle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import Any

from vcpipe.pipeline.environment import actor_environment
from vcpipe.pipeline.process import describe_exit
from vcpipe.schemas.errors import ActorDiedError, ConfigError, VcpipeError

Reply = dict[str, Any]
Handler = Callable[..., Reply]

_STOP_S = 20.0


class Worker:
    """The parent's end: ``Worker(module, facts)`` starts ``python -m module FACTS``; :attr:`ready` is its first line.

    Raises ConfigError for what the child says the user can mend, ActorDiedError where it ends otherwise.
    """

    def __init__(self, module: str, facts: dict[str, Any]) -> None:
        self._module = module
        # A file, not a pipe: nobody reads along, and a full pipe would stop the child. Closed by close().
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(facts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=actor_environment(),
        )
        try:
            self.ready = self._read()
        except BaseException:
            self.close()
            raise

    def ask(self, request: str, **fields: Any) -> Reply:
        """Send a request and wait for its reply."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"request": request, **fields}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        return self._read()

    def close(self) -> None:
        """End its input, which ends the child; kill it where that does not help."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_STOP_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # nobody waits for a long step then
            self._process.kill()
        self.close()

    def _read(self) -> Reply:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        reply: Reply = json.loads(line)
        if "error" in reply:
            raise ConfigError(reply["error"])
        return reply

    def _death(self) -> ActorDiedError:
        code = self._process.wait()
        self._errors.seek(0)
        last_words = self._errors.read()[-4000:].strip()
        return ActorDiedError(f"{self._module} ended ({describe_exit(code)}); its last words:\n{last_words}")


def serve(start: Callable[[dict[str, Any]], tuple[Reply, dict[str, Handler]]]) -> None:
    """The child's end: ``start`` gets the facts and returns the first line and a handler for each request."""
    # Libraries may print: only this copy of stdout carries replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(line: Reply) -> None:
        replies.write(json.dumps(line) + "\n")
        replies.flush()

    try:
        ready, handlers = start(json.loads(sys.argv[1]))
        reply(ready)
        for line in sys.stdin:
            fields = json.loads(line)
            reply(handlers[fields.pop("request")](**fields))
    except VcpipeError as error:
        reply({"error": str(error)})
    finally:
        replies.close()
    # As an actor leaves: MLX's teardown may outlive its device.
    os._exit(0)
