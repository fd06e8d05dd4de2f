"""Who may connect: the API key, and the origin of the page a browser speaks for.

A browser lets any web page open a WebSocket to any address and tells the page's origin, so the origin is what keeps foreign
pages out of a server on the user's own machine. Other clients send none.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from vcpipe.schemas.errors import ConfigError

#: The subprotocol that is selected where a client offers it, and the one that carries a key: browsers can send no header.
SUBPROTOCOL = "realtime"
KEY_SUBPROTOCOL = "openai-insecure-api-key."

_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_WEB_SCHEME = {"ws": "http", "wss": "https", "http": "http", "https": "https"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port, compared as they are."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Origin:
        """``http://host[:port]``, nothing after it. Raises ValueError."""
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(f"{text!r} is no origin; accepted: http://host[:port] or https://host[:port]")
        if parts.path or parts.query or parts.fragment or text != text.strip() or text[-1] in "?#":
            raise ValueError(f"{text!r} has more than scheme, host and port")
        return cls(parts.scheme, parts.hostname.lower(), parts.port or _DEFAULT_PORTS[parts.scheme])


def is_loopback(host: str) -> bool:
    """Whether a host name or address leads to this machine and nowhere else."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused, and with which HTTP status."""

    status: int
    message: str


class Gate:
    """``key``: None lets everybody in. ``origins``: allowed beside loopback and the server's own."""

    def __init__(self, key: str | None = None, origins: Iterable[str] = ()) -> None:
        if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
            raise ConfigError("the API key must be printable ASCII without spaces, at least one character")
        self._key = key
        try:
            self._origins = frozenset(Origin.parse(origin) for origin in origins)
        except ValueError as error:
            raise ConfigError(f"--allow-origin: {error}") from None

    @property
    def has_key(self) -> bool:
        """Whether a key is asked for."""
        return self._key is not None

    def check_key(self, headers: Mapping[str, str], subprotocols: Iterable[str] = ()) -> Refusal | None:
        """``Authorization: Bearer KEY``, or the subprotocol that carries it."""
        if self._key is None:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        candidates = [given.strip()] if scheme.lower() == "bearer" else []
        candidates += [name.removeprefix(KEY_SUBPROTOCOL) for name in subprotocols if name.startswith(KEY_SUBPROTOCOL)]
        for candidate in candidates:
            if hmac.compare_digest(candidate.encode("utf-8", "replace"), self._key.encode()):
                return None
        return Refusal(401, "a valid API key is needed: Authorization: Bearer KEY")

    def check_origin(self, headers: Mapping[str, str], scheme: str) -> Refusal | None:
        """``scheme``: that of the request, ws or wss."""
        given = headers.get("origin")
        if given is None:
            return None
        try:
            origin = Origin.parse(given)
        except ValueError:
            return Refusal(403, "this origin may not connect")
        if is_loopback(origin.host) or origin in self._origins or self._is_own(origin, headers.get("host", ""), scheme):
            return None
        return Refusal(403, "this origin may not connect; the server's --allow-origin adds one")

    def _is_own(self, origin: Origin, host: str, scheme: str) -> bool:
        """Whether the page came from the address it connects to.

        Without a key a name does not count, only an address: anybody may let a name of theirs point here and serve a page
        under it.
        """
        try:
            own = Origin.parse(f"{_WEB_SCHEME[scheme]}://{host}")
        except (KeyError, ValueError):
            return False
        return origin == own and (self.has_key or _is_address(own.host))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def choose_subprotocol(offered: Iterable[str]) -> str | None:
    """``realtime`` where it is offered. One that carries a key is never repeated."""
    return SUBPROTOCOL if SUBPROTOCOL in offered else None
