"""coordinator -> every stage, out of order: what may overtake data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vcpipe.schemas.envelope import Codec


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop the session named in the header now; its messages of an older epoch are not stepped any more."""

    KIND: ClassVar[str] = "cancel"


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Free everything, say Stopped and leave."""

    KIND: ClassVar[str] = "shutdown"


CONTROL = Codec(Cancel, Shutdown)
