"""``vcpipe serve``: checks the options, binds the port, answers at once, loads the model meanwhile."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from vcpipe.actors.checkpoint import resolve_checkpoint
from vcpipe.launch.console import LoadingBar, stderr, tell_of, warn
from vcpipe.launch.library import EMBEDDED_CHECKPOINT
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.errors import ConfigError, VcpipeError

if TYPE_CHECKING:
    import uvicorn

    from vcpipe.launch.server.engine import Hooks

#: Served name of the checkpoint that comes with the package.
EMBEDDED_NAME = "vcpipe-embedded"
#: Longest wait for connections to end when the server is stopped.
_STOP_S = 2


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command line asked for; see ``vcpipe serve --help``."""

    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    allow_origin: tuple[str, ...] = ()
    max_sessions: int = 1
    max_transcriptions: int = 4
    max_speech: int = 1
    max_upload_bytes: int = 100 * 2**20
    max_upload_seconds: float = 4 * 3600.0
    max_seconds: float = 600.0
    configure_timeout: float = 30.0
    idle_timeout: float = 120.0
    max_message_bytes: int = 2**20
    tap: str | None = None
    device: str | None = None
    tts_history_frames: int | None = None

    def __post_init__(self) -> None:
        positive = ("max_sessions", "max_transcriptions", "max_speech", "max_seconds", "configure_timeout")
        for name in (*positive, "idle_timeout", "max_upload_bytes", "max_upload_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, not {getattr(self, name):g}")
        if self.max_message_bytes < 1024:
            raise ConfigError(f"--max-message-bytes must be at least 1024, not {self.max_message_bytes}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be from 0 to 65535, not {self.port}")


def serve(options: ServeOptions) -> None:
    """Serve until a signal comes. Raises VcpipeError for what the user can mend, or where the model cannot be loaded."""
    try:
        import uvicorn

        from vcpipe.launch.server.app import ServerConfig, make_app
        from vcpipe.launch.server.client_connection import Limits
        from vcpipe.launch.server.http_protocol import StoppingProtocol
        from vcpipe.launch.server.security import Gate, is_loopback
        from vcpipe.launch.server.speech_thread import SpeechLimits
        from vcpipe.launch.server.uploads import UploadLimits
        from vcpipe.launch.server.websocket_protocol import LingeringProtocol
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'vcpipe[serve]'") from None
    gate = Gate(options.api_key, options.allow_origin)
    start = starter(options)
    limits = Limits(session_s=options.max_seconds, configure_s=options.configure_timeout, idle_s=options.idle_timeout)
    config = ServerConfig(
        model=served_name(options.model),
        max_sessions=options.max_sessions,
        limits=limits,
        max_transcriptions=options.max_transcriptions,
        uploads=UploadLimits(options.max_upload_bytes, options.max_upload_seconds),
        max_speech=options.max_speech,
        speech=SpeechLimits(turn_s=options.max_seconds),
    )
    listener = bind(options.host, options.port)
    if not is_loopback(listener.getsockname()[0]) and not gate.has_key:
        warn(f"{options.host} can be reached by others and there is no --api-key: anybody may take the session")
    with listener, ExitStack() as bar:
        shown = bar.enter_context(LoadingBar().shown())
        failures: list[VcpipeError] = []
        was_ready: list[bool] = []
        started = time.monotonic()

        def loaded(error: VcpipeError | None) -> None:
            bar.close()
            if error is None:
                stderr.print(f"ready after {time.monotonic() - started:.1f} s", highlight=False)
                was_ready.append(True)
            elif not was_ready:  # a model that was there once may be there again for the next session
                failures.append(error)
                server.should_exit = True

        app = make_app(start, config, gate, shown.update, loaded)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=StoppingProtocol,
                ws=LingeringProtocol,
                ws_max_size=options.max_message_bytes,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=_STOP_S,
                log_level=logging.WARNING,
                access_log=False,
            )
        )
        stderr.print(f"listening on {_url(listener)}, loading {config.model}", markup=False, soft_wrap=True)
        with _hang_up_ends(server) as hung_up:
            server.run(sockets=[listener])
    if failures:
        raise failures[0]
    if hung_up:
        raise SystemExit(128 + hung_up[0])


def served_name(model: str | None) -> str:
    """The name under which clients know the model: a Hub name as it is, of a folder the last part."""
    if model is None:
        return EMBEDDED_NAME
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError naming the port where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        hint = "; take another --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}{hint}") from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def starter(options: ServeOptions) -> Callable[[Hooks], Pipeline]:
    """Starts a pipeline on the model that the command line names; a client has no say in it."""

    def start(hooks: Hooks) -> Pipeline:
        checkpoint = EMBEDDED_CHECKPOINT if options.model is None else resolve_checkpoint(options.model)
        config = PipelineConfig(
            checkpoint,
            device=options.device,
            tap=options.tap,
            tts_history_frames=options.tts_history_frames,
        )
        pipeline = Pipeline(config, hooks.on_progress, hooks.listener, on_start=hooks.on_start)
        tell_of(pipeline.warnings, pipeline.checkpoint_config)
        return pipeline

    return start


@contextmanager
def _hang_up_ends(server: uvicorn.Server) -> Iterator[list[int]]:
    """SIGHUP ends the server in good order, as SIGINT and SIGTERM do by themselves; yields the signals that came."""
    came: list[int] = []

    def hang_up(number: int, frame: FrameType | None) -> None:
        came.append(number)
        server.should_exit = True

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGHUP, hang_up)
    try:
        yield came
    finally:
        signal.signal(signal.SIGHUP, before)
