"""``vcpipe speak``: text in, speech out while the text still comes, by the last two stages alone."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from vcpipe.launch.audio_io import WavWriter, standard_input
from vcpipe.launch.console import LoadingBar, stderr, tell_of, warn
from vcpipe.launch.library import start_pipeline
from vcpipe.launch.pipe_input import PipeInput
from vcpipe.launch.sound import Loudspeaker
from vcpipe.launch.talk.devices import find_device, load_sound
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.config import check_seed
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.events import Event
from vcpipe.schemas.speech import SpeechChunk

#: Stands for standard input and output.
_STANDARD = "-"

#: Read at once from a file or pipe, in bytes.
_BLOCK = 4096

#: A listener who will hear silence so soon hears the words that are there to their end before, in seconds.
_LEAD_S = 0.2

#: Longest wait for text while there may be sound to let out, in seconds.
_GLANCE_S = 0.02


@dataclass(frozen=True, slots=True)
class SpeakOptions:
    """What the command line asked for; see ``vcpipe speak --help``.

    Without ``text`` and ``text_file``, what standard input holds is spoken.
    """

    text: str | None = None
    text_file: Path | None = None
    output_audio: Path | None = None
    output_device: str | None = None
    seed: int = 0
    model: str | None = None
    device: str | None = None
    tts_history_frames: int | None = None
    as_json: bool = False


def speak(options: SpeakOptions) -> None:
    """Speak one text with a pipeline of tts and codec. Raises VcpipeError or ValueError for what the user can mend."""
    _check(options)
    with ExitStack() as stack:
        texts = _Texts(_open_text(options, stack))
        loudspeaker = _open_loudspeaker(options, stack) if options.output_audio is None else None
        pipeline = stack.enter_context(_start(options))
        texts.wait_for_words()
        geometry = pipeline.geometry
        if loudspeaker is not None:
            loudspeaker.start(geometry.output_sample_rate, geometry.output_samples)
            figures = _speak(options, pipeline, texts, loudspeaker.write, lambda: loudspeaker.left_s < _LEAD_S)
            loudspeaker.play_out()
            figures.show(options.as_json, {"underruns": loudspeaker.underruns})
        else:
            path = None if str(options.output_audio) == _STANDARD else options.output_audio
            with WavWriter(path, geometry.output_sample_rate) as writer:
                figures = _speak(options, pipeline, texts, writer.write)
            figures.show(options.as_json, {})


def _check(options: SpeakOptions) -> None:
    """Options that exclude each other or would have no effect are a mistake."""
    check_seed(options.seed)
    if options.text is not None and options.text_file is not None:
        raise ConfigError("TEXT and --text-file exclude each other")
    if options.output_audio is not None and options.output_device is not None:
        raise ConfigError("--output-device needs the loudspeaker, not --output-audio")
    if options.as_json and str(options.output_audio) == _STANDARD:
        raise ConfigError("--json and --output-audio - both want standard output; give one of them a file")


class _Text(Protocol):
    """Where text comes from."""

    @property
    def name(self) -> str:
        """What users call it."""

    def pieces(self) -> Iterator[str]:
        """The text; an empty piece where there is none yet."""


@dataclass(frozen=True)
class _GivenText:
    """A text that is all there."""

    text: str
    name: str = "TEXT"

    def pieces(self) -> Iterator[str]:
        yield self.text


class _StreamedText:
    """UTF-8 from a file or pipe, in constant memory."""

    def __init__(self, stream: IO[bytes], name: str, stack: ExitStack) -> None:
        self.name = name
        self._stream = stream
        self._pipe = None if stream.seekable() else stack.enter_context(PipeInput(stream, keep_open=True))

    def pieces(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        ended = False
        while not ended:
            if self._pipe is not None and not self._pipe.wait(_GLANCE_S):
                yield ""
                continue
            data = (self._pipe or self._stream).read(_BLOCK) or b""
            ended = not data
            try:
                yield decoder.decode(data, final=ended)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{self.name} is not UTF-8 text: {error.reason}") from None


class _Texts:
    """The pieces of a text, of which the first may be waited for before they are wanted."""

    def __init__(self, text: _Text) -> None:
        self._name = text.name
        self._pieces = text.pieces()
        self._first = ""

    def wait_for_words(self) -> None:
        """Return once there is something to speak. ConfigError where the text ends without."""
        for piece in self._pieces:
            if piece.strip():
                self._first = piece
                return
        raise ConfigError(f"{self._name} holds no text to speak")

    def __iter__(self) -> Iterator[str]:
        yield self._first
        yield from self._pieces


def _open_text(options: SpeakOptions, stack: ExitStack) -> _Text:
    if options.text_file is not None and str(options.text_file) != _STANDARD:
        try:
            file = open(options.text_file, "rb")  # noqa: SIM115 - the stack closes it
        except OSError as error:
            raise ConfigError(f"{options.text_file} cannot be opened: {error.strerror}") from None
        return _StreamedText(stack.enter_context(file), str(options.text_file), stack)
    if options.text is not None and options.text != _STANDARD:
        if not options.text.strip():
            raise ConfigError("TEXT holds no text to speak")
        if " " not in options.text and Path(options.text).is_file():
            warn(f"{options.text!r} is spoken as it stands; --text-file {options.text} speaks what the file holds")
        return _GivenText(options.text)
    stream = standard_input()
    if stream is None:
        raise ConfigError("standard input is closed; give TEXT or --text-file")
    if options.text is None and options.text_file is None and stream.isatty():
        raise ConfigError("there is nothing to speak; give TEXT, --text-file, or - to type it")
    return _StreamedText(stream, "standard input", stack)


def _open_loudspeaker(options: SpeakOptions, stack: ExitStack) -> Loudspeaker:
    """Before the model is loaded: a device that does not work should not cost that time."""
    try:
        sound = load_sound()
    except ConfigError as error:
        raise ConfigError(f"{error}; or write a file with --output-audio") from None
    return stack.enter_context(Loudspeaker(sound, find_device(sound, "output", options.output_device)))


def _start(options: SpeakOptions) -> Pipeline:
    with LoadingBar().shown() as bar:
        pipeline = start_pipeline(
            options.model,
            stages=("tts", "codec"),
            device=options.device,
            tts_history_frames=options.tts_history_frames,
            on_progress=bar.update,
        )
    tell_of(pipeline.warnings, pipeline.checkpoint_config)
    return pipeline


def _speak(
    options: SpeakOptions,
    pipeline: Pipeline,
    texts: _Texts,
    write: Callable[[np.ndarray], None],
    runs_dry: Callable[[], bool] = lambda: False,
) -> _Figures:
    """One turn, to its last sample. ``runs_dry``: whether a listener would notice soon that there is no text."""
    geometry = pipeline.geometry
    figures = _Figures(geometry.frame_duration_s)

    def say(chunk: SpeechChunk) -> None:
        write(chunk.samples)  # first: who reads that a frame was spoken and interrupts finds it in the file
        figures.count(chunk.frames)
        if options.as_json:
            rate = geometry.output_sample_rate
            event = Event("audio", chunk.frame_index, sample_rate=rate, audio_codes=chunk.codes[0])
            _print_json(event.to_json())

    def texts_and_rests() -> Iterator[str]:
        for text in texts:
            if text == "" and not speech.frames_waiting and runs_dry():
                for chunk in speech.rest():
                    say(chunk)
            yield text

    with pipeline.open_speech(seed=options.seed) as speech:
        speech.reset_turn()
        for chunk in speech.speak(texts_and_rests()):
            say(chunk)
    return figures


class _Figures:
    """How much was said, and how long it took from the moment at which there was something to say."""

    def __init__(self, frame_s: float) -> None:
        self.frames = 0
        self._frame_s = frame_s
        self._started_at = time.monotonic()
        self._first_at: float | None = None
        self._last_at = self._started_at

    def count(self, frames: int) -> None:
        """So many frames more came just now."""
        self.frames += frames
        self._last_at = time.monotonic()
        if self._first_at is None:
            self._first_at = self._last_at

    def show(self, as_json: bool, extra: dict[str, int]) -> None:
        """The last JSON line, or a line for people."""
        audio_s, wall_s = self.frames * self._frame_s, self._last_at - self._started_at
        factor = wall_s / audio_s if audio_s else 0.0
        first_s = 0.0 if self._first_at is None else self._first_at - self._started_at
        if as_json:
            figures = {
                "frames": self.frames,
                "audio_seconds": round(audio_s, 3),
                "wall_seconds": round(wall_s, 3),
                "realtime_factor": round(factor, 4),
                "first_audio_seconds": round(first_s, 3),
            }
            _print_json({"kind": "summary", **figures, **extra})
            return
        parts = [
            f"{self.frames} frames ({audio_s:.2f} s) in {wall_s:.2f} s",
            f"real-time factor {factor:.3f}",
            f"first sound after {first_s:.2f} s",
            *(f"{name} {value}" for name, value in extra.items()),
        ]
        stderr.print(", ".join(parts), soft_wrap=True)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)
