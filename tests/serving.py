"""A server in this process on a port of its own, a pipeline of plain arithmetic for it, and a client to try it with."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import queue
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import uvicorn
from waiting import PATIENCE_S, wait_until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from vcpipe.launch.server.app import ServerConfig, make_app
from vcpipe.launch.server.client_connection import Limits
from vcpipe.launch.server.engine import Hooks, Start
from vcpipe.launch.server.http_protocol import StoppingProtocol
from vcpipe.launch.server.security import Gate
from vcpipe.launch.server.websocket_protocol import LingeringProtocol
from vcpipe.pipeline.tracks import FrameTiming
from vcpipe.schemas.config import SessionOptions
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry

FRAME = 1280
MODEL = "tiny"
#: After so long a server that is stopped breaks off what has not ended by itself; no test waits for that.
STOP_S = 30
#: Of a conversation, what tells how far it came.
AUDIO_AND_ENDS = (
    "response.audio.delta",
    "input_audio_buffer.committed",
    "response.done",
    "response.cancelled",
    "error",
)


# -------------------------------------------------------------------------------------------------------------- the limits
def patient(**fields: Any) -> Limits:
    """Limits that only a test which is about them runs into. ``fields``: others than these."""
    patience = {"configure_s": PATIENCE_S, "idle_s": PATIENCE_S, "send_s": PATIENCE_S, "teardown_s": PATIENCE_S}
    return Limits(**(patience | fields))


@contextmanager
def changed(limits: Any, **fields: float) -> Iterator[None]:
    """Other limits for those who live under them already, until the block is left.

    So a client is where it should be before a short one begins to count.
    """
    before = {name: getattr(limits, name) for name in fields}
    _set(limits, fields)
    try:
        yield
    finally:
        _set(limits, before)


def _set(frozen: Any, fields: dict[str, float]) -> None:
    for name, value in fields.items():
        object.__setattr__(frozen, name, value)


# ------------------------------------------------------------------------------------------------- a pipeline of arithmetic
class Turnstile:
    """Lets frames out: all of them, or as many as a test allows."""

    def __init__(self) -> None:
        self._left = math.inf
        self._changed = threading.Condition()

    def allow(self, count: float) -> None:
        """So many frames from now on."""
        with self._changed:
            self._left = count
            self._changed.notify_all()

    def pass_one(self, given_up: Callable[[], bool]) -> bool:
        """Wait until a frame may come out; False where it was given up, which :meth:`wake` tells."""
        with self._changed:
            self._changed.wait_for(lambda: given_up() or self._left > 0)
            if given_up():
                return False
            self._left -= 1
            return True

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class FakeSession:
    """A session whose frames come out ``frame_s`` after the one before, with what its input tells: its first sample."""

    def __init__(self, pipeline: FakePipeline, options: SessionOptions) -> None:
        self.id = f"fake_{len(pipeline.opened)}"
        self.options = options
        self.geometry = pipeline.geometry
        self.frames_fed = 0
        self.frames_done = 0
        self.closed = False
        self._pipeline = pipeline
        self._pending = np.zeros(0, np.float32)
        self._inputs: queue.SimpleQueue[np.ndarray | str | VcpipeError] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._last_said = False

    def feed(self, samples: np.ndarray) -> None:
        pcm = np.concatenate([self._pending, samples])
        count = len(pcm) // FRAME
        self._pending = pcm[count * FRAME :]
        for index in range(count):
            self.frames_fed += 1
            self._inputs.put(pcm[index * FRAME : (index + 1) * FRAME])

    def end(self, pad_partial: bool = True) -> None:
        if pad_partial and len(self._pending):
            self.feed(np.zeros(FRAME - len(self._pending), np.float32))
        self.closed = True
        self._inputs.put("end")

    def abort(self) -> None:
        self.closed = True
        self._aborted.set()
        self._pipeline.turnstile.wake()
        self._inputs.put("abort")

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def fail(self, error: VcpipeError) -> None:
        self._inputs.put(error)

    def events(self) -> Iterator[Event]:
        while not self._last_said:
            said = self._inputs.get()
            if self._aborted.is_set():
                self._last_said = True
                yield Event("cancelled", self.frames_done)
            elif isinstance(said, VcpipeError):
                self._last_said = self.closed = True
                raise said
            elif isinstance(said, str):
                self._last_said = True
                yield Event("done", self.frames_done)
            else:
                yield from self._frame(said)

    def _frame(self, pcm: np.ndarray) -> Iterator[Event]:
        if self._aborted.wait(self._pipeline.frame_s) or not self._pipeline.turnstile.pass_one(self._aborted.is_set):
            return
        index = self.frames_done
        text = f"<{pcm[0]:.3f}>"
        yield Event("user_transcript_delta", index, delta=" w", text=("w " * (index + 1)).strip())
        yield Event("assistant_text_delta", index, 100 + index, delta=text, text=text)
        yield Event("function_delta", index, 7, delta="f", text="f")
        samples, codes = np.full(1764, pcm[0], np.float32), np.full(31, index, np.int32)
        yield Event("audio", index, samples=samples, sample_rate=22050, audio_codes=codes)
        self.frames_done += 1
        now = time.monotonic_ns()
        self._pipeline.hooks.listener(self.id, FrameTiming(self.id, index, now, now, now + 1_000_000))

    def close(self) -> None:
        self._pipeline.close_may_end.wait()
        if not self._last_said:
            self.abort()
        self._pipeline.closed.append(self.id)


class FakePipeline:
    """Opens FakeSessions; every delay and fault is an attribute that a test sets.

    What must not happen before something else has is held: frames by :meth:`allow`, an opening or closing by its event.
    """

    def __init__(self) -> None:
        self.geometry = FrameGeometry()
        self.failure: VcpipeError | None = None
        self.dead_stages: list[str] = []
        self.hooks = Hooks(lambda loading: None, lambda session, delivery: None, lambda pipeline: None)
        self.starts = 0
        self.reset()

    def reset(self) -> None:
        self.frame_s = 0.0
        self.turnstile = Turnstile()
        self.openings = 0  # begun
        self.open_may_end = threading.Event()
        self.open_may_end.set()
        self.refuse: str | None = None
        self.opened: list[FakeSession] = []
        self.closed: list[str] = []
        self.close_may_end = threading.Event()
        self.close_may_end.set()

    def start(self, hooks: Hooks) -> FakePipeline:
        self.hooks = hooks
        self.starts += 1
        self.failure, self.dead_stages = None, []
        hooks.on_start(self)
        return self

    def allow(self, frames: float) -> None:
        """Let so many frames out, of all sessions together."""
        self.turnstile.allow(frames)

    def release(self) -> None:
        """Hold nothing."""
        self.allow(math.inf)
        self.open_may_end.set()
        self.close_may_end.set()

    def open_session(self, options: SessionOptions) -> FakeSession:
        self.openings += 1
        self.open_may_end.wait()
        if self.refuse is not None:
            raise VcpipeError(self.refuse)
        session = FakeSession(self, options)
        self.opened.append(session)
        return session

    def close(self, graceful_s: float = 5.0) -> None:
        for session in self.opened:
            session.fail(VcpipeError("the pipeline was closed"))


# ---------------------------------------------------------------------------------------------------------------- a server
class RunningServer:
    """What a test knows of a server that runs on a thread."""

    def __init__(self, port: int, app: Any) -> None:
        self.port = port
        self.http = f"http://127.0.0.1:{port}"
        self.url = f"ws://127.0.0.1:{port}/v1/realtime"
        self.server = app.state.server

    def connect(self, query: str = "", path: str = "/v1/realtime", **options: Any) -> Client:
        options = {
            "open_timeout": PATIENCE_S,
            "close_timeout": PATIENCE_S,
            "ping_interval": None,
            "max_size": None,
            "compression": None,
            "max_queue": None,
        } | options
        return Client(connect(f"ws://127.0.0.1:{self.port}{path}{query}", **options))

    def configured(self, **session: Any) -> Client:
        """A client whose session is open."""
        client = self.connect()
        client.expect("session.created")
        client.send("session.update", session=session)
        client.expect("session.updated")
        return client

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        request = urllib.request.Request(self.http + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return response.status, dict(response.headers), response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read().decode()

    def json(self, path: str, method: str = "GET", **headers: str) -> Any:
        return json.loads(self.get(path, method, **headers)[2])


@contextmanager
def running_server(
    start: Start,
    limits: Limits | None = None,
    gate: Gate | None = None,
    max_sessions: int = 1,
    max_message_bytes: int = 2**20,
    **config_fields: Any,
) -> Iterator[RunningServer]:
    """Serve on a free port of the loopback until the block is left. ``config_fields``: more of ServerConfig's."""
    app = make_app(start, ServerConfig(MODEL, max_sessions, limits or patient(), **config_fields), gate)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=StoppingProtocol,
        ws=LingeringProtocol,
        ws_max_size=max_message_bytes,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=STOP_S,
        log_config=None,
        access_log=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield RunningServer(listener.getsockname()[1], app)
    finally:
        server.should_exit = True
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive()


# ---------------------------------------------------------------------------------------------------------------- a client
class Client:
    """A socket that sends and expects messages by their type."""

    def __init__(self, connecting: Any) -> None:
        self._opened = ExitStack()
        self.socket: ClientConnection = self._opened.enter_context(connecting)

    def send(self, kind: str, **fields: Any) -> None:
        self.send_text(json.dumps({"type": kind, **fields}))

    def send_text(self, text: str) -> None:
        self.socket.send(text)

    def append(self, samples: Any, **fields: Any) -> None:
        """Float samples, or a count of silent ones."""
        pcm = np.zeros(samples) if isinstance(samples, int) else np.asarray(samples)
        data = np.rint(pcm * 32768).astype("<i2").tobytes()
        self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode(), **fields)

    def receive(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        return json.loads(self.socket.recv(timeout=timeout_s))

    def expect(self, kind: str) -> dict[str, Any]:
        message = self.receive()
        assert message["type"] == kind, message
        return message

    def expect_error(self, code: str) -> dict[str, Any]:
        error = self.expect("error")["error"]
        assert error["code"] == code, error
        return error

    def until(self, kind: str) -> list[dict[str, Any]]:
        """Messages up to the first of ``kind``."""
        messages = [self.receive()]
        while messages[-1]["type"] != kind:
            messages.append(self.receive())
        return messages

    def rest(self) -> list[dict[str, Any]]:
        """All that comes until the server closes."""
        messages = []
        try:
            while True:
                messages.append(self.receive())
        except ConnectionClosed:
            return messages

    def close_code(self) -> int | None:
        """The server's close code, after everything it still sends."""
        self.rest()
        return self.socket.close_code

    def vanish(self) -> None:
        """Break the connection without a word."""
        with suppress(OSError):  # the server may have been faster
            self.socket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.socket.socket.shutdown(socket.SHUT_RDWR)
        self.socket.socket.close()

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def kinds(messages: list[dict[str, Any]]) -> list[str]:
    return [message["type"] for message in messages]


def pcm_of(messages: list[dict[str, Any]]) -> bytes:
    """The joined PCM of the audio among messages."""
    return b"".join(base64.b64decode(m["delta"]) for m in messages if m["type"] == "response.audio.delta")
