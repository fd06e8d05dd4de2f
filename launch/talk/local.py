"""A server of one's own, on this machine, for as long as one conversation."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vcpipe.launch.console import LoadingBar
from vcpipe.launch.serve import ServeOptions, bind, served_name, starter
from vcpipe.schemas.errors import ConfigError, RemoteError, VcpipeError

_HOST = "127.0.0.1"
_NO_LIMIT_S = 86400.0

#: Longest wait for a connection to end when the conversation is over, in seconds.
_STOP_S = 1


@contextmanager
def local_server(model: str | None, device: str | None) -> Iterator[tuple[str, str]]:
    """Serve ``model`` inside the block, once it is loaded; yields the address and the key that only this process knows.

    Raises VcpipeError where the model cannot be loaded.
    """
    try:
        import uvicorn

        from vcpipe.launch.server.app import ServerConfig, make_app
        from vcpipe.launch.server.client_connection import Limits
        from vcpipe.launch.server.security import Gate
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'vcpipe[serve]', or give --url") from None
    key = secrets.token_hex(16)
    # Nobody else waits for the session.
    limits = Limits(session_s=_NO_LIMIT_S, idle_s=_NO_LIMIT_S)
    loaded: queue.SimpleQueue[VcpipeError | None] = queue.SimpleQueue()
    start = starter(ServeOptions(model=model, device=device))
    with bind(_HOST, 0) as listener, ExitStack() as bar:
        shown = bar.enter_context(LoadingBar().shown())
        app = make_app(start, ServerConfig(served_name(model), limits=limits), Gate(key), shown.update, loaded.put)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="websockets-sansio",
            ws_per_message_deflate=False,
            timeout_graceful_shutdown=_STOP_S,
            log_level=logging.WARNING,
            access_log=False,
        )
        server = uvicorn.Server(config)

        def run() -> None:
            server.run(sockets=[listener])
            loaded.put(RemoteError("the server of this conversation ended"))

        thread = threading.Thread(target=run, name="vcpipe-server")
        thread.start()
        try:
            if (failure := loaded.get()) is not None:
                raise failure
            bar.close()
            yield f"ws://{_HOST}:{listener.getsockname()[1]}", key
        finally:
            server.should_exit = True
            thread.join()
