"""``POST /v1/audio/speech``: a text's sound in one answer, each frame as soon as it is made."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import struct
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from vcpipe.launch.server.client_connection import Limits
from vcpipe.launch.server.engine import Engine
from vcpipe.launch.server.protocol import JsonObject
from vcpipe.launch.server.reservation import Slot
from vcpipe.launch.server.speech_metrics import SpeechMetrics
from vcpipe.launch.server.speech_request import SpeechRequest
from vcpipe.launch.server.speech_thread import SpeechLimits, SpeechThread, TurnLimitError
from vcpipe.launch.server.speech_turn import SpokenTurn
from vcpipe.launch.talk.resample import Resampler
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.geometry import FrameGeometry
from vcpipe.schemas.pcm import pcm16
from vcpipe.schemas.speech import SpeechChunk

_log = logging.getLogger(__name__)


class SpeechResponse(Response):
    """The answer to one request that holds a slot: starts with the first sound, so that what fails before has a status.

    A client that goes away has its turn dropped at once. What fails later breaks the answer off, where it is events with a last
    one that says why.
    """

    def __init__(
        self,
        request: SpeechRequest,
        slot: Slot,
        engine: Engine,
        metrics: SpeechMetrics,
        limits: Limits,
        speech_limits: SpeechLimits,
    ) -> None:
        super().__init__()
        self._request = request
        self._slot = slot
        self._metrics = metrics
        self._limits = limits
        self._speech_limits = speech_limits
        self._sound = _Encoder(request)
        self._turn = SpokenTurn(request.seed)
        self._turn.append(request.text)
        self._turn.end()
        self._thread = SpeechThread(engine, self, speech_limits, self._turn.id)
        self._first = metrics.first_sound()
        self._error: Exception | None = None
        self._stalled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Speak until the end, or until the client is gone."""
        self._send = send
        self._thread.start()
        self._thread.put(self._turn)
        self._thread.finish()
        gone = asyncio.ensure_future(_wait_gone(receive))
        done = asyncio.ensure_future(self._thread.done.wait())
        end = "disconnected"
        try:
            await asyncio.wait({gone, done}, return_when=asyncio.FIRST_COMPLETED)
            if self._stalled:
                end = "limit"
            elif done.done():
                end = self._end
                await self._finish(scope, receive)
        except asyncio.CancelledError:
            _log.info("%s: broken off, the server is being stopped", self._turn.id)
        finally:
            self._metrics.turn_ended(end)
            self._thread.cancel(self._turn)
            self._thread.abandon()
            self._slot.leave()
            gone.cancel()
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(done, self._limits.teardown_s)
            finally:
                self._slot.release()

    @property
    def _end(self) -> str:
        if self._error is None:
            return "done"
        return "limit" if isinstance(self._error, TurnLimitError) else "fault"

    async def _finish(self, scope: Scope, receive: Receive) -> None:
        """The end of the answer, or all of it where there was no sound."""
        if self._error is None:
            await self._begin()
            await self._write(self._sound.end(), last=True)
        elif not self._began:
            status = 503 if isinstance(self._error, VcpipeError) else 500
            await JSONResponse({"error": _fields(self._first_line)}, status)(scope, receive, self._send)
        elif self._request.server_sent_events:
            await self._write(_event("error", error=_fields(self._first_line)), last=True)
        else:
            _log.warning("%s: broken off: %s", self._turn.id, self._first_line)

    @property
    def _first_line(self) -> str:
        text = str(self._error)
        return text.splitlines()[0] if text else type(self._error).__name__

    # -- what the thread tells

    async def take_sound(self, turn: SpokenTurn, chunk: SpeechChunk) -> None:
        """Send it; waits while the client reads slowly."""
        if turn.cancelled:
            return
        self._first()
        await self._begin()
        if data := self._sound.push(chunk.samples):
            await self._write(data)

    async def turn_ended(self, turn: SpokenTurn, error: Exception | None) -> None:
        """Remember why."""
        self._error = error
        if error is not None:
            self._metrics.error("inference_error")

    # -- the wire

    _began = False

    async def _begin(self) -> None:
        if not self._began:
            self._began = True
            headers = {"content-type": self._sound.media_type, "cache-control": "no-store", "x-accel-buffering": "no"}
            if self._request.ignored:
                headers["x-ignored-fields"] = ascii(", ".join(self._request.ignored))[1:-1]
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _write(self, body: bytes, last: bool = False) -> None:
        message: dict[str, Any] = {"type": "http.response.body", "body": body, "more_body": not last}
        try:
            await asyncio.wait_for(self._send(message), self._speech_limits.stall_s)
        except asyncio.TimeoutError:
            self._stalled = True
            self._thread.cancel(self._turn)
        except OSError:  # gone; told to the one who waits for that
            self._thread.cancel(self._turn)


class _Encoder:
    """Frames of sound -> bytes of the body."""

    def __init__(self, request: SpeechRequest) -> None:
        native = FrameGeometry().output_sample_rate
        rate = request.sample_rate
        self._resampler = Resampler(native, rate)
        self._events = request.server_sent_events
        self._head = wav_header(rate) if request.response_format == "wav" else b""
        self.media_type = "audio/wav" if self._head else f"audio/pcm;rate={rate};channels=1"
        if self._events:
            self.media_type = "text/event-stream"

    def push(self, samples: np.ndarray) -> bytes:
        """The bytes that (n,) more samples give, perhaps none."""
        return self._wrap(pcm16(self._resampler.push(samples)))

    def end(self) -> bytes:
        """The rest."""
        rest = self._wrap(pcm16(self._resampler.finish()))
        return rest + _event("speech.audio.done") if self._events else rest

    def _wrap(self, pcm: bytes) -> bytes:
        data, self._head = self._head + pcm, b""
        if not self._events or not data:
            return data
        return _event("speech.audio.delta", audio=base64.b64encode(data).decode("ascii"))


def wav_header(rate: int) -> bytes:
    """Header of 16-bit mono of unknown length: the sizes are the largest there are, as ffmpeg writes them into a pipe."""
    unknown = 0xFFFFFFFF
    form = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    return b"RIFF" + struct.pack("<I", unknown) + b"WAVEfmt " + form + b"data" + struct.pack("<I", unknown)


def _event(kind: str, **fields: Any) -> bytes:
    return b"data: " + json.dumps({"type": kind, **fields}, ensure_ascii=False).encode() + b"\n\n"


def _fields(message: str) -> JsonObject:
    return {"type": "server_error", "code": "inference_error", "message": message, "param": None}


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
