"""``vcpipe transcribe``: speech in, text out while it is spoken, by the first stage alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.text import Text

from vcpipe.launch.audio_io import RATES, AudioReader
from vcpipe.launch.console import LoadingBar, live, stderr, tell_of, warn
from vcpipe.launch.feeding import Feeder, Interrupts, SampleSource
from vcpipe.launch.language import check_language
from vcpipe.launch.library import start_pipeline
from vcpipe.launch.sound import Recorder
from vcpipe.launch.subtitles import Cue, CueSplitter, SubtitleFile
from vcpipe.launch.talk.devices import find_device, load_sound
from vcpipe.launch.wav import RawForm
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.transcription import TAIL_SILENCE_S, LiveTranscription
from vcpipe.schemas.config import ClockKind
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.streaming import TranscriptDelta

#: Exit code of a command that Ctrl-C ended.
_INTERRUPTED = 130

#: Rate of samples without a header where none is named, in Hz.
_RAW_RATE = 16000

#: How often a session is looked at where no text comes, in seconds.
_GLANCE_S = 0.02


@dataclass(frozen=True, slots=True)
class TranscribeOptions:
    """What the command line asked for; see ``vcpipe transcribe --help``."""

    source: str | None = None
    microphone: bool = False
    input_device: str | None = None
    channel: int = 0
    coding: Literal["s16le", "f32le"] | None = None
    rate: int | None = None
    srt: Path | None = None
    vtt: Path | None = None
    clock: ClockKind = "file"
    language: str | None = None
    model: str | None = None
    device: str | None = None
    as_json: bool = False


def transcribe(options: TranscribeOptions) -> None:
    """Transcribe one source with a pipeline of perception alone.

    Raises VcpipeError for what went wrong, once all that was heard until then is told; SystemExit(130) where Ctrl-C cut a
    recording short.
    """
    _check(options)
    with ExitStack() as stack:
        source = _open_source(options, stack)
        pipeline = stack.enter_context(_start(options))
        files = [
            stack.enter_context(SubtitleFile(path, form)) for path, form in _subtitle_paths(options) if path is not None
        ]
        output = _Output(options.as_json, files)
        session = stack.enter_context(pipeline.open_transcription(tail_s=TAIL_SILENCE_S))
        paced = options.clock == "wall"
        feeder = Feeder(source, session, can_wait=not options.microphone, paced=paced)
        if options.microphone and not options.as_json:
            stderr.print("Speak now. Ctrl-C ends.")
        with Interrupts(feeder.stop) as interrupts, output.shown(), feeder:
            done_at = _listen(session, feeder, output)
        if feeder.error is not None:
            raise feeder.error
        if isinstance(source, AudioReader) and not interrupts.stopped:
            # Some are known only once the whole input was read.
            for line in source.warnings:
                warn(line)
        output.summarize(_Figures.of(session, feeder, output.first_text_at, done_at))
    if interrupts.stopped and not options.microphone:
        raise SystemExit(_INTERRUPTED)


def _check(options: TranscribeOptions) -> None:
    """Options that would have no effect are a mistake."""
    check_language(options.language)
    if (options.source is not None) == options.microphone:
        excess = "a recording and --mic exclude each other" if options.microphone else "there is nothing to transcribe"
        raise ConfigError(f"{excess}; give a file, - for standard input, or --mic")
    if options.channel < 0:
        raise ConfigError(f"--channel counts from 0, got {options.channel}")
    recording = {"--format": options.coding, "--rate": options.rate, "--clock wall": options.clock == "wall" or None}
    for option, value in (recording if options.microphone else {"--input-device": options.input_device}).items():
        if value is not None:
            raise ConfigError(f"{option} needs {'a recording, not --mic' if options.microphone else '--mic'}")
    if options.rate is not None and options.coding is None:
        raise ConfigError("--rate needs --format: it is for samples without a header, which a file tells itself")
    if options.rate is not None and not RATES[0] <= options.rate <= RATES[1]:
        raise ConfigError(f"--rate must be {RATES[0]} to {RATES[1]} Hz, got {options.rate}")
    if options.srt is not None and options.srt == options.vtt:
        raise ConfigError(f"--srt and --vtt both name {options.srt}")


def _subtitle_paths(options: TranscribeOptions) -> list[tuple[Path | None, Literal["srt", "vtt"]]]:
    return [(options.srt, "srt"), (options.vtt, "vtt")]


def _open_source(options: TranscribeOptions, stack: ExitStack) -> SampleSource:
    """Before the model is loaded: a source that does not work should not cost that time."""
    if options.source is None:
        sound = load_sound()
        microphone = find_device(sound, "input", options.input_device)
        return stack.enter_context(Recorder(sound, microphone, channel=options.channel))
    raw = None if options.coding is None else RawForm(options.coding, options.rate or _RAW_RATE)
    return stack.enter_context(AudioReader(options.source, channel=options.channel, raw=raw))


def _start(options: TranscribeOptions) -> Pipeline:
    with LoadingBar().shown() as bar:
        pipeline = start_pipeline(options.model, stages=("perception",), device=options.device, on_progress=bar.update)
    tell_of(pipeline.warnings, pipeline.checkpoint_config)
    return pipeline


def _listen(session: LiveTranscription, feeder: Feeder, output: _Output) -> float:
    """To the end. Returns when that was."""
    try:
        while not session.done:
            for delta in session.poll(_GLANCE_S):
                output.take(delta)
            output.heard(session.heard_s)
            feeder.heard(session.heard_s)
        return time.monotonic()
    finally:
        output.end()


class _Output:
    """Where text goes: on the screen, as JSON lines, into subtitle files. A line is a cue, wherever it goes."""

    def __init__(self, as_json: bool, files: Sequence[SubtitleFile]) -> None:
        self.first_text_at: float | None = None
        self._as_json = as_json
        self._files = files
        self._splitter = CueSplitter()
        self._heard_s = 0.0
        self._parts: list[str] = []
        self._console = Console(highlight=False)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """On a terminal, show the line that still grows inside the block."""
        with nullcontext() if self._as_json else live(self._console, self._render):
            yield

    def take(self, delta: TranscriptDelta) -> None:
        """The next text."""
        if self.first_text_at is None:
            self.first_text_at = time.monotonic()
        # Into its line before it is told: who reads of it and ends this program finds it in the subtitles.
        cues = self._splitter.add(delta)
        try:
            if self._as_json:
                self._parts.append(delta.text)
                times = {"start": round(delta.start_s, 3), "end": round(delta.end_s, 3)}
                _print_json({"kind": "delta", "frame_index": delta.frame_index, **times, "text": delta.text})
        finally:
            self._put(cues)

    def heard(self, time_s: float) -> None:
        """So far there is no more text."""
        self._heard_s = time_s
        self._put(self._splitter.heard(time_s))

    def end(self) -> None:
        """What is left of the last line."""
        self._put(self._splitter.finish())

    def summarize(self, figures: _Figures) -> None:
        """The last word: figures, for programs with the whole text."""
        if self._as_json:
            _print_json({"kind": "summary", **figures.to_json(), "text": "".join(self._parts).strip()})
        else:
            stderr.print(figures.in_words(), soft_wrap=True)

    def _put(self, cues: list[Cue]) -> None:
        for cue in cues:
            for file in self._files:
                file.write(cue)
            if self._as_json:
                times = {"start": round(cue.start_s, 3), "end": round(cue.end_s, 3)}
                _print_json({"kind": "cue", "index": cue.index, **times, "text": cue.text})
            else:
                self._console.print(Text(cue.text), soft_wrap=True)

    def _render(self) -> Group:
        status = Text(f"{self._heard_s:.1f} s · Ctrl-C ends", style="dim")
        line = self._splitter.open_text
        return Group(*([Text(line, style="cyan")] if line else []), status)


@dataclass(frozen=True, slots=True)
class _Figures:
    """How long it took, in seconds. ``first_text_s`` is None where there was no text."""

    frames: int
    audio_s: float
    wall_s: float
    first_text_s: float | None
    close_to_final_s: float

    @classmethod
    def of(cls, session: LiveTranscription, feeder: Feeder, first_text_at: float | None, done_at: float) -> _Figures:
        """Of a session that is done. The clock starts when the source gave its first samples."""
        assert session.frames is not None and feeder.closed_at is not None
        started_at = feeder.closed_at if feeder.started_at is None else feeder.started_at
        first_text_s = None if first_text_at is None else first_text_at - started_at
        return cls(session.frames, feeder.fed_s, done_at - started_at, first_text_s, done_at - feeder.closed_at)

    @property
    def realtime_factor(self) -> float | None:
        return self.wall_s / self.audio_s if self.audio_s else None

    def to_json(self) -> dict[str, Any]:
        """By the names that users see."""
        return {
            "frames": self.frames,
            "audio_seconds": round(self.audio_s, 3),
            "wall_seconds": round(self.wall_s, 3),
            "realtime_factor": None if self.realtime_factor is None else round(self.realtime_factor, 4),
            "first_text_seconds": None if self.first_text_s is None else round(self.first_text_s, 3),
            "close_to_final_seconds": round(self.close_to_final_s, 3),
        }

    def in_words(self) -> str:
        """The same in a line."""
        parts = [f"{self.audio_s:.2f} s of audio in {self.wall_s:.2f} s"]
        if self.realtime_factor is not None:
            parts.append(f"real-time factor {self.realtime_factor:.3f}")
        parts.append("no text" if self.first_text_s is None else f"first text after {self.first_text_s:.2f} s")
        parts.append(f"final {self.close_to_final_s:.2f} s after the end of the input")
        return ", ".join(parts)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)
