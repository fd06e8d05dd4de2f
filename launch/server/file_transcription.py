"""``/v1/audio/transcriptions``: a file in, its transcript out, as OpenAI's API has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args

from starlette.datastructures import FormData
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from vcpipe.launch.audio_io import AudioReader
from vcpipe.launch.language import check_language
from vcpipe.launch.server.client_connection import Limits
from vcpipe.launch.server.engine import Engine
from vcpipe.launch.server.file_transcript import FileTranscript, ResponseFormat, sse
from vcpipe.launch.server.metrics import Metrics
from vcpipe.launch.server.outbox import Outbox
from vcpipe.launch.server.protocol import JsonObject, shown
from vcpipe.launch.server.reservation import Reservations, Slot
from vcpipe.launch.server.session_thread import SessionThread, Work, first_line
from vcpipe.launch.server.uploads import UploadError, UploadLimits, read_form, uploaded_file
from vcpipe.pipeline.transcription import TAIL_SILENCE_S, LiveTranscription
from vcpipe.schemas.errors import AudioInputError, VcpipeError
from vcpipe.schemas.streaming import TranscriptDelta

ROUTE = "/v1/audio/transcriptions"

#: Formats that may be streamed: those that are the text and no more.
_STREAMED = ("json", "text")


@dataclass(frozen=True, slots=True)
class _Wish:
    """The fields of a form. ``channel``: from 0; channels are never mixed."""

    response_format: ResponseFormat = "json"
    stream: bool = False
    words: bool = False
    channel: int = 0

    @classmethod
    def of(cls, form: FormData, model: str) -> _Wish:
        """Raises UploadError for what cannot be. Fields that are hints only (prompt, ...) are not looked at."""
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        if fields.get("model", model) != model:
            text = (
                f"this server has one model, {model!r}, not {shown(fields['model'])}; leave model out or name that one"
            )
            raise UploadError(404, text, "model", "model_not_found")
        try:
            check_language(fields.get("language") or None)
        except ValueError as error:
            raise UploadError(400, str(error), "language") from None
        if _number(fields.get("temperature", "0")) != 0:
            raise UploadError(400, "temperature must be 0 or left out: transcription is greedy", "temperature")
        if form.getlist("include[]") or form.getlist("include"):
            raise UploadError(400, "include is not understood: there are no log probabilities to include", "include")
        form_of = fields.get("response_format", "json")
        if form_of not in get_args(ResponseFormat):
            accepted = ", ".join(get_args(ResponseFormat))
            raise UploadError(
                400, f"response_format must be one of {accepted}, not {shown(form_of)}", "response_format"
            )
        stream = fields.get("stream", "false").lower()
        if stream not in ("true", "false", "1", "0"):
            raise UploadError(400, f"stream must be true or false, not {shown(stream)}", "stream")
        if stream in ("true", "1") and form_of not in _STREAMED:
            text = f"stream works with response_format {' and '.join(_STREAMED)}, not {form_of}"
            raise UploadError(400, text, "stream")
        granularities = [*form.getlist("timestamp_granularities[]"), *form.getlist("timestamp_granularities")]
        if any(value not in ("word", "segment") for value in granularities):
            raise UploadError(400, "timestamp_granularities must be word or segment", "timestamp_granularities")
        channel = fields.get("channel", "0")
        if not (channel.isascii() and channel.isdigit() and len(channel) < 5):
            raise UploadError(400, f"channel counts from 0, not {shown(channel)}", "channel")
        return cls(cast(ResponseFormat, form_of), stream in ("true", "1"), "word" in granularities, int(channel))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class FileTranscriptions:
    """The route. Each request holds a slot of ``reservations`` from before its file is read until its answer is sent."""

    def __init__(
        self, engine: Engine, metrics: Metrics, reservations: Reservations, limits: Limits, uploads: UploadLimits
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._reservations = reservations
        self._limits = limits
        self._uploads = uploads

    async def post(self, request: Request) -> Response:
        """One file."""
        slot = await self._reservations.reserve()
        if slot is None:
            self._metrics.refused("busy")
            self._metrics.error("server_busy")
            text = "as many transcriptions as this server allows are active already"
            return _error_response(503, text, None, "server_busy", {"Retry-After": "1"})
        job = _Job(self._engine, self._metrics, slot, self._limits, self._uploads)
        try:
            return await job.run(request)
        except BaseException:
            job.release("fault")
            raise


class _Job:
    """One request while it holds a slot."""

    def __init__(self, engine: Engine, metrics: Metrics, slot: Slot, limits: Limits, uploads: UploadLimits) -> None:
        self._engine = engine
        self._metrics = metrics
        self._slot: Slot | None = slot
        self._limits = limits
        self._uploads = uploads
        self._form: FormData | None = None
        self._reader: AudioReader | None = None
        self._transcript: FileTranscript | None = None
        self._thread: SessionThread[LiveTranscription, TranscriptDelta] | None = None
        self._outbox: Outbox | None = None

    async def run(self, request: Request) -> Response:
        """Read the form, start the thread; the answer, or a response that goes on."""
        try:
            wish = await self._take(request)
        except (VcpipeError, UploadError) as error:
            return self._refuse(error)
        assert self._thread is not None and self._transcript is not None
        self._thread.start()
        if wish.stream:
            return _Held(StreamingResponse(self._events(), media_type="text/event-stream"), self, self._limits.send_s)
        await self._wait(request)
        if self._transcript.error is not None:
            return self._refuse(self._transcript.error)
        self._transcript.finish()
        self.release("disconnected" if self._transcript.stopped else "done")
        return self._transcript.response(wish.response_format, words=wish.words)

    async def _take(self, request: Request) -> _Wish:
        self._form = await read_form(request, self._uploads)
        wish = _Wish.of(self._form, self._engine.model)
        self._outbox = Outbox(self._limits.outbox) if wish.stream else None
        stream = uploaded_file(self._form, self._uploads)
        self._reader = reader = await asyncio.to_thread(AudioReader, stream, channel=wish.channel)
        most = self._uploads.max_seconds
        if reader.duration_s is not None and reader.duration_s > most:
            raise UploadError(413, f"the audio is {reader.duration_s:.0f} s long; at most {most:g} s are taken", "file")
        self._transcript = transcript = FileTranscript(reader, most, self._outbox)
        pipeline = await self._engine.pipeline()
        open_session = partial(pipeline.open_transcription, tail_s=TAIL_SILENCE_S)
        work = Work(open_session, transcript.read, lambda session: session.cancel())
        self._thread = SessionThread(work, transcript, "vcpipe-file")
        return wish

    async def _wait(self, request: Request) -> None:
        """Until the thread is done, or the client is gone."""
        assert self._thread is not None and self._transcript is not None

        async def left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        done, gone = asyncio.ensure_future(self._thread.done.wait()), asyncio.ensure_future(left())
        try:
            await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._transcript.stopped = not self._thread.done.is_set()
            done.cancel()
            gone.cancel()

    async def _events(self) -> AsyncIterator[str]:
        """Server-sent events: the texts, the last word."""
        assert self._thread is not None and self._transcript is not None and self._outbox is not None
        ending = asyncio.ensure_future(self._end_events())
        try:
            while (event := await self._outbox.get()) is not None:
                yield event
        finally:
            ending.cancel()

    async def _end_events(self) -> None:
        assert self._thread is not None and self._transcript is not None and self._outbox is not None
        await self._thread.done.wait()
        error = self._transcript.error
        if error is None:
            done = {"type": "transcript.text.done", "text": self._transcript.text, "usage": self._transcript.usage}
            await self._outbox.put(sse(done))
            self.release("done")
        else:
            status, fields = self._told(error)
            await self._outbox.put(sse({"type": "error", "error": fields}))
            self.release("fault" if status >= 500 else "limit")
        self._outbox.close()

    def _refuse(self, error: Exception) -> Response:
        status, fields = self._told(error)
        self.release("fault" if status >= 500 else "limit")
        return JSONResponse({"error": fields}, status)

    def _told(self, error: Exception) -> tuple[int, JsonObject]:
        if isinstance(error, UploadError):
            status, param, code = error.status, error.param, error.code
        elif isinstance(error, AudioInputError):
            status, param, code = 400, "file", "invalid_request"
        else:
            status, param, code = (500 if self._thread is not None else 503), None, "inference_error"
        self._metrics.error(code)
        message = error.message if isinstance(error, UploadError) else first_line(error)
        return status, _error_fields(status, message, param, code)

    def release(self, end: str) -> None:
        """Let the thread end and everything go. The first call counts."""
        if self._slot is None:
            return
        slot, self._slot = self._slot, None
        self._metrics.session_ended(end, "transcription")
        if self._transcript is not None:
            self._transcript.stopped = True
        if self._outbox is not None and end != "done":
            self._outbox.close()
        slot.leave()
        asyncio.ensure_future(self._free(slot))

    async def _free(self, slot: Slot) -> None:
        """Once the thread has ended: it reads the file."""
        try:
            if self._thread is not None and self._transcript is not None and self._transcript.stopped:
                await asyncio.wait_for(self._thread.done.wait(), self._limits.teardown_s)
        except asyncio.TimeoutError:
            pass
        finally:
            slot.release()
            if self._reader is not None:
                self._reader.close()
            if self._form is not None:
                await self._form.close()


class _Held(Response):
    """A response that goes on, whose job ends with it. A client that takes nothing for ``send_s`` is given up."""

    def __init__(self, inner: Response, job: _Job, send_s: float) -> None:
        self._inner = inner
        self._job = job
        self._send_s = send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""

        async def bounded(message: Message) -> None:
            await asyncio.wait_for(send(message), self._send_s)

        try:
            await self._inner(scope, receive, bounded)
        except (asyncio.TimeoutError, ClientDisconnect, OSError):
            pass  # nobody takes the rest
        finally:
            self._job.release("disconnected")


def _error_fields(status: int, message: str, param: str | None, code: str) -> JsonObject:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"type": kind, "code": code, "message": message, "param": param}


def _error_response(status: int, message: str, param: str | None, code: str, headers: dict[str, Any]) -> Response:
    return JSONResponse({"error": _error_fields(status, message, param, code)}, status, headers)
