"""A scripted server for tests of the page: the protocol without a model, so that what goes wrong goes wrong on purpose."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket, WebSocketDisconnect
from waiting import PATIENCE_S

import vcpipe.launch

PAGE = Path(str(vcpipe.launch.__file__)).parent / "page"
FRAME_SAMPLES = 1280
OUT_SAMPLES = 1764
WORDS = ("What", "is", "the", "capital", "of", "France?")
POLICY = {"Content-Security-Policy": "default-src 'self'"}


@dataclass
class Talk:
    """One connection: what the page sent, and how it ended."""

    session: dict[str, Any] = field(default_factory=dict)
    pcm: list[np.ndarray] = field(default_factory=list)
    types: list[str] = field(default_factory=list)

    @property
    def samples(self) -> np.ndarray:
        return np.concatenate(self.pcm) if self.pcm else np.zeros(0, np.int16)


class ScriptedServer:
    """Answers every frame with a tone, says a word for every third frame that is loud.

    ``key``: wanted, if set. ``busy``: refuse. ``drop_at``: drop the connection at that frame. ``limit_at``: take no frame from
    that one on. ``hold``: frames at which nothing is said until they are over (a stall). ``refuse``: error that answers
    session.update. ``health``: the answer of /health.
    """

    def __init__(self) -> None:
        self.reset()
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            WebSocketRoute("/v1/realtime", self._realtime),
            Mount("/", _Files(directory=PAGE, html=True)),
        ]
        self.app = Starlette(routes=routes)
        self.url = ""

    def reset(self) -> None:
        self.talks: list[Talk] = []
        self.key = ""
        self.busy = False
        self.drop_at = self.limit_at = -1
        self.hold = range(0)
        self.refuse = ""
        self.health: dict[str, Any] = {"status": "ready"}

    async def _health(self, request: Request) -> Response:
        return JSONResponse(self.health, 200 if self.health["status"] == "ready" else 503)

    async def _models(self, request: Request) -> Response:
        allowed = not self.key or request.headers.get("authorization") == f"Bearer {self.key}"
        return JSONResponse({}, 200 if allowed else 401)

    async def _realtime(self, socket: WebSocket) -> None:
        offered = socket.scope["subprotocols"]
        if self.key and f"openai-insecure-api-key.{self.key}" not in offered:
            return await socket.close()
        await socket.accept("realtime" if offered else None)
        if self.busy:
            await _say(socket, "error", error={"code": "server_busy", "message": "another session is already active"})
            return await socket.close(1013)
        self.talks.append(Talk())
        with contextlib.suppress(WebSocketDisconnect):
            await self._converse(socket, self.talks[-1])

    async def _converse(self, socket: WebSocket, talk: Talk) -> None:
        formats = {
            "input_audio_format": {"type": "pcm16", "sample_rate": 16000},
            "output_audio_format": {"type": "pcm16", "sample_rate": 22050},
        }
        await _say(socket, "session.created", session={"id": "sess_0", "state": "configuring", **formats})
        held: list[tuple[str, dict[str, Any]]] = []
        while True:
            message = json.loads(await socket.receive_text())
            talk.types.append(message["type"])
            if message["type"] == "session.update":
                talk.session = message["session"]
                if self.refuse:
                    error = {"code": "session_initialization_failed", "message": self.refuse}
                    await _say(socket, "error", error=error)
                    continue
                session = {"id": "sess_0", "model": "scripted", "frame_samples": FRAME_SAMPLES, **formats}
                await _say(socket, "session.updated", session=session)
            elif message["type"] == "input_audio_buffer.append":
                assert message.get("sample_rate", 16000) == 16000
                talk.pcm.append(np.frombuffer(base64.b64decode(message["audio"], validate=True), "<i2"))
                frame = len(talk.pcm) - 1
                if frame == self.drop_at:
                    return await socket.close(1011)
                if 0 <= self.limit_at <= frame:
                    error = {"code": "inference_error", "message": "the session is limited to 1 s"}
                    await _say(socket, "error", error=error)
                    continue
                held += self._frame(talk, frame)
                if frame not in self.hold:
                    for kind, fields in held:
                        await _say(socket, kind, **fields)
                    held.clear()
            elif message["type"] == "input_audio_buffer.commit":
                await _say(socket, "input_audio_buffer.committed")
                await _say(socket, "response.done", frame_index=len(talk.pcm))
                return await socket.close(1000)
            elif message["type"] == "session.cancel":
                await _say(socket, "response.cancelled", frame_index=len(talk.pcm))
                return await socket.close(1000)

    def _frame(self, talk: Talk, frame: int) -> Iterator[tuple[str, dict[str, Any]]]:
        loud = sum(bool(np.abs(chunk.astype(int)).max(initial=0) > 500) for chunk in talk.pcm)
        heard = " ".join(WORDS[: loud // 3])
        yield (
            "conversation.item.input_audio_transcription.delta",
            {"frame_index": frame, "delta": "", "transcript": heard},
        )
        text = "Paris \ufffd" if len(heard) > 20 else ""
        yield "response.text.delta", {"frame_index": frame, "token_id": 5, "delta": "", "text": text}
        times = frame * OUT_SAMPLES + np.arange(OUT_SAMPLES)
        tone = np.round(8000 * np.sin(2 * np.pi * 441 * times / 22050)).astype("<i2")
        audio = {
            "delta": base64.b64encode(tone.tobytes()).decode(),
            "format": "pcm16",
            "sample_rate": 22050,
            "channels": 1,
        }
        yield "response.audio.delta", {"frame_index": frame, "audio_codes": [0] * 31, **audio}
        stages = {"perception": 11.0, "language": 30.0 + frame % 7, "tts": 85.0 if frame == 3 else 41.5, "codec": 6.25}
        late = {"end_to_end_ms": 95.0, "lateness_ms": 15.0 if frame == 3 else 0.0, "frame_ms": 80.0}
        yield "vcpipe.frame_timing", {"frame_index": frame, "stages": stages, **late}


class _Files(StaticFiles):
    def file_response(self, *arguments: Any, **fields: Any) -> Response:
        response = super().file_response(*arguments, **fields)
        response.headers.update(POLICY)
        return response


async def _say(socket: WebSocket, kind: str, **fields: Any) -> None:
    await socket.send_text(json.dumps({"type": kind, "event_id": "event_0123456789abcdef", **fields}))


@contextlib.contextmanager
def serving(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Run it on a free port of this machine, from a thread."""
    runner = uvicorn.Server(uvicorn.Config(server.app, ws="websockets-sansio", log_level="warning", lifespan="off"))
    listening = socket.create_server(("127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    thread = threading.Thread(target=lambda: runner.run([listening]))
    thread.start()
    try:
        yield server
    finally:
        runner.should_exit = runner.force_exit = True
        thread.join(PATIENCE_S)
        listening.close()
