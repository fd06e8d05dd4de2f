"""A server that transcribes, on real actors of plain arithmetic (tests/fakes.py), and clients to try it with.

A fake says one text for every second message of samples: "w0", " w2", ... and at a turn's end " end". A message is a frame's
1280 samples, but for a first one of 256. A server lets each turn be followed by silence of TAIL messages.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FAKES
from serving import Client, RunningServer, running_server

from vcpipe.launch.server.engine import Hooks
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.transcription import TAIL_SILENCE_S
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.geometry import STAGES

CHECKPOINT = Path(__file__).parent / "data" / "tiny" / "bf16"
FRAME, FIRST, RATE = 1280, 256, 16000
TAIL = round(TAIL_SILENCE_S * RATE / FRAME)
DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"
COMMITTED = "input_audio_buffer.committed"
DONE = "conversation.item.done"
#: For ``pytest.mark.parametrize``: what the query of a route ends with.
DIALECTS = [pytest.param("", id="native"), pytest.param("&dialect=openai", id="openai")]


def messages(count: int) -> int:
    """Samples of so many messages to the actor."""
    return FIRST + (count - 1) * FRAME


def said(count: int) -> str:
    """What the fake says for them, for the silence behind them, and for the end of the turn."""
    return "".join(f" w{index}" for index in range(0, count + TAIL, 2)).lstrip() + " end"


@contextmanager
def transcribing_server(
    *,
    modules: dict[str, str] | None = FAKES,
    stages: tuple[str, ...] = STAGES,
    pipeline: Pipeline | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    """A server on a pipeline of its own, or on one that lives longer. ``modules``: of fakes; None: the tiny checkpoint."""

    def start(hooks: Hooks) -> Any:
        if pipeline is not None:
            return _Lent(pipeline)
        config = PipelineConfig(CHECKPOINT, stages=stages, device="cpu")
        return Pipeline(config, hooks.on_progress, hooks.listener, modules=modules, on_start=hooks.on_start)

    with running_server(start, **options) as server:
        yield server


class _Lent:
    """A pipeline that a server must not close."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.open_session = pipeline.open_session
        self.open_transcription = pipeline.open_transcription

    @property
    def geometry(self) -> Any:
        return self._pipeline.geometry

    @property
    def failure(self) -> Any:
        return self._pipeline.failure

    @property
    def dead_stages(self) -> list[str]:
        return self._pipeline.dead_stages

    def close(self, graceful_s: float = 0.0) -> None:
        pass


def transcribing(server: RunningServer, query: str = "?intent=transcription", **session: Any) -> Client:
    """A client whose session is open."""
    client = server.connect(query)
    client.expect("session.created")
    client.send("session.update", session=session)
    client.expect("session.updated")
    return client


def turn_of(received: list[dict[str, Any]]) -> str:
    """The text of a turn whose messages are all there and in order."""
    kinds = [message["type"] for message in received]
    assert kinds[0] == "conversation.item.added" and kinds[-2:] == [COMPLETED, DONE], kinds
    assert set(kinds[1:-2]) <= {DELTA, COMMITTED}
    assert kinds.count(COMMITTED) == 1
    ids = {message.get("item_id") or message["item"]["id"] for message in received}
    assert len(ids) == 1
    text = "".join(message["delta"] for message in received if message["type"] == DELTA)
    assert received[-2]["transcript"] == received[-1]["item"]["content"][0]["transcript"] == text
    return text


def wav(pcm: np.ndarray, rate: int = RATE) -> bytes:
    """Float samples, (n,) or (n, channels), as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1 if pcm.ndim == 1 else pcm.shape[1], 2, rate, 0, "NONE", ""))
        out.writeframes(np.rint(pcm * 32767).astype("<i2").tobytes())
    return file.getvalue()
