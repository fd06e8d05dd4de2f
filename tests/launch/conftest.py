"""Servers that the tests of several files share, one a file; each is left as it was found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import FakePipeline, RunningServer, running_server
from speaking import LIMITS, SpeakingPipeline, fresh_voices
from transcribing import transcribing_server
from waiting import PATIENCE_S, wait_until

from vcpipe.launch.server import speech_thread

CONVERSING = FakePipeline()
SPEAKING = SpeakingPipeline()


# ------------------------------------------------------------------------------------------------------------ conversations
@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(CONVERSING.start) as server:
        yield server


@pytest.fixture
def pipeline(server: RunningServer) -> Iterator[FakePipeline]:
    """The fake behind the shared server; afterwards no slot is held and every session is closed."""
    CONVERSING.reset()
    yield CONVERSING
    CONVERSING.release()
    wait_until(lambda: server.server.reservations.taken == 0)
    wait_until(lambda: len(CONVERSING.closed) == len(CONVERSING.opened))


# ------------------------------------------------------------------------------------------------------------------- speech
@pytest.fixture(scope="module")
def speaking_server() -> Iterator[RunningServer]:
    with running_server(SPEAKING.start, speech=LIMITS) as server:
        yield server


@pytest.fixture
def never_pausing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a voice has begun to speak it waits for text however long that takes."""
    monkeypatch.setattr(speech_thread, "_LEAST_S", PATIENCE_S)


@pytest.fixture
def voices(speaking_server: RunningServer, never_pausing: None) -> Iterator[SpeakingPipeline]:
    with fresh_voices(speaking_server, SPEAKING) as voices:
        yield voices


# ------------------------------------------------------------------------------------------------------------ transcription
@pytest.fixture(scope="module")
def loaded_transcriber() -> Iterator[RunningServer]:
    with transcribing_server() as server:
        wait_until(lambda: server.server.engine.state == "ready", timeout_s=4 * PATIENCE_S)
        yield server


@pytest.fixture
def transcriber(loaded_transcriber: RunningServer) -> Iterator[RunningServer]:
    """Afterwards no slot is held."""
    yield loaded_transcriber
    wait_until(lambda: loaded_transcriber.server.transcriptions.taken == 0)
