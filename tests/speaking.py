"""A voice of plain arithmetic for a server's speech routes, real turns and pacing, made-up frames; and what its clients do."""

from __future__ import annotations

import base64
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from serving import Client, FakePipeline, RunningServer
from waiting import PATIENCE_S, wait_until

from vcpipe.actors.checkpoint import load_tokenizer
from vcpipe.actors.speech.frames import TextFrames
from vcpipe.actors.speech.pacing import Pacing
from vcpipe.actors.speech.turns import SpeechTurns
from vcpipe.launch.server.speech_thread import SpeechLimits
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.speech import SpeechChunk, SpeechOptions

CHECKPOINT = Path(__file__).parent / "data" / "tiny" / "bf16"
PAD, EOS = 12, 2
SAMPLES = 1764
#: A client that is slow to write pauses nowhere, one that is slow to acknowledge loses nothing.
LIMITS = SpeechLimits(turn_s=20.0, pause_s=PATIENCE_S, stall_s=PATIENCE_S, characters=500, turns=3)
TEXT = "The capital of France is Paris."
STREAM = "/v1/audio/speech/stream"


@contextmanager
def fresh_voices(server: RunningServer, pipeline: SpeakingPipeline) -> Iterator[SpeakingPipeline]:
    """The fake behind a shared server; afterwards no slot is held and every voice is closed."""
    pipeline.reset()
    pipeline.failure = None
    yield pipeline
    pipeline.release()
    wait_until(lambda: server.server.speech.reservations.taken == 0)
    wait_until(lambda: pipeline.all_closed)


class FakeEngine:
    """A frame's samples tell its text id, those of PAD and EOS are silent; each takes ``frame_s`` of its pipeline."""

    ahead = 8

    def __init__(self, pipeline: SpeakingPipeline) -> None:
        self._pipeline = pipeline
        self._changed = threading.Condition()
        self._ids: deque[int] = deque()
        self._frame = 0
        self._stopped = True
        self.closed = False

    def start(self, seed: int) -> None:
        if self._pipeline.refuse is not None:
            raise VcpipeError(self._pipeline.refuse)
        if self._pipeline.failure is not None:
            raise self._pipeline.failure
        with self._changed:
            self._ids.clear()
            self._frame, self._stopped = 0, False
        self._seed = seed

    def queue(self, ids: Sequence[int]) -> None:
        with self._changed:
            self._ids.extend(ids)

    def take(self) -> list[SpeechChunk]:
        return []

    def wait(self) -> SpeechChunk | None:
        with self._changed:
            assert self._ids or self._stopped
            self._changed.wait_for(lambda: self._stopped, self._pipeline.frame_s)
        if not self._pipeline.turnstile.pass_one(lambda: self._stopped):
            return None
        with self._changed:
            if self._stopped:
                return None
            token = self._ids.popleft()
        if self._frame == self._pipeline.fail_at:
            raise self._pipeline.fault
        index, self._frame = self._frame, self._frame + 1
        self._pipeline.frames_made += 1
        level = 0.0 if token in (PAD, EOS) else (token + self._seed) / 1000
        return SpeechChunk(index, np.full(SAMPLES, level, np.float32), np.full((1, 31), token, np.int32))

    def finish(self) -> None:
        pass

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._pipeline.turnstile.wake()

    def close(self) -> None:
        self.stop()
        self.closed = True


class FakeTurns(SpeechTurns):
    """Real turns that tell whether they wait in silence."""

    at_rest = False

    def rest(self) -> list[SpeechChunk]:
        chunks = super().rest()
        self.at_rest = not self.frames_waiting
        return chunks


class SpeakingPipeline(FakePipeline):
    """Opens voices too. ``fail_at``: the frame at which ``fault`` is raised."""

    def reset(self) -> None:
        super().reset()
        self.fail_at: int | None = None
        self.fault: Exception = VcpipeError("codec: this frame cannot be")
        self.frames_made = 0
        self.voices: list[FakeEngine] = []
        self.turns: list[FakeTurns] = []

    def open_speech(self, options: SpeechOptions) -> SpeechTurns:
        engine = FakeEngine(self)
        self.voices.append(engine)
        text = TextFrames(load_tokenizer(CHECKPOINT), Pacing(), PAD, EOS, options)
        self.turns.append(FakeTurns(engine, text, options))
        return self.turns[-1]

    def said(self, text: str, seed: int = 0) -> np.ndarray:
        """The samples that a text becomes where nothing interrupts it."""
        twin = SpeakingPipeline()
        with twin.open_speech(SpeechOptions(seed=seed)) as turns:
            turns.reset_turn()
            chunks = list(turns.speak([text]))
        return np.concatenate([chunk.samples for chunk in chunks])

    @property
    def at_rest(self) -> bool:
        """Whether there are voices, and none has a frame to speak; a client's is opened some time after its first text."""
        return bool(self.turns) and all(turns.at_rest for turns in self.turns)

    @property
    def all_closed(self) -> bool:
        return all(voice.closed for voice in self.voices)


# ----------------------------------------------------------------------------------------------------- clients of the stream
def connect(server: RunningServer, query: str = "", **options: Any) -> Client:
    client = server.connect(query, STREAM, **options)
    client.expect("session.created")
    return client


def push(client: Client, *pieces: str, **fields: Any) -> str:
    """Append pieces of text; returns the turn's id."""
    for piece in pieces:
        client.send("input_text.append", text=piece, **fields)
    return client.until("input_text.appended")[-1]["turn_id"]


def sound(messages: list[dict[str, Any]]) -> bytes:
    deltas = [message for message in messages if message["type"] == "speech.audio.delta"]
    return b"".join(base64.b64decode(message["delta"]) for message in deltas)


def say(client: Client, *pieces: str) -> list[dict[str, Any]]:
    """A whole turn; returns all messages up to its end, every sound acknowledged."""
    for piece in pieces:
        client.send("input_text.append", text=piece)
    client.send("input_text.done")
    return hear(client)


def hear(client: Client) -> list[dict[str, Any]]:
    """Acknowledge sound up to the end of a turn."""
    messages: list[dict[str, Any]] = []
    while not messages or messages[-1]["type"] != "speech.audio.done":
        messages.append(client.receive())
        if messages[-1]["type"] == "speech.audio.delta":
            client.send("speech.audio.ack", sequence=messages[-1]["sequence"])
    return messages
