"""Child entry point: ``python -m vcpipe.actors.entry`` reads its configuration from stdin and becomes one actor.

stdin stays open for the life of the parent: its end means that the parent is gone, however it went, and the actor leaves at
once, also while it loads. The stage's module is imported by name here, so the parent never loads MLX.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import select
import shutil
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from vcpipe.actors.base import ActorLoop
from vcpipe.actors.stage import Stage, StageConfig
from vcpipe.actors.wire import StageEndpoints, StageWire, new_context
from vcpipe.schemas.envelope import PROTOCOL
from vcpipe.schemas.errors import ConfigError, VcpipeError
from vcpipe.schemas.reports import Beat, Failed, Loading, Ready

_BEAT_S = 1.0
#: An orphan tries so often to remove the socket folder: its own main thread, or another orphan's, may just make a socket there.
_REMOVALS = 5
#: Exit code after Failed was sent; the parent reads the reason from the report.
EXIT_FAILED = 1
#: Exit code of an actor whose parent is gone.
EXIT_ORPHANED = 3
#: Exit code after the reason was printed, where there was no pipe to report it on.
EXIT_PRINTED = 4


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """What a child is told on stdin: its StageConfig and its pipes.

    ``ipc_folder``: private socket folder, removed by an orphan; "" for none.
    """

    stage: str
    module: str
    checkpoint: str
    device: str | None
    tts_history_frames: int | None
    endpoints: StageEndpoints
    ipc_folder: str

    def to_bytes(self) -> bytes:
        """Length-prefixed msgpack."""
        body = msgpack.packb(asdict(self))
        return len(body).to_bytes(4, "little") + body

    @classmethod
    def read(cls, stream: BinaryIO) -> ActorConfig:
        """Inverse of :meth:`to_bytes`."""
        fields: dict[str, Any] = msgpack.unpackb(stream.read(int.from_bytes(stream.read(4), "little")))
        return cls(**{**fields, "endpoints": StageEndpoints(**fields["endpoints"])})


def main() -> None:
    faulthandler.enable()
    config = ActorConfig.read(sys.stdin.buffer)
    threading.Thread(target=_leave_with_parent, args=(config.ipc_folder, os.getppid()), daemon=True).start()
    try:
        wire = StageWire(new_context(), config.endpoints)
    except ConfigError as error:
        # There is no pipe to say it on: the parent reads what is printed.
        print(error, flush=True)
        os._exit(EXIT_PRINTED)
    try:
        _serve(config, wire)
    except Exception as error:
        _report_failure(config.stage, wire, error)
        sys.stdout.flush()
        os._exit(EXIT_FAILED)
    finally:
        wire.context.destroy(linger=2000)
    # Everything is freed and said: skipping the interpreter's teardown spares MLX's, which may outlive its device.
    os._exit(0)


def _serve(config: ActorConfig, wire: StageWire) -> None:
    def progress(step: str, fraction: float) -> None:
        wire.reports.send(Loading(config.stage, step, fraction))

    progress("starting", 0.0)
    runtime = _import_runtime()
    stage_config = StageConfig(config.stage, Path(config.checkpoint), config.device, config.tts_history_frames)
    started = time.monotonic()
    runtime.set_up(stage_config)
    stage: Stage = importlib.import_module(config.module).load(stage_config, progress)
    loaded = time.monotonic()
    progress("warming up", 1.0)
    stage.warm_up()
    runtime.free_memory()
    warm = time.monotonic()
    loop = ActorLoop(stage, wire, runtime.free_memory)
    threading.Thread(target=_beat, args=(config.stage, wire, loop, runtime), daemon=True).start()
    wire.reports.send(
        Ready(
            stage=config.stage,
            protocol=PROTOCOL,
            pid=os.getpid(),
            device=runtime.device_name(),
            mlx_version=runtime.mlx_version(),
            load_s=loaded - started,
            warm_up_s=warm - loaded,
            memory_bytes=runtime.memory_bytes(),
            warnings=stage.warnings,
            prompt_codes=stage.prompt_codes,
        )
    )
    loop.run()


def _import_runtime() -> Any:
    """The module that first needs MLX."""
    try:
        return importlib.import_module("vcpipe.actors.runtime")
    except ImportError as error:
        raise ConfigError(
            f"MLX cannot be loaded ({error}); on Linux it needs a backend: install vcpipe with the extra cpu or cuda, "
            "for instance python3 -m pip install 'vcpipe[cpu]'"
        ) from error


def _report_failure(stage: str, wire: StageWire, error: Exception) -> None:
    expected = isinstance(error, VcpipeError)
    trace = "" if expected else traceback.format_exc()
    text = str(error) if expected else f"{type(error).__name__}: {error}"
    try:
        wire.reports.send(Failed(stage, text, trace, expected))
        wire.context.destroy(linger=2000)
    except Exception:
        # The pipe to the parent is gone too: stderr, which the parent keeps the end of, is what is left.
        traceback.print_exc()


def _beat(stage: str, wire: StageWire, loop: ActorLoop, runtime: Any) -> None:
    """Once a second, by a thread with its own socket. What finds no room is dropped: the next one is as good."""
    reporter = wire.new_reporter()
    while True:
        beat = Beat(
            stage=stage,
            busy_since_ns=loop.busy_since_ns,
            sessions=loop.open_sessions,
            rss_bytes=runtime.rss_bytes(),
            mlx_bytes=runtime.memory_bytes(),
            mlx_cache_bytes=runtime.cache_bytes(),
        )
        reporter.try_send(beat)
        time.sleep(_BEAT_S)


def _leave_with_parent(ipc_folder: str, parent: int) -> None:
    """Wait for the end of stdin or for another parent (a copy of the pipe's end may live on in a forked process)."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _BEAT_S)
        if readable and not os.read(0, 1):
            break
    for _ in range(_REMOVALS):
        if not os.path.isdir(ipc_folder):
            break
        shutil.rmtree(ipc_folder, ignore_errors=True)
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    main()
