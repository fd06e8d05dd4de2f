"""What tests put into voice-chat sessions of fakes, and how they look at what comes out."""

from __future__ import annotations

from typing import Any

import numpy as np

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.events import Event

FRAME = 1280


def silence(frames: float) -> np.ndarray:
    return np.zeros(round(frames * FRAME), np.float32)


def sparks(frames: int) -> np.ndarray:
    """Frame i sums up to i, so that the fakes' text ids are 100 + i."""
    pcm = silence(frames)
    pcm[::FRAME] = np.arange(frames)
    return pcm


def audio_frames(events: list[Event]) -> list[int]:
    return [event.frame_index for event in events if event.kind == "audio"]


def text_ids(events: list[Event]) -> list[int | None]:
    return [event.token_id for event in events if event.kind == "assistant_text_delta"]


def facts(events: list[Event]) -> list[Any]:
    """Everything about the events, comparable."""
    return [
        (event.to_json(), None if event.samples is None else (event.samples.dtype, event.samples.tobytes()))
        for event in events
    ]


def run(pipeline: Pipeline, pcm: np.ndarray, chunk: int | None = None, **fields: Any) -> list[Event]:
    """All events of a session that is given ``pcm`` in chunks."""
    size = chunk or max(len(pcm), 1)
    with pipeline.open_session(**fields) as session:
        events = [event for i in range(0, len(pcm), size) for event in session.push_audio(pcm[i : i + size])]
        return events + session.flush()
