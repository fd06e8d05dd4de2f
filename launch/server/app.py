"""The routes of a server and what they share."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from vcpipe.launch.server.client_connection import Limits
from vcpipe.launch.server.connection import Connection
from vcpipe.launch.server.engine import Engine, Start
from vcpipe.launch.server.file_transcription import ROUTE as TRANSCRIPTIONS
from vcpipe.launch.server.file_transcription import FileTranscriptions
from vcpipe.launch.server.metrics import Metrics
from vcpipe.launch.server.native import NativeDialect
from vcpipe.launch.server.openai import OpenAIDialect
from vcpipe.launch.server.protocol import CLOSE_BUSY, ClientError, Dialect
from vcpipe.launch.server.reservation import Reservations
from vcpipe.launch.server.security import Gate, Refusal, choose_subprotocol
from vcpipe.launch.server.speech import SpeechRoutes
from vcpipe.launch.server.speech_thread import SpeechLimits
from vcpipe.launch.server.transcription import TranscriptionConnection
from vcpipe.launch.server.transcription_dialects import NativeTranscription, OpenAITranscription
from vcpipe.launch.server.uploads import UploadLimits
from vcpipe.launch.server.voice_chat import VoiceChatConnection
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.reports import Loading

REALTIME = "/v1/realtime"
#: What chat servers answer and this one does not.
_NOT_HERE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_ANY_METHOD = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]

_PAGE = Path(__file__).parents[1] / "page"
_HOST = re.compile(r"[A-Za-z0-9.\-:\[\]]+")


@dataclass(frozen=True, slots=True)
class Intent:
    """A kind of session on the realtime route. ``dialects``: by ``?dialect=``; ``busy``: told when all are taken."""

    connection: type[Connection]
    dialects: dict[str, Callable[[], Dialect]]
    busy: str


#: By the value of ``?intent=``, which may be left out for a conversation.
INTENTS = {
    "conversation": Intent(
        VoiceChatConnection,
        {"native": NativeDialect, "openai": OpenAIDialect},
        "another realtime VoiceChat session is already active",
    ),
    "transcription": Intent(
        TranscriptionConnection,
        {"native": NativeTranscription, "openai": OpenAITranscription},
        "as many transcriptions as this server allows are active already",
    ),
}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What :func:`make_app` needs beside a way to start a pipeline. ``model``: the name it is served under.

    ``max_transcriptions``: live ones and files together. ``max_speech``: requests and sockets together.
    """

    model: str = "vcpipe"
    max_sessions: int = 1
    limits: Limits = field(default_factory=Limits)
    max_transcriptions: int = 4
    uploads: UploadLimits = field(default_factory=UploadLimits)
    max_speech: int = 1
    speech: SpeechLimits = field(default_factory=SpeechLimits)


class Server:
    """The state that the routes share."""

    def __init__(
        self,
        start: Start,
        config: ServerConfig,
        gate: Gate,
        on_progress: Callable[[Loading], None],
        on_loaded: Callable[[VcpipeError | None], None],
    ) -> None:
        self.config = config
        self.gate = gate
        self.metrics = Metrics()
        self.engine = Engine(start, config.model, self.metrics, on_progress, on_loaded)
        leaving_s = config.limits.teardown_s + 2.0
        self.reservations = Reservations(config.max_sessions, leaving_s=leaving_s)
        self.transcriptions = Reservations(config.max_transcriptions, leaving_s=leaving_s)
        self.speech = SpeechRoutes(self.engine, gate, self.metrics, config.limits, config.max_speech, config.speech)
        self.files = FileTranscriptions(self.engine, self.metrics, self.transcriptions, config.limits, config.uploads)
        self._slots = {"conversation": self.reservations, "transcription": self.transcriptions}

    # -- the socket

    async def realtime(self, websocket: WebSocket) -> None:
        """Refused by HTTP status before anything is taken; then one connection's life."""
        offered = websocket.scope.get("subprotocols", [])
        refusal = self.gate.check_origin(websocket.headers, websocket.url.scheme)
        if refusal is None:
            refusal = self.gate.check_key(websocket.headers, offered)
        name = websocket.query_params.get("intent", "conversation")
        intent = INTENTS.get(name, INTENTS["conversation"])
        make_dialect = intent.dialects.get(websocket.query_params.get("dialect", "native"))
        if refusal is None and name not in INTENTS:
            refusal = Refusal(400, f"intent is unknown; accepted: {', '.join(INTENTS)}")
        if refusal is None and make_dialect is None:
            refusal = Refusal(400, f"dialect is unknown; accepted: {', '.join(intent.dialects)}")
        if refusal is not None or make_dialect is None:
            assert refusal is not None
            self.metrics.refused({401: "key", 403: "origin"}.get(refusal.status, "request"))
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
                await websocket.send_denial_response(_refusal_response(refusal))
            return
        with contextlib.suppress(WebSocketDisconnect, OSError):
            await websocket.accept(choose_subprotocol(offered))
            await self._admit(websocket, intent, make_dialect(), self._slots[name])

    async def _admit(self, websocket: WebSocket, intent: Intent, dialect: Dialect, reservations: Reservations) -> None:
        slot = await reservations.reserve()
        if slot is None:
            self.metrics.refused("busy")
            self.metrics.error("server_busy")
            error = ClientError("server_busy", intent.busy)
            for message in dialect.write(error):
                await websocket.send_json(message)
            await websocket.close(CLOSE_BUSY, "server_busy")
            return
        try:
            session_id = f"sess_{secrets.token_hex(8)}"
            model = websocket.query_params.get("model") or None
            limits = self.config.limits
            connection = intent.connection(websocket, session_id, dialect, self.engine, self.metrics, limits, model)
            await connection.run(slot)
        finally:
            slot.release()

    # -- plain HTTP

    async def transcribe_file(self, request: Request) -> Response:
        """A file's transcript. A page of another origin may send a form as it may open a socket."""
        if request.method != "POST":
            return _error(405, f"{TRANSCRIPTIONS} takes a POST", "method_not_allowed", {"Allow": "POST"})
        refusal = self.gate.check_origin(request.headers, request.url.scheme) or self.gate.check_key(request.headers)
        if refusal is not None:
            self.metrics.refused({401: "key", 403: "origin"}[refusal.status])
            return _refusal_response(refusal)
        return await self.files.post(request)

    async def upgrade_needed(self, request: Request) -> Response:
        """The realtime route without a WebSocket."""
        return _error(426, f"{REALTIME} is a WebSocket", "upgrade_required", {"Upgrade": "websocket"})

    async def not_here(self, request: Request) -> Response:
        """Routes of chat models."""
        text = f"this model listens and speaks; it has no {request.url.path}. Open a WebSocket on {REALTIME}"
        return self._guarded(request) or _error(501, text, "not_implemented")

    async def models(self, request: Request) -> Response:
        """The one model."""
        model = {"id": self.engine.model, "object": "model", "owned_by": "vcpipe", "endpoint": REALTIME}
        return self._guarded(request) or JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """200 when ready, else 503; the body tells why."""
        health = self.engine.health()
        health["sessions"] = {"active": self.reservations.taken, "max": self.config.max_sessions}
        health["transcriptions"] = {"active": self.transcriptions.taken, "max": self.config.max_transcriptions}
        health["speech"] = self.speech.health()
        return JSONResponse(health, 200 if health["status"] == "ready" else 503)

    async def metrics_text(self, request: Request) -> Response:
        """Prometheus text."""
        gauges = {
            "ready": int(self.engine.state == "ready"),
            "sessions_active": self.reservations.taken,
            "sessions_max": self.config.max_sessions,
            "transcriptions_active": self.transcriptions.taken,
            "transcriptions_max": self.config.max_transcriptions,
            **self.speech.gauges(),
        }
        text = self.metrics.text(gauges, self.engine.stages_up()) + self.speech.metrics_text()
        return self._guarded(request) or PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _guarded(self, request: Request) -> Response | None:
        refusal = self.gate.check_key(request.headers)
        return None if refusal is None else _refusal_response(refusal)

    def routes(self) -> Sequence[Route | WebSocketRoute | Mount]:
        """All of them; the page last, since it takes every path that is left."""
        return [
            WebSocketRoute(REALTIME, self.realtime),
            Route(REALTIME, self.upgrade_needed),
            Route(TRANSCRIPTIONS, self.transcribe_file, methods=_ANY_METHOD),
            *self.speech.routes(),
            *(Route(path, self.not_here, methods=_ANY_METHOD) for path in _NOT_HERE),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics_text),
            Mount("/", Page(_PAGE)),
        ]


def make_app(
    start: Start,
    config: ServerConfig | None = None,
    gate: Gate | None = None,
    on_progress: Callable[[Loading], None] = lambda loading: None,
    on_loaded: Callable[[VcpipeError | None], None] = lambda error: None,
) -> Starlette:
    """The ASGI application. It loads the pipeline in the background from its start on and stops it at its end.

    ``start`` starts the pipeline; the callbacks are an :class:`Engine`'s.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.engine.load()
        try:
            yield
        finally:
            await server.engine.close()

    server = Server(start, config or ServerConfig(), gate or Gate(), on_progress, on_loaded)
    app = Starlette(routes=server.routes(), lifespan=lifespan)
    app.state.server = server
    return app


class Page:
    """The page's static files, allowed to load what lies beside them and to speak to this server, nothing else."""

    def __init__(self, folder: Path) -> None:
        self._files: ASGIApp = StaticFiles(directory=folder, html=True, check_dir=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; a WebSocket to a path that is none is refused."""
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(PlainTextResponse("not found", 404))
            return
        policy = _policy(Headers(scope=scope).get("host", ""))

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(
                    {
                        "Content-Security-Policy": policy,
                        "Permissions-Policy": "microphone=(self)",
                        "Referrer-Policy": "no-referrer",
                        "X-Content-Type-Options": "nosniff",
                        "Cache-Control": "no-cache",
                    }
                )
            await send(message)

        await self._files(scope, receive, send_with_policy)


def _policy(host: str) -> str:
    # Not every browser counts the socket of the page's own host as 'self'.
    sockets = f" ws://{host} wss://{host}" if _HOST.fullmatch(host) else ""
    return (
        f"default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; "
        f"font-src 'self'; manifest-src 'self'; connect-src 'self'{sockets}; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'"
    )


def _error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"type": kind, "code": code, "message": message}}, status, headers)


def _refusal_response(refusal: Refusal) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
    return _error(refusal.status, refusal.message, {401: "invalid_api_key"}.get(refusal.status, "forbidden"), headers)
