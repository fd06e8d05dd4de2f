"""``/v1/audio/transcriptions``: a file in, its transcript out, as OpenAI's API has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
from starlette.datastructures import FormData
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from vcpipe.launch.audio_io import AudioReader
from vcpipe.launch.language import check_language
from vcpipe.launch.server.connection import Limits, to_text
from vcpipe.launch.server.engine import Engine
from vcpipe.launch.server.metrics import Metrics
from vcpipe.launch.server.outbox import Outbox
from vcpipe.launch.server.protocol import JsonObject, shown
from vcpipe.launch.server.reservation import Reservations, Slot
from vcpipe.launch.server.session_thread import SessionThread, Work, first_line
from vcpipe.launch.server.uploads import UploadError, UploadLimits, read_form, uploaded_file
from vcpipe.launch.subtitles import SUBTITLE_FORMS, Cue, CueSplitter
from vcpipe.pipeline.transcription import LiveTranscription
from vcpipe.schemas.errors import AudioInputError, VcpipeError
from vcpipe.schemas.streaming import TranscriptDelta

ROUTE = "/v1/audio/transcriptions"

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
#: Formats that may be streamed: those that are the text and no more.
_STREAMED = ("json", "text")
#: How long a thread waits for text or room, in seconds.
_GLANCE_S = 0.05


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


class _Transcript:
    """A file's text and its lines, and the listener of the thread that makes them."""

    def __init__(self, reader: AudioReader, max_seconds: float, outbox: Outbox | None) -> None:
        self.texts: list[str] = []
        self.cues: list[Cue] = []
        self.words: list[JsonObject] = []
        self.error: Exception | None = None
        self.stopped = False
        self.seconds = 0.0
        self._reader = reader
        self._max_seconds = max_seconds
        self._outbox = outbox
        self._splitter = CueSplitter()
        self._inside_word = False

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    # -- on the thread

    def read(self, session: LiveTranscription) -> Iterator[list[TranscriptDelta]]:
        """Feed block by block, as there is room, and yield what is heard."""
        for chunk in self._reader.chunks():
            self.seconds += len(chunk) / session.input_sample_rate
            if self.seconds > self._max_seconds:
                raise UploadError(413, f"the audio is longer than {self._max_seconds:g} s", "file")
            yield from self._feed(session, chunk)
            if self.stopped:
                return
        session.close()
        while not session.done and not self.stopped:
            if deltas := session.poll(_GLANCE_S):
                yield deltas

    def _feed(self, session: LiveTranscription, chunk: np.ndarray) -> Iterator[list[TranscriptDelta]]:
        while len(chunk) and not self.stopped:
            taken, chunk = chunk[: (room := session.room)], chunk[room:]
            session.feed(taken)
            if deltas := session.poll(0.0 if room else _GLANCE_S):
                yield deltas

    # -- on the event loop

    async def opened(self, session: LiveTranscription) -> None:
        """Nothing to tell."""

    async def open_failed(self, error: Exception) -> None:
        """As any failure."""
        self.error = error

    async def failed(self, error: Exception) -> None:
        """What ended it early."""
        self.error = error

    async def take_events(self, events: Sequence[TranscriptDelta]) -> None:
        """Keep the texts; say them where they are streamed."""
        for delta in events:
            self.texts.append(delta.text)
            self.cues += self._splitter.add(delta)
            self._take_words(delta)
            if self._outbox is not None:
                await self._outbox.put(_sse({"type": "transcript.text.delta", "delta": delta.text}))

    def finish(self) -> None:
        """There is no more text."""
        self.cues += self._splitter.finish()

    def _take_words(self, delta: TranscriptDelta) -> None:
        pieces = delta.text.split()
        if pieces and self.words and self._inside_word and not delta.text[0].isspace():
            self.words[-1]["word"] += pieces.pop(0)
            self.words[-1]["end"] = round(delta.end_s, 3)
        times = {"start": round(delta.start_s, 3), "end": round(delta.end_s, 3)}
        self.words += [{"word": piece, **times} for piece in pieces]
        self._inside_word = not delta.text[-1:].isspace()

    def response(self, wish: _Wish) -> Response:
        """The whole of it in the format that was asked for."""
        seconds = round(self.seconds, 3)
        usage = {"type": "duration", "seconds": seconds}
        if wish.response_format == "json":
            return JSONResponse({"text": self.text, "usage": usage})
        if wish.response_format == "text":
            return PlainTextResponse(self.text + "\n")
        if wish.response_format != "verbose_json":
            head, text_of = SUBTITLE_FORMS[wish.response_format]
            kind = {"srt": "application/x-subrip", "vtt": "text/vtt"}[wish.response_format]
            return PlainTextResponse(head + "".join(map(text_of, self.cues)), media_type=kind)
        body: JsonObject = {"task": "transcribe", "language": "english", "duration": seconds, "text": self.text}
        body |= {"segments": [_segment(cue) for cue in self.cues], "usage": usage}
        return JSONResponse(body | ({"words": self.words} if wish.words else {}))


def _segment(cue: Cue) -> JsonObject:
    """OpenAI's segment; None for figures that this model has not."""
    return {
        "id": cue.index - 1,
        "start": round(cue.start_s, 3),
        "end": round(cue.end_s, 3),
        "text": cue.text,
        "seek": 0,
        "tokens": [],
        "temperature": 0.0,
        "avg_logprob": None,
        "compression_ratio": None,
        "no_speech_prob": None,
    }


def _sse(message: JsonObject) -> str:
    return f"data: {to_text(message)}\n\n"


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
        self._transcript: _Transcript | None = None
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
        return self._transcript.response(wish)

    async def _take(self, request: Request) -> _Wish:
        self._form = await read_form(request, self._uploads)
        wish = _Wish.of(self._form, self._engine.model)
        self._outbox = Outbox(self._limits.outbox) if wish.stream else None
        stream = uploaded_file(self._form, self._uploads)
        self._reader = reader = await asyncio.to_thread(AudioReader, stream, channel=wish.channel)
        most = self._uploads.max_seconds
        if reader.duration_s is not None and reader.duration_s > most:
            raise UploadError(413, f"the audio is {reader.duration_s:.0f} s long; at most {most:g} s are taken", "file")
        self._transcript = transcript = _Transcript(reader, most, self._outbox)
        pipeline = await self._engine.pipeline()
        work = Work(
            pipeline.open_transcription,
            transcript.read,
            lambda session: session.cancel(),
        )
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
            await self._outbox.put(_sse({"type": "transcript.text.done", "text": self._transcript.text}))
            self.release("done")
        else:
            status, fields = self._told(error)
            await self._outbox.put(_sse({"type": "error", "error": fields}))
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
