"""``vcpipe run``: a recording in, text on stdout, speech in a WAV."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vcpipe.launch.audio_io import AudioReader, WavWriter
from vcpipe.launch.console import LoadingBar, StreamedText, frame_bar, print_profile, stderr, tell_of, warn
from vcpipe.launch.library import start_pipeline
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.trace import TraceWriter
from vcpipe.pipeline.tracks import Delivery, FrameTiming, OfflineResult
from vcpipe.schemas.config import ClockKind, GenerateOptions, SessionOptions
from vcpipe.schemas.errors import ConfigError, ContextLimitError
from vcpipe.schemas.events import Event

#: An answer whose text reaches into this many last frames was probably cut.
_CUT_FRAMES = 5


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line asked for; see ``vcpipe run --help``."""

    audio: str
    output_audio: Path | None = None
    model: str | None = None
    system_prompt: str | None = None
    seed: int = 0
    offline: bool = False
    max_streaming_seconds: float | None = None
    extra_seconds: float = 3.0
    channel: int = 0
    clock: ClockKind = "file"
    language_cache: bool = True
    perception_cache: bool = True
    profile: bool = False
    trace: Path | None = None
    tap: str | None = None
    device: str | None = None
    tts_history_frames: int | None = None
    as_json: bool = False


def run(options: RunOptions) -> None:
    """Run one recording through a pipeline of its own. Raises VcpipeError or ValueError for what the user can mend."""
    if options.extra_seconds < 0:
        raise ConfigError(f"--extra-seconds must not be negative, got {options.extra_seconds:g}")
    if options.offline:
        _refuse_streaming_options(options)
    with ExitStack() as stack:
        reader = stack.enter_context(AudioReader(options.audio, channel=options.channel))
        # Some are known only once the whole input was read.
        stack.callback(_warn_all, reader.warnings)
        pipeline = stack.enter_context(_start(options, stack))
        rate = pipeline.geometry.output_sample_rate
        writer = stack.enter_context(WavWriter(options.output_audio, rate)) if options.output_audio else None
        output = _Output(options.as_json, writer)
        if options.offline:
            _run_offline(options, pipeline, reader, output)
        else:
            _run_streaming(options, pipeline, reader, output)


def _refuse_streaming_options(options: RunOptions) -> None:
    """An offline run has no frame clock and perceives the whole waveform at once."""
    streaming = {
        "--clock wall": options.clock == "wall",
        "--profile": options.profile,
        "--trace": options.trace is not None,
        "--no-perception-cache": not options.perception_cache,
    }
    for option, given in streaming.items():
        if given:
            raise ConfigError(f"{option} needs --stream: an offline run is not worked on frame by frame")


def _start(options: RunOptions, stack: ExitStack) -> Pipeline:
    trace = TraceWriter(options.trace) if options.trace else None
    if trace is not None:
        stack.callback(trace.close)

    def listener(session: str, delivery: Delivery) -> None:
        if trace is not None and isinstance(delivery, FrameTiming):
            trace.add(delivery)

    with LoadingBar().shown() as bar:
        pipeline = start_pipeline(
            options.model,
            device=options.device,
            tap=options.tap,
            tts_history_frames=options.tts_history_frames,
            on_progress=bar.update,
            listener=listener,
        )
    tell_of(pipeline.warnings, pipeline.checkpoint_config)
    return pipeline


def _warn_all(lines: list[str]) -> None:
    for line in lines:
        warn(line)


@dataclass
class _Output:
    """Where events go: JSON lines or text on stdout, samples into the WAV."""

    as_json: bool
    writer: WavWriter | None
    frames: int = 0
    transcript: str = ""
    text: str = ""
    last_text_frame: int | None = None
    _shown: StreamedText = field(default_factory=StreamedText)

    def take(self, event: Event) -> None:
        if event.kind == "user_transcript_delta":
            self.transcript = event.text or ""
        elif event.kind == "assistant_text_delta":
            self.text = event.text or ""
            self.last_text_frame = event.frame_index
            if not self.as_json:
                self._shown.show(self.text)
        elif event.kind == "audio" and event.samples is not None:
            self.frames += 1
            if self.writer is not None:
                self.writer.write(event.samples)
        # Last: who reads of a frame and interrupts finds its sound in the file.
        if self.as_json:
            print(json.dumps(event.to_json(), ensure_ascii=False), flush=True)

    def finish(self, wall_s: float, geometry: Any, extra: dict[str, Any]) -> None:
        audio_s = self.frames * geometry.frame_duration_s
        summary = {
            "kind": "summary",
            "frames": self.frames,
            "wall_seconds": round(wall_s, 3),
            "realtime_factor": round(wall_s / audio_s, 4) if audio_s else None,
            "transcript": self.transcript,
            "text": self.text,
            **extra,
        }
        if self.last_text_frame is not None and self.last_text_frame >= self.frames - _CUT_FRAMES:
            warn("text was still coming in the last frames: the answer may be cut, raise --extra-seconds")
        if self.as_json:
            print(json.dumps(summary, ensure_ascii=False), flush=True)
            return
        self._shown.finish(self.text)
        if self.transcript:
            stderr.print("heard:", self.transcript, markup=False)
        if audio_s:
            stderr.print(
                f"{self.frames} frames ({audio_s:.2f} s) in {wall_s:.2f} s, real-time factor {wall_s / audio_s:.3f}"
            )


def _run_streaming(options: RunOptions, pipeline: Pipeline, reader: AudioReader, output: _Output) -> None:
    session_options = SessionOptions(
        system_prompt=options.system_prompt,
        seed=options.seed,
        max_streaming_seconds=options.max_streaming_seconds,
        use_language_cache=options.language_cache,
        use_perception_cache=options.perception_cache,
        profile=options.profile,
        clock=options.clock,
    )
    total_s = None if reader.duration_s is None else reader.duration_s + options.extra_seconds
    with pipeline.open_session(session_options) as session, frame_bar(total_s) as show:
        started = time.monotonic()
        try:
            for event in session.stream(_with_silence(reader, options.extra_seconds, pipeline)):
                output.take(event)
                show((event.frame_index + 1) * pipeline.geometry.frame_duration_s)
        except ContextLimitError as error:
            warn(str(error))
            for event in session.flush(pad_partial=False):
                output.take(event)
        wall_s = time.monotonic() - started
    extra: dict[str, Any] = {}
    if session.profiler is not None:
        extra["profile"] = session.profiler.summary()
        if not options.as_json:
            print_profile(extra["profile"])
    output.finish(wall_s, pipeline.geometry, extra)


def _run_offline(options: RunOptions, pipeline: Pipeline, reader: AudioReader, output: _Output) -> None:
    geometry = pipeline.geometry
    limit_s = options.max_streaming_seconds
    samples = np.concatenate([*reader.chunks(), np.zeros(0, np.float32)])
    generate = GenerateOptions(
        system_prompt=options.system_prompt,
        seed=options.seed,
        max_frames=None if limit_s is None else int(limit_s / geometry.frame_duration_s),
        extra_decoding_seconds=options.extra_seconds,
        use_language_cache=options.language_cache,
    )
    started = time.monotonic()
    with frame_bar(len(samples) / geometry.input_sample_rate + options.extra_seconds) as show:

        def take(event: Event) -> None:
            output.take(event)
            show((event.frame_index + 1) * geometry.frame_duration_s)

        result = pipeline.generate(samples, generate, take)
    wall_s = time.monotonic() - started
    for event in _audio_events(result, geometry.output_samples):
        output.take(event)
    output.finish(wall_s, geometry, {})


def _audio_events(result: OfflineResult, output_samples: int) -> Iterator[Event]:
    for index, codes in enumerate(result.audio_codes):
        samples = result.audio[index * output_samples : (index + 1) * output_samples]
        yield Event("audio", index, samples=samples, sample_rate=result.sample_rate, audio_codes=codes)


def _with_silence(reader: AudioReader, extra_s: float, pipeline: Pipeline) -> Iterator[np.ndarray]:
    """The recording, then so much silence, in pieces of a frame at most."""
    size = pipeline.geometry.frame_samples
    for chunk in reader.chunks():
        for start in range(0, len(chunk), size):
            yield chunk[start : start + size]
    silence = np.zeros(round(extra_s * pipeline.geometry.input_sample_rate), np.float32)
    for start in range(0, len(silence), size):
        yield silence[start : start + size]
