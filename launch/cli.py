"""The command line. It parses, calls, and turns what went wrong into one line and an exit code.

Exit codes: 0 done, 1 a stage or a server failed, 2 a user's mistake, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

import vcpipe
from vcpipe.schemas.errors import (
    ActorDiedError,
    ActorStartupError,
    FrameContractError,
    RemoteError,
    StageTimeoutError,
    VcpipeError,
)

app = typer.Typer(
    name="vcpipe",
    help="Full-duplex speech with NemotronLabs-VoiceChat: four actor processes on one 80 ms frame clock.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

EXIT_STAGE, EXIT_USER = 1, 2
_STAGE_ERRORS = (ActorDiedError, ActorStartupError, FrameContractError, RemoteError, StageTimeoutError)


class Clock(str, Enum):
    """Names of the clocks a recording can be run on."""

    file = "file"
    wall = "wall"


class Pace(str, Enum):
    """How fast a recording is sent to a server."""

    real = "real"
    fast = "fast"


class Coding(str, Enum):
    """Codings of samples without a header."""

    s16le = "s16le"
    f32le = "f32le"


class Dtype(str, Enum):
    """Float types of a converted checkpoint."""

    bfloat16 = "bfloat16"
    float32 = "float32"


Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="DIR_OR_NAME", help="Checkpoint folder or Hub name; default: the embedded one."
    ),
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="cpu or gpu; default: what MLX prefers.")]
Tap = Annotated[str | None, typer.Option(metavar="ENDPOINT", help="Publish everything, e.g. tcp://127.0.0.1:5599.")]
SystemPrompt = Annotated[
    str | None, typer.Option("--system-prompt", "-p", metavar="TEXT", help="Default: the checkpoint's own.")
]
MostSeconds = Annotated[float | None, typer.Option(metavar="S", help="Stop after so much audio.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout, a summary last.")]
InputDevice = Annotated[str | None, typer.Option(metavar="NAME", help="Microphone: its number, or part of its name.")]
OutputDevice = Annotated[str | None, typer.Option(metavar="NAME", help="Loudspeaker: its number, or part of its name.")]
TtsHistory = Annotated[
    int | None,
    typer.Option(metavar="N", help="The speech decoder sees its last N frames; default: the model's own window."),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(vcpipe.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    audio: Annotated[str, typer.Option(metavar="IN", help="Recording: WAV, FLAC, OGG, ...; - reads WAV from stdin.")],
    output_audio: Annotated[
        Path | None, typer.Option(metavar="OUT.wav", help="Write the speech, 22.05 kHz PCM16.")
    ] = None,
    model: Model = None,
    system_prompt: SystemPrompt = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed, same bytes.")] = 0,
    stream: Annotated[
        bool, typer.Option("--stream/--offline", help="Frame by frame, or the whole waveform at once.")
    ] = True,
    max_streaming_seconds: MostSeconds = None,
    extra_seconds: Annotated[
        float, typer.Option(metavar="S", help="Silence appended, so that an answer is not cut.")
    ] = 3.0,
    channel: Annotated[int, typer.Option(metavar="N", help="Channel of a file with several, from 0.")] = 0,
    clock: Annotated[
        Clock, typer.Option(metavar="file|wall", help="As fast as possible, or one frame every 80 ms.")
    ] = Clock.file,
    language_cache: Annotated[
        bool,
        typer.Option("--language-cache/--no-language-cache", help="Off: recompute the history every frame (slow)."),
    ] = True,
    perception_cache: Annotated[
        bool,
        typer.Option("--perception-cache/--no-perception-cache", help="Off: recompute a window every frame (slow)."),
    ] = True,
    profile: Annotated[bool, typer.Option("--profile", help="Print a table of stage times.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace (opens in Perfetto).")
    ] = None,
    tap: Tap = None,
    device: Device = None,
    tts_history_frames: TtsHistory = None,
    as_json: AsJson = False,
) -> None:
    """Run a recording: text on stdout, speech into a WAV."""
    from vcpipe.launch.run import RunOptions
    from vcpipe.launch.run import run as run_recording

    run_recording(
        RunOptions(
            audio=audio,
            output_audio=output_audio,
            model=model,
            system_prompt=system_prompt,
            seed=seed,
            offline=not stream,
            max_streaming_seconds=max_streaming_seconds,
            extra_seconds=extra_seconds,
            channel=channel,
            clock=clock.value,
            language_cache=language_cache,
            perception_cache=perception_cache,
            profile=profile,
            trace=trace,
            tap=tap,
            device=device,
            tts_history_frames=tts_history_frames,
            as_json=as_json,
        )
    )


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0: any free one.")] = 8080,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="VCPIPE_API_KEY", help="Ask clients for this key.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Pages of this origin may connect too, e.g. https://a.example; repeatable."
        ),
    ] = None,
    max_sessions: Annotated[int, typer.Option(metavar="N", help="Sessions at a time.")] = 1,
    max_transcriptions: Annotated[
        int, typer.Option(metavar="N", help="Transcriptions at a time, live ones and files.")
    ] = 4,
    max_speech: Annotated[int, typer.Option(metavar="N", help="Texts spoken at a time, beside sessions.")] = 1,
    max_upload_bytes: Annotated[int, typer.Option(metavar="N", help="Largest file to transcribe.")] = 100 * 2**20,
    max_upload_seconds: Annotated[float, typer.Option(metavar="S", help="Longest file to transcribe.")] = 4 * 3600.0,
    max_seconds: Annotated[float, typer.Option(metavar="S", help="Most audio of a session.")] = 600.0,
    configure_timeout: Annotated[float, typer.Option(metavar="S", help="Time for session.update.")] = 30.0,
    idle_timeout: Annotated[float, typer.Option(metavar="S", help="Time without a message.")] = 120.0,
    max_message_bytes: Annotated[int, typer.Option(metavar="N", help="Longest message of a client.")] = 2**20,
    tap: Tap = None,
    device: Device = None,
    tts_history_frames: TtsHistory = None,
) -> None:
    """Serve /v1/realtime, and a page to talk to it."""
    from vcpipe.launch.serve import ServeOptions
    from vcpipe.launch.serve import serve as serve_model

    serve_model(
        ServeOptions(
            model=model,
            host=host,
            port=port,
            api_key=api_key,
            allow_origin=tuple(allow_origin or ()),
            max_sessions=max_sessions,
            max_transcriptions=max_transcriptions,
            max_speech=max_speech,
            max_upload_bytes=max_upload_bytes,
            max_upload_seconds=max_upload_seconds,
            max_seconds=max_seconds,
            configure_timeout=configure_timeout,
            idle_timeout=idle_timeout,
            max_message_bytes=max_message_bytes,
            tap=tap,
            device=device,
            tts_history_frames=tts_history_frames,
        )
    )


@app.command()
def tap(
    endpoint: Annotated[
        str, typer.Option(metavar="ENDPOINT", help="Where `vcpipe run --tap` publishes.")
    ] = "tcp://127.0.0.1:5599",
    topic: Annotated[
        list[str] | None, typer.Option(metavar="PREFIX", help="Only topics that begin so; repeatable. Default: all.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Leave when nothing came for so long.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Follow a running pipeline: events, timings, sessions."""
    from vcpipe.launch.tap import follow

    follow(endpoint, tuple(topic or ("",)), timeout, as_json)


@app.command()
def talk(
    url: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="ws://HOST:PORT of a `vcpipe serve`; default: a pipeline of its own."),
    ] = None,
    audio: Annotated[
        str | None, typer.Option(metavar="IN", help="Speak by this recording; - reads WAV from stdin.")
    ] = None,
    microphone: Annotated[
        bool, typer.Option("--mic", help="Speak by microphone; what is done without --audio.")
    ] = False,
    output_audio: Annotated[
        Path | None, typer.Option(metavar="OUT.wav", help="Write the answer, 22.05 kHz PCM16.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="VCPIPE_API_KEY", help="What the server asks for.")
    ] = None,
    model: Model = None,
    device: Device = None,
    system_prompt: SystemPrompt = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed and recording, same bytes.")] = 0,
    max_streaming_seconds: MostSeconds = None,
    pace: Annotated[
        Pace | None,
        typer.Option(metavar="real|fast", help="Send 80 ms every 80 ms, or as the server answers. Default: fast."),
    ] = None,
    extra_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Silence after the recording. Default: 3.", show_default=False)
    ] = None,
    channel: Annotated[
        int, typer.Option(metavar="N", help="Channel of a recording or microphone with several, from 0.")
    ] = 0,
    list_devices: Annotated[bool, typer.Option("--list-devices", help="Print microphones and loudspeakers.")] = False,
    input_device: InputDevice = None,
    output_device: OutputDevice = None,
    cushion: Annotated[
        int | None, typer.Option(metavar="FRAMES", help="Speech in hand before it is played, 80 ms each. Default: 3.")
    ] = None,
    half_duplex: Annotated[
        bool, typer.Option("--half-duplex", help="Send silence while the loudspeaker is heard.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Speak with the model, by microphone or recording; on a server or here."""
    from vcpipe.launch.talk import talk as conversation

    if list_devices:
        conversation.list_devices(as_json)
        return
    conversation.talk(
        conversation.TalkOptions(
            url=url,
            api_key=api_key,
            audio=audio,
            microphone=microphone,
            output_audio=output_audio,
            model=model,
            device=device,
            system_prompt=system_prompt,
            seed=seed,
            max_streaming_seconds=max_streaming_seconds,
            pace=None if pace is None else pace.value,
            extra_seconds=extra_seconds,
            channel=channel,
            input_device=input_device,
            output_device=output_device,
            cushion=cushion,
            half_duplex=half_duplex,
            as_json=as_json,
        )
    )


@app.command()
def transcribe(
    audio: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE", help="Recording: WAV, FLAC, OGG, ...; - reads WAV from stdin.", show_default=False
        ),
    ] = None,
    microphone: Annotated[bool, typer.Option("--mic", help="Transcribe the microphone; Ctrl-C ends.")] = False,
    srt: Annotated[Path | None, typer.Option(metavar="OUT.srt", help="Write subtitles.")] = None,
    vtt: Annotated[Path | None, typer.Option(metavar="OUT.vtt", help="Write WebVTT subtitles.")] = None,
    coding: Annotated[
        Coding | None,
        typer.Option("--format", metavar="s16le|f32le", help="The input is mono samples without a header."),
    ] = None,
    rate: Annotated[
        int | None, typer.Option(metavar="HZ", help="Of such samples. Default: 16000.", show_default=False)
    ] = None,
    model: Model = None,
    channel: Annotated[
        int, typer.Option(metavar="N", help="Channel of a recording or microphone with several, from 0.")
    ] = 0,
    clock: Annotated[
        Clock, typer.Option(metavar="file|wall", help="As fast as possible, or as if it were spoken now.")
    ] = Clock.file,
    input_device: InputDevice = None,
    language: Annotated[
        str | None, typer.Option(metavar="en", help="The model speaks English; it is not told.")
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Speech to text, live: a recording, a pipe or the microphone."""
    from vcpipe.launch.transcribe import TranscribeOptions
    from vcpipe.launch.transcribe import transcribe as transcribe_audio

    transcribe_audio(
        TranscribeOptions(
            source=audio,
            microphone=microphone,
            input_device=input_device,
            channel=channel,
            coding=None if coding is None else coding.value,
            rate=rate,
            srt=srt,
            vtt=vtt,
            clock=clock.value,
            language=language,
            model=model,
            device=device,
            as_json=as_json,
        )
    )


@app.command()
def speak(
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="What to say; - or nothing: stdin, as it arrives.", show_default=False),
    ] = None,
    text_file: Annotated[
        Path | None, typer.Option("--text-file", "-f", metavar="FILE", help="Say what this UTF-8 file holds.")
    ] = None,
    output_audio: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.wav", help="Write the speech, 22.05 kHz PCM16; - is stdout. Default: the loudspeaker."
        ),
    ] = None,
    model: Model = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed and text, same bytes.")] = 0,
    output_device: OutputDevice = None,
    device: Device = None,
    tts_history_frames: TtsHistory = None,
    as_json: AsJson = False,
) -> None:
    """Text to speech: an argument, a file, or a pipe while it is written."""
    from vcpipe.launch.speak import SpeakOptions
    from vcpipe.launch.speak import speak as speak_text

    speak_text(
        SpeakOptions(
            text=text,
            text_file=text_file,
            output_audio=output_audio,
            output_device=output_device,
            seed=seed,
            model=model,
            device=device,
            tts_history_frames=tts_history_frames,
            as_json=as_json,
        )
    )


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Checkpoint folder, NeMo or public layout.")],
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="New folder for the public MLX layout.")],
    dtype: Annotated[Dtype, typer.Option(metavar="bfloat16|float32", help="Type of the floats.")] = Dtype.bfloat16,
    bits: Annotated[int | None, typer.Option(metavar="4|8", help="Quantise the language model.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder with tokenizer.json, where the source has none.")
    ] = None,
) -> None:
    """Write a checkpoint in the public MLX layout."""
    from vcpipe.launch.convert import convert as convert_checkpoint

    convert_checkpoint(source, destination, dtype.value, bits, tokenizer)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what this machine has, and what would be slow and why."""
    from vcpipe.launch.doctor import examine, show

    show(examine(), as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure stages, pipeline, messaging; see `vcpipe bench --help`."""
    from vcpipe.launch.bench import run_bench

    raise typer.Exit(run_bench(context.args))


def main() -> None:
    """Entry point of the ``vcpipe`` command."""
    run_app(app)


def run_app(command: Callable[[], None]) -> None:
    """Run a command line: signals end it in good order, errors become one line and an exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        command()
    except _STAGE_ERRORS as error:
        _fail(error, EXIT_STAGE)
    except (VcpipeError, ValueError) as error:
        _fail(error, EXIT_USER)


def _leave(number: int, frame: FrameType | None) -> None:
    # An exception, so that files are finished and processes stopped on the way out.
    raise SystemExit(128 + number)


def _fail(error: Exception, code: int) -> None:
    from vcpipe.launch.console import fail

    fail(str(error))
    sys.exit(code)
