"""One session on a realtime server, as a client sees it: the handshake, audio there, messages back, one end."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from vcpipe.schemas.errors import ConfigError, RemoteError

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
except ImportError:
    raise ConfigError("vcpipe talk needs the package websockets: pip install 'vcpipe[serve]'") from None

#: A message of the server, decoded.
Message = Mapping[str, Any]

#: Messages after which a session has no more.
TERMINAL_TYPES = ("response.done", "response.cancelled")

_DEFAULT_PATH = "/v1/realtime"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CLOSE_TIMEOUT_S = 1.0

_REFUSALS = {
    401: "it wants a key: give --api-key",
    403: "it refuses this client or its key",
    404: "it has no such path",
    501: "it does not serve this model so",
}


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a client asks of the session; None leaves it to the server. See ``SessionOptions``."""

    model: str | None = None
    system_prompt: str | None = None
    seed: int = 0
    max_streaming_seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The ``session`` object of session.update."""
        fields = ("model", "system_prompt", "seed", "max_streaming_seconds")
        return {name: value for name in fields if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What the server said of an open session; rates in Hz. ``limit_s``: most audio it takes, where it says so."""

    id: str
    model: str
    input_rate: int
    output_rate: int
    frame_samples: int
    limit_s: float | None = None

    @property
    def frame_s(self) -> float:
        """Length of a frame in seconds."""
        return self.frame_samples / self.input_rate

    @property
    def output_samples(self) -> int:
        """Samples of speech in a frame."""
        return round(self.frame_s * self.output_rate)


def realtime_url(text: str) -> str:
    """``text`` as the address of a WebSocket: http means ws, and the path may be missing. Raises ConfigError."""
    parts = urlsplit(text)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    try:
        usable = scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0 and not parts.fragment
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{text!r} is no address of a realtime server; accepted: ws://HOST:PORT{_DEFAULT_PATH}, or wss://"
        )
    path = _DEFAULT_PATH if parts.path in ("", "/") else parts.path
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


def encode_pcm16(samples: np.ndarray) -> str:
    """Float samples -> base64 of little-endian int16. Times 32768, as the server undoes it, so a 16-bit file stays as it is."""
    scaled = np.clip(np.rint(samples * 32768.0), -32768, 32767)
    return base64.b64encode(scaled.astype("<i2").tobytes()).decode("ascii")


def decode_pcm16(message: Message) -> bytes:
    """The PCM16 of an audio delta. Raises RemoteError where it holds none."""
    try:
        pcm = base64.b64decode(message["delta"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise RemoteError("the server sent an audio delta that is not base64") from None
    if len(pcm) % 2:
        raise RemoteError(f"the server sent an audio delta of {len(pcm)} bytes; PCM16 has an even number")
    return pcm


def describe_error(message: Message) -> str:
    """One line for an ``error`` message."""
    error = message.get("error")
    if not isinstance(error, Mapping):
        return "the server reports an error without saying which"
    return plain(f"the server says {error.get('code', 'error')}: {error.get('message', 'nothing more')}")


def plain(text: str) -> str:
    """``text`` of a server without what would make a terminal do something."""
    return "".join(character if character.isprintable() else " " for character in text)


class Connection:
    """An open session: append, commit, and read messages until it ends. Made by :func:`open_socket`."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def append(self, samples: np.ndarray) -> None:
        """Send (n,) float32 samples at the session's input rate."""
        await self._send({"type": "input_audio_buffer.append", "audio": encode_pcm16(samples)})

    async def commit(self, pad_partial: bool) -> None:
        """Close the input; ``pad_partial``: samples that fill no frame become one with zeros after them."""
        await self._send({"type": "input_audio_buffer.commit", "pad_partial": pad_partial})

    async def messages(self) -> AsyncIterator[Message]:
        """Messages as they come, the one that ends the session last. Raises RemoteError where the connection ends before."""
        while True:
            message = await self.receive()
            yield message
            if message["type"] in TERMINAL_TYPES:
                return

    async def configure(self, request: SessionRequest) -> SessionInfo:
        """Ask for a session and wait, as long as the server loads its model. Raises RemoteError where it refuses."""
        # The greeting first: a server that is busy says so instead, and closes.
        await self._accepted()
        await self._send({"type": "session.update", "session": request.to_json()})
        while (message := await self._accepted())["type"] != "session.updated":
            pass
        return _session_info(message)

    async def _accepted(self) -> Message:
        message = await self.receive()
        if message["type"] == "error":
            raise RemoteError(describe_error(message))
        return message

    async def receive(self) -> Message:
        """The next message. Raises RemoteError where there is none, or one of another form."""
        try:
            text = await self._socket.recv()
        except ConnectionClosed as closed:
            raise RemoteError(_closed(closed)) from None
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise RemoteError(f"the server sent {text[:80]!r}, not a message of the realtime protocol")
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            await self._socket.send(json.dumps(message))
        except ConnectionClosed as closed:
            raise RemoteError(_closed(closed)) from None


@asynccontextmanager
async def open_socket(url: str, api_key: str | None) -> AsyncIterator[Connection]:
    """Connect to ``url``. Raises ConfigError where nothing answers, or what answers refuses the handshake."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    handshake = connect(
        url,
        additional_headers=headers,
        proxy=None if urlsplit(url).hostname in _LOOPBACK else True,
        compression=None,
        close_timeout=_CLOSE_TIMEOUT_S,
    )
    try:
        socket = await handshake
    except InvalidStatus as refused:
        status = refused.response.status_code
        raise ConfigError(f"{url} answered HTTP {status}: {_REFUSALS.get(status, 'no WebSocket there')}") from None
    except (InvalidHandshake, InvalidURI) as error:
        raise ConfigError(f"{url} is no WebSocket: {error}") from None
    except TimeoutError:
        raise ConfigError(f"{url} does not answer") from None
    except OSError as error:
        reason = "connection refused" if isinstance(error, ConnectionRefusedError) else error.strerror or str(error)
        raise ConfigError(f"nothing answers at {url}: {reason}; is `vcpipe serve` running?") from None
    try:
        yield Connection(socket)
    finally:
        await socket.close()


def _session_info(message: Message) -> SessionInfo:
    try:
        session = message["session"]
        return SessionInfo(
            id=str(session["id"]),
            model=str(session["model"]),
            input_rate=int(session["input_audio_format"]["sample_rate"]),
            output_rate=int(session["output_audio_format"]["sample_rate"]),
            frame_samples=int(session["frame_samples"]),
            limit_s=None if (limit := session.get("max_streaming_seconds")) is None else float(limit),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteError(f"the server's session.updated lacks a usable {error}") from None


def _closed(closed: ConnectionClosed) -> str:
    if closed.rcvd is None:
        return "the connection to the server was lost"
    reason = f" ({plain(closed.rcvd.reason)})" if closed.rcvd.reason else ""
    return f"the server closed the connection, code {closed.rcvd.code}{reason}"
