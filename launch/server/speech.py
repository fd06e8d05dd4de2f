"""The speech routes: text in, sound out, by tts and codec alone, beside conversations."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from vcpipe.launch.server.client_connection import Limits
from vcpipe.launch.server.engine import Engine
from vcpipe.launch.server.metrics import Metrics
from vcpipe.launch.server.native import error_message
from vcpipe.launch.server.protocol import CLOSE_BUSY, ClientError, JsonObject, parse_message
from vcpipe.launch.server.reservation import Reservations
from vcpipe.launch.server.security import Gate, Refusal, choose_subprotocol
from vcpipe.launch.server.speech_connection import SpeechConnection
from vcpipe.launch.server.speech_http import SpeechResponse
from vcpipe.launch.server.speech_metrics import SpeechMetrics
from vcpipe.launch.server.speech_request import SpeechRequest, check_model
from vcpipe.launch.server.speech_thread import SpeechLimits

SPEECH = "/v1/audio/speech"
SPEECH_STREAM = "/v1/audio/speech/stream"

#: Longest body of a request, in bytes: the longest text, each character escaped, and some room.
_MAX_BODY = 64 * 1024

_BUSY = "every voice of this server is speaking; try again"


class SpeechRoutes:
    """The routes and their slots, of which a request holds one while it is answered and a socket one while it is open."""

    def __init__(
        self, engine: Engine, gate: Gate, metrics: Metrics, limits: Limits, slots: int, speech_limits: SpeechLimits
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._metrics = metrics
        self._limits = limits
        self._speech_limits = speech_limits
        self._slots = slots
        self._speech_metrics = SpeechMetrics(metrics.error)
        self.reservations = Reservations(slots, leaving_s=limits.teardown_s + 2.0)

    def routes(self) -> Sequence[Route | WebSocketRoute]:
        """Both of them; who comes with another method is told so."""
        return [
            Route(SPEECH, self.speech, methods=["POST"]),
            Route(SPEECH, self.post_needed),
            WebSocketRoute(SPEECH_STREAM, self.stream),
            Route(SPEECH_STREAM, self.upgrade_needed),
        ]

    def gauges(self) -> Mapping[str, int]:
        """For ``/metrics``."""
        return {"speech_active": self.reservations.taken, "speech_max": self._slots}

    def health(self) -> JsonObject:
        """For ``/health``."""
        return {"active": self.reservations.taken, "max": self._slots}

    def metrics_text(self) -> str:
        """For ``/metrics``."""
        return self._speech_metrics.text()

    # -- one request

    async def speech(self, request: Request) -> Response:
        """Refused by status before anything is taken, else the sound."""
        refusal = self._gate.check_origin(request.headers, request.url.scheme)
        refusal = refusal or self._gate.check_key(request.headers)
        if refusal is not None:
            return self._refuse(refusal)
        try:
            wish = SpeechRequest.parse(await _body(request), self._engine.model)
        except ClientError as error:
            self._metrics.error(error.code)
            return _error(413 if error.close else 400, error.code, error.message, error.param)
        except ClientDisconnect:
            return Response(status_code=400)
        slot = await self.reservations.reserve()
        if slot is None:
            self._count_busy()
            response = _error(503, "server_busy", _BUSY)
            response.headers["Retry-After"] = "1"
            return response
        return SpeechResponse(wish, slot, self._engine, self._speech_metrics, self._limits, self._speech_limits)

    async def post_needed(self, request: Request) -> Response:
        """The request's route without a body."""
        response = _error(405, "method_not_allowed", f"{SPEECH} is for POST; {SPEECH_STREAM} is a WebSocket")
        response.headers["Allow"] = "POST"
        return response

    # -- the socket

    async def stream(self, websocket: WebSocket) -> None:
        """Refused by HTTP status before anything is taken; then one connection's life."""
        offered = websocket.scope.get("subprotocols", [])
        refusal = self._gate.check_origin(websocket.headers, websocket.url.scheme)
        refusal = refusal or self._gate.check_key(websocket.headers, offered)
        refusal = refusal or self._check_model(websocket.query_params.get("model"))
        if refusal is not None:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
                await websocket.send_denial_response(self._refuse(refusal))
            return
        with contextlib.suppress(WebSocketDisconnect, OSError):
            await websocket.accept(choose_subprotocol(offered))
            await self._admit(websocket)

    async def upgrade_needed(self, request: Request) -> Response:
        """The socket's route without a WebSocket."""
        response = _error(426, "upgrade_required", f"{SPEECH_STREAM} is a WebSocket; {SPEECH} takes a whole text")
        response.headers["Upgrade"] = "websocket"
        return response

    async def _admit(self, websocket: WebSocket) -> None:
        slot = await self.reservations.reserve()
        if slot is None:
            self._count_busy()
            await websocket.send_json(error_message(ClientError("server_busy", _BUSY)))
            await websocket.close(CLOSE_BUSY, "server_busy")
            return
        try:
            name = f"sess_{secrets.token_hex(8)}"
            arguments = self._engine, self._speech_metrics, self._limits, self._speech_limits
            await SpeechConnection(websocket, name, *arguments).run(slot)
        finally:
            slot.release()

    def _check_model(self, model: str | None) -> Refusal | None:
        try:
            check_model({"model": model or None}, self._engine.model)
        except ClientError as error:
            return Refusal(400, error.message)
        return None

    def _count_busy(self) -> None:
        self._metrics.refused("busy")
        self._metrics.error("server_busy")

    def _refuse(self, refusal: Refusal) -> Response:
        self._metrics.refused({401: "key", 403: "origin"}.get(refusal.status, "request"))
        code = {401: "invalid_api_key", 403: "forbidden"}.get(refusal.status, "invalid_request")
        response = _error(refusal.status, code, refusal.message)
        if refusal.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response


async def _body(request: Request) -> JsonObject:
    """The JSON object of a body of bounded length; ClientError, with ``close`` where it is too long."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY:
            text = f"the body must have at most {_MAX_BODY} bytes"
            raise ClientError("invalid_request", text, close=CLOSE_BUSY)
    try:
        return parse_message(body.decode())
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ClientError("invalid_request", "the body must be a JSON object in UTF-8") from None


def _error(status: int, code: str, message: str, param: str | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"type": kind, "code": code, "message": message, "param": param}}, status)
