"""Microphones and loudspeakers by name, opened in a form that they take. The one place that knows the sounddevice library."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vcpipe.schemas.errors import AudioInputError, ConfigError

Kind = Literal["input", "output"]

_NAMES = {"input": "microphone", "output": "loudspeaker"}

#: Tried after the device's own rate, in Hz.
_COMMON_RATES = (48000.0, 44100.0)

#: Asked of a device, in seconds: half a frame, as what a device calls its lowest is less than Python's threads can promise.
_LATENCY_S = 0.04


@dataclass(frozen=True, slots=True)
class Device:
    """One microphone or loudspeaker; ``rate`` in Hz is the one it prefers."""

    index: int
    name: str
    kind: Kind
    channels: int
    rate: float
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """A device in the form in which it could be opened, not started yet."""

    device: Device
    stream: Any
    rate: float
    channels: int

    def start(self) -> None:
        """Begin to call back. Raises the device's error."""
        try:
            self.stream.start()
        except Exception as error:  # noqa: BLE001 - the library's own class is not importable here
            raise device_error(self.device, f"cannot be started: {error}") from None

    def stop(self) -> None:
        """What is on its way is still recorded or played."""
        self.stream.stop()

    def abort(self) -> None:
        """Stop at once."""
        self.stream.abort()

    def close(self) -> None:
        """Let go of the device."""
        self.stream.close()


def load_sound() -> Any:
    """The sounddevice module. Raises ConfigError where it, or the PortAudio library under it, is not there."""
    try:
        return importlib.import_module("sounddevice")
    except ImportError:
        raise ConfigError(
            "microphone and loudspeaker need the package sounddevice: pip install 'vcpipe[mic]'"
        ) from None
    except OSError as error:
        raise ConfigError(f"sounddevice cannot be used: {error}; install PortAudio (Debian: libportaudio2)") from None


def all_devices(sound: Any) -> list[Device]:
    """Every microphone, then every loudspeaker."""
    try:
        rows = list(sound.query_devices())
        defaults = dict(zip(("input", "output"), sound.default.device, strict=True))
    except sound.PortAudioError as error:
        raise AudioInputError(f"the sound devices cannot be listed: {error}") from None
    kinds: tuple[Kind, ...] = ("input", "output")
    return [
        _device(row, kind, is_default=row["index"] == defaults[kind])
        for kind in kinds
        for row in rows
        if row[f"max_{kind}_channels"] > 0
    ]


def find_device(sound: Any, kind: Kind, wanted: str | None) -> Device:
    """The one of that number, or part of a name; None for the default. Raises the error that lists what there is."""
    candidates = [device for device in all_devices(sound) if device.kind == kind]
    if wanted is None:
        found = [device for device in candidates if device.is_default]
    elif wanted.isdecimal():
        found = [device for device in candidates if device.index == int(wanted)]
    else:
        part = wanted.casefold()
        found = [device for device in candidates if part in device.name.casefold()]
        found = [device for device in found if part == device.name.casefold()] or found
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{device.index} {device.name!r}" for device in found or candidates) or "none"
    if found:
        raise AudioInputError(f"{wanted!r} may be several {_NAMES[kind]}s: {there}; give the number")
    what = f"no {_NAMES[kind]} {wanted!r}" if wanted is not None else f"no default {_NAMES[kind]}"
    raise AudioInputError(f"there is {what}; there are: {there}")


def open_device(
    sound: Any,
    device: Device,
    callback: Callable[[np.ndarray, int, Any, Any], None],
    on_finished: Callable[[], None],
    *,
    least_channels: int = 1,
) -> OpenDevice:
    """Open at a rate and with channels that the device takes: its own rate and one channel, if it can.

    ``callback`` gets (n, channels) float32 blocks on a thread of its own; ``on_finished`` is called when they end. Raises
    AudioInputError that names the device and what was tried.
    """
    check, stream = {
        "input": (sound.check_input_settings, sound.InputStream),
        "output": (sound.check_output_settings, sound.OutputStream),
    }[device.kind]
    if device.channels < least_channels:
        raise device_error(device, f"has {device.channels} channels, so none of number {least_channels - 1}")
    rates = list(dict.fromkeys((device.rate, *_COMMON_RATES)))
    counts = [
        n for n in dict.fromkeys((least_channels, 1, 2, device.channels)) if least_channels <= n <= device.channels
    ]
    reason: Exception | None = None
    for rate in rates:
        for channels in counts:
            form = {"device": device.index, "samplerate": rate, "channels": channels, "dtype": "float32"}
            try:
                check(**form)
                opened = stream(**form, latency=_LATENCY_S, callback=callback, finished_callback=on_finished)
            except (sound.PortAudioError, ValueError) as error:
                reason = reason or error
            else:
                return OpenDevice(device, opened, float(rate), channels)
    tried = f"{_either([f'{rate:g}' for rate in rates])} Hz with {_either([str(n) for n in counts])} channels"
    raise device_error(device, f"cannot be opened at {tried}: {reason}")


def device_error(device: Device, what: str) -> AudioInputError:
    """An error that begins with the device's name."""
    return AudioInputError(f"{_NAMES[device.kind]} {device.name!r} {what}")


def _device(row: dict[str, Any], kind: Kind, *, is_default: bool) -> Device:
    rate = float(row["default_samplerate"])
    return Device(row["index"], row["name"], kind, row[f"max_{kind}_channels"], rate, is_default)


def _either(values: list[str]) -> str:
    return " or ".join([", ".join(values[:-1]), values[-1]] if len(values) > 1 else values)
