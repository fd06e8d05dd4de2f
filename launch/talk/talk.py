"""``vcpipe talk``: speak with a server, or one of its own if none is named, by recording or by microphone and loudspeaker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcpipe.launch.audio_io import AudioReader, WavWriter
from vcpipe.launch.console import stderr, warn
from vcpipe.launch.talk.client import AnswerFile, Pace, Recording
from vcpipe.launch.talk.connection import Connection, SessionInfo, SessionRequest, open_socket, realtime_url
from vcpipe.launch.talk.conversation import Interrupts, Listener, converse
from vcpipe.launch.talk.devices import all_devices, find_device, load_sound
from vcpipe.launch.talk.local import local_server
from vcpipe.launch.talk.microphone import Microphone, Speaker
from vcpipe.launch.talk.screen import Screen
from vcpipe.schemas.errors import ConfigError

#: Exit code of a command that Ctrl-C ended.
_INTERRUPTED = 130

#: Silence after a recording in seconds, and speech in hand before it is played in frames, where nothing else is asked for.
_EXTRA_SECONDS = 3.0
_CUSHION = 3
_MOST_CUSHION = 100


@dataclass(frozen=True, slots=True)
class TalkOptions:
    """What the command line asked for; see ``vcpipe talk --help``. None takes the default."""

    url: str | None = None
    api_key: str | None = None
    audio: str | None = None
    microphone: bool = False
    output_audio: Path | None = None
    model: str | None = None
    device: str | None = None
    system_prompt: str | None = None
    seed: int = 0
    max_streaming_seconds: float | None = None
    pace: Pace | None = None
    extra_seconds: float | None = None
    channel: int = 0
    input_device: str | None = None
    output_device: str | None = None
    cushion: int | None = None
    half_duplex: bool = False
    as_json: bool = False


def talk(options: TalkOptions) -> None:
    """Hold one conversation. Raises VcpipeError; SystemExit(130) where Ctrl-C cut it short."""
    _check(options)
    try:
        with contextlib.ExitStack() as stack:
            reader = None
            if options.audio is not None:
                reader = stack.enter_context(AudioReader(options.audio, channel=options.channel))
                # Some are known only once the whole input was read.
                stack.callback(_warn_all, reader.warnings)
            url, api_key = options.url, options.api_key
            if url is None:
                url, api_key = stack.enter_context(local_server(options.model, options.device))
            interrupted = asyncio.run(_talk(options, realtime_url(url), api_key, reader))
    except asyncio.CancelledError:
        interrupted = True
    if interrupted:
        raise SystemExit(_INTERRUPTED)


def list_devices(as_json: bool) -> None:
    """Print microphones and loudspeakers with the numbers that --input-device and --output-device take."""
    devices = all_devices(load_sound())
    for device in devices:
        if as_json:
            print(json.dumps({name: getattr(device, name) for name in device.__slots__}, ensure_ascii=False))
        else:
            mark = "*" if device.is_default else " "
            print(
                f"{device.kind:>6} {mark} {device.index:>3}  {device.name}  ({device.channels} ch, {device.rate:g} Hz)"
            )
    if not devices:
        stderr.print("no sound devices")


def _check(options: TalkOptions) -> None:
    """Options that would have no effect are a mistake."""
    if options.audio is not None and options.microphone:
        raise ConfigError("--audio and --mic exclude each other")
    if options.cushion is not None and not 0 <= options.cushion <= _MOST_CUSHION:
        raise ConfigError(f"--cushion must be 0 to {_MOST_CUSHION} frames, got {options.cushion}")
    if options.extra_seconds is not None and options.extra_seconds < 0:
        raise ConfigError(f"--extra-seconds must not be negative, got {options.extra_seconds:g}")
    if options.channel < 0:
        raise ConfigError(f"--channel counts from 0, got {options.channel}")
    microphone = {
        "--input-device": options.input_device,
        "--output-device": options.output_device,
        "--cushion": options.cushion,
        "--half-duplex": options.half_duplex or None,
    }
    recording = {"--pace": options.pace, "--extra-seconds": options.extra_seconds}
    for option, value in (recording if options.audio is None else microphone).items():
        if value is not None:
            needs = "--audio" if options.audio is None else "the microphone, not --audio"
            raise ConfigError(f"{option} needs {needs}")
    if options.url is not None and options.device is not None:
        raise ConfigError("--device needs a pipeline of its own, not --url")
    key = options.api_key
    if key is not None and not (key.isascii() and key.isprintable() and key and " " not in key):
        raise ConfigError("--api-key must be printable ASCII without spaces")


async def _talk(options: TalkOptions, url: str, api_key: str | None, reader: AudioReader | None) -> bool:
    """Returns whether Ctrl-C cut the recording short; a microphone has no other end."""
    async with contextlib.AsyncExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        # Before the server is asked: a device that does not work should not cost a session.
        devices = _open_devices(options, stack) if reader is None else None
        connection = await stack.enter_async_context(open_socket(url, api_key))
        info = await connection.configure(_request(options))
        if devices is not None:
            await _speak(options, connection, info, devices, interrupts)
        else:
            assert reader is not None
            await _play(options, connection, info, reader, interrupts)
        return reader is not None and interrupts.stopped


def _request(options: TalkOptions) -> SessionRequest:
    # A server of one's own has loaded the model already, and knows it by another name.
    model = None if options.url is None else options.model
    return SessionRequest(model, options.system_prompt, options.seed, options.max_streaming_seconds)


async def _play(
    options: TalkOptions, connection: Connection, info: SessionInfo, reader: AudioReader, interrupts: Interrupts
) -> None:
    """A recording in, the answer on the screen and in a file."""
    extra_s = _EXTRA_SECONDS if options.extra_seconds is None else options.extra_seconds
    recording = Recording(reader, info, options.pace or "fast", extra_s)
    screen = Screen(options.as_json, lambda: _clock(screen, info))
    interrupts.stop = recording.stop
    started = time.monotonic()
    with _answer_file(options, info) as file, screen.shown():
        await converse(connection, recording, [recording, *file, screen])
    wall_s = time.monotonic() - started
    if recording.cut and not interrupts.stopped:
        warn(f"the session takes {info.limit_s:g} s of audio: the rest was not sent")
    elif screen.cut and not interrupts.stopped:
        warn("text was still coming in the last frames: the answer may be cut, raise --extra-seconds")
    _summarize(options, screen, info, wall_s, {})


async def _speak(
    options: TalkOptions, connection: Connection, info: SessionInfo, devices: _Devices, interrupts: Interrupts
) -> None:
    """The microphone in, the answer out of the loudspeaker, on the screen, and in a file if wanted."""
    speaker, microphone = devices.speaker, devices.microphone
    screen = Screen(options.as_json, lambda: _clock(screen, info, f"{_counts(speaker)} · Ctrl-C ends"))
    microphone.configure(info)
    speaker.start(info)
    interrupts.stop = microphone.stop
    if not options.as_json:
        note = "" if options.half_duplex else "; with headphones, or --half-duplex, it does not hear itself"
        stderr.print(f"Speak now. Ctrl-C ends{note}.", soft_wrap=True)
    started = time.monotonic()
    with _answer_file(options, info) as file, screen.shown():
        await converse(connection, microphone, [speaker, *file, screen])
        await speaker.play_out()
    wall_s = time.monotonic() - started
    if not options.as_json:
        stderr.print(_counts(speaker))
    playback = speaker.playback
    counts = {} if playback is None else {"underruns": playback.underruns, "left_out_frames": playback.left_out}
    _summarize(options, screen, info, wall_s, counts)


@dataclass(frozen=True, slots=True)
class _Devices:
    microphone: Microphone
    speaker: Speaker


def _open_devices(options: TalkOptions, stack: contextlib.AsyncExitStack) -> _Devices:
    sound = load_sound()
    wanted_input = find_device(sound, "input", options.input_device)
    wanted_output = find_device(sound, "output", options.output_device)
    speaker = Speaker(sound, wanted_output, _CUSHION if options.cushion is None else options.cushion)
    stack.callback(speaker.close)
    muted = (lambda: speaker.speaking) if options.half_duplex else (lambda: False)
    microphone = Microphone(sound, wanted_input, channel=options.channel, muted=muted)
    stack.callback(microphone.close)
    speaker.on_failure = microphone.fail
    return _Devices(microphone, speaker)


@contextlib.contextmanager
def _answer_file(options: TalkOptions, info: SessionInfo) -> Iterator[list[Listener]]:
    if options.output_audio is None:
        yield []
    else:
        with WavWriter(options.output_audio, info.output_rate) as writer:
            yield [AnswerFile(writer)]


def _clock(screen: Screen, info: SessionInfo, more: str = "") -> str:
    return " · ".join(part for part in (f"{screen.frames * info.frame_s:.1f} s", more) if part)


def _counts(speaker: Speaker) -> str:
    underruns = 0 if speaker.playback is None else speaker.playback.underruns
    return "1 underrun" if underruns == 1 else f"{underruns} underruns"


def _summarize(options: TalkOptions, screen: Screen, info: SessionInfo, wall_s: float, extra: dict[str, Any]) -> None:
    if options.as_json:
        screen.summarize({"wall_seconds": round(wall_s, 3), **extra})
    else:
        stderr.print(f"{screen.frames} frames ({screen.frames * info.frame_s:.2f} s) in {wall_s:.2f} s")


def _warn_all(lines: list[str]) -> None:
    for line in lines:
        warn(line)
