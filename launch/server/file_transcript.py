"""What becomes of one file: its text, its lines, its words, and the answer in each of the formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from starlette.responses import JSONResponse, PlainTextResponse, Response

from vcpipe.launch.audio_io import AudioReader
from vcpipe.launch.server.client_connection import to_text
from vcpipe.launch.server.outbox import Outbox
from vcpipe.launch.server.protocol import JsonObject
from vcpipe.launch.server.uploads import UploadError
from vcpipe.launch.subtitles import SUBTITLE_FORMS, Cue, CueSplitter
from vcpipe.pipeline.transcription import LiveTranscription
from vcpipe.schemas.geometry import FrameGeometry
from vcpipe.schemas.streaming import TranscriptDelta

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
#: How long a thread waits for text or room, in seconds.
_GLANCE_S = 0.05


class FileTranscript:
    """A file's text and its lines, and the listener of the thread that makes them."""

    def __init__(self, reader: AudioReader, max_seconds: float, outbox: Outbox | None) -> None:
        self.texts: list[str] = []
        self.cues: list[Cue] = []
        self.words: list[JsonObject] = []
        self.error: Exception | None = None
        self.stopped = False
        self.seconds = 0.0  # of the file, as far as it was read
        self._samples = 0
        self._reader = reader
        self._max_seconds = max_seconds
        self._outbox = outbox
        self._splitter = CueSplitter()
        self._inside_word = False

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def usage(self) -> JsonObject:
        """As OpenAI tells it of models that count no tokens."""
        return {"type": "duration", "seconds": round(self.seconds, 3)}

    # -- on the thread

    def read(self, session: LiveTranscription) -> Iterator[list[TranscriptDelta]]:
        """Feed block by block, as there is room, and yield what is heard."""
        for chunk in self._reader.chunks():
            self._samples += len(chunk)
            self.seconds = self._samples / session.input_sample_rate
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
                await self._outbox.put(sse({"type": "transcript.text.delta", "delta": delta.text}))

    def finish(self) -> None:
        """There is no more text."""
        self.cues += self._splitter.finish()
        self.cues = [self._within_sound(cue) for cue in self.cues]

    def _within_sound(self, cue: Cue) -> Cue:
        """A line is shown for some time after its last word, but no longer than there is sound."""
        latest_start_s = max(self.seconds - FrameGeometry().frame_duration_s, 0.0)
        return replace(cue, start_s=min(cue.start_s, latest_start_s), end_s=min(cue.end_s, self.seconds))

    def _take_words(self, delta: TranscriptDelta) -> None:
        pieces = delta.text.split()
        if pieces and self.words and self._inside_word and not delta.text[0].isspace():
            self.words[-1]["word"] += pieces.pop(0)
            self.words[-1]["end"] = round(delta.end_s, 3)
        times = {"start": round(delta.start_s, 3), "end": round(delta.end_s, 3)}
        self.words += [{"word": piece, **times} for piece in pieces]
        self._inside_word = not delta.text[-1:].isspace()

    def response(self, response_format: ResponseFormat, *, words: bool) -> Response:
        """The whole of it in a format; ``words``: with theirs, where the format has them."""
        if response_format == "json":
            return JSONResponse({"text": self.text, "usage": self.usage})
        if response_format == "text":
            return PlainTextResponse(self.text + "\n")
        if response_format != "verbose_json":
            head, text_of = SUBTITLE_FORMS[response_format]
            kind = {"srt": "application/x-subrip", "vtt": "text/vtt"}[response_format]
            return PlainTextResponse(head + "".join(map(text_of, self.cues)), media_type=kind)
        body: JsonObject = {
            "task": "transcribe",
            "language": "english",
            "duration": self.usage["seconds"],
            "text": self.text,
        }
        body |= {"segments": [_segment(cue) for cue in self.cues], "usage": self.usage}
        return JSONResponse(body | ({"words": self.words} if words else {}))


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


def sse(message: JsonObject) -> str:
    """A server-sent event."""
    return f"data: {to_text(message)}\n\n"
