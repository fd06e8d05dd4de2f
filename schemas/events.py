"""What a user of a session sees: events aligned to the frame clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

EventKind = Literal["user_transcript_delta", "assistant_text_delta", "function_delta", "audio", "done", "cancelled"]

#: Kinds after which a session says nothing more.
TERMINAL_KINDS = frozenset({"done", "cancelled"})


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a session. Inside a frame the order is transcript, text, function, audio.

    | kind | fields beside ``kind`` and ``frame_index`` |
    |---|---|
    | ``user_transcript_delta`` | ``delta``, ``text`` (cumulative, stripped) |
    | ``assistant_text_delta``, ``function_delta`` | ``token_id``, ``delta``, ``text`` (cumulative) |
    | ``audio`` | ``samples`` (1764,) float32, ``sample_rate`` 22050, ``audio_codes`` (31,) int32 |
    | ``done``, ``cancelled`` | none; ``frame_index`` is the number of frames of the session |

    The joined text is authoritative: while a character's bytes are incomplete ``text`` ends in U+FFFD, and the delta that
    completes it cannot be appended (see docs/session.md).
    """

    kind: EventKind
    frame_index: int
    token_id: int | None = None
    delta: str | None = None
    text: str | None = None
    samples: np.ndarray | None = None
    sample_rate: int | None = None
    audio_codes: np.ndarray | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields that are set, without samples, as JSON types."""
        fields: dict[str, Any] = {"kind": self.kind, "frame_index": self.frame_index}
        for name in ("token_id", "delta", "text", "sample_rate"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if self.audio_codes is not None:
            fields["audio_codes"] = self.audio_codes.tolist()
        return fields
