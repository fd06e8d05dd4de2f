"""A realtime server that does what a test's script says, on a real socket: for clients under test."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from websockets.sync.server import ServerConnection, serve

#: Bound of every wait, in seconds.
PATIENCE_S = 60
FRAME, ANSWER = 1280, 1764


class Visitor:
    """One connected client, from the server's side."""

    def __init__(self, socket: ServerConnection) -> None:
        self.socket = socket
        self.frames = 0
        self.request: dict[str, Any] = {}

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, "event_id": "event_0123456789abcdef", **fields}))

    def receive(self) -> dict[str, Any]:
        return json.loads(self.socket.recv(PATIENCE_S))

    def greet(self) -> None:
        self.send("session.created", session={"id": "sess_1", "state": "configuring"})

    def open(self, **more: Any) -> None:
        """Greet, take session.update, answer it."""
        self.greet()
        update = self.receive()
        assert update["type"] == "session.update"
        self.request = update["session"]
        self.ready(**more)

    def ready(self, **more: Any) -> None:
        rates = {"input_audio_format": rate(16000), "output_audio_format": rate(22050)}
        session = {"id": "sess_1", "state": "ready", "model": "m", "frame_samples": FRAME, **rates, **more}
        self.send("session.updated", session=session)

    def audio(self) -> np.ndarray | None:
        """Samples of the next append as int16; None for a commit."""
        message = self.receive()
        if message["type"] == "input_audio_buffer.commit":
            return None
        assert message["type"] == "input_audio_buffer.append", message
        return np.frombuffer(base64.b64decode(message["audio"], validate=True), "<i2")

    def all_audio(self, answer: bool = True) -> np.ndarray:
        """Everything until the commit, each append answered with a frame of its number."""
        pieces = [np.zeros(0, "<i2")]
        while (piece := self.audio()) is not None:
            pieces.append(piece)
            if answer:
                self.speak(np.full(ANSWER, self.frames + 1, "<i2"))
        return np.concatenate(pieces)

    def speak(self, samples: np.ndarray) -> None:
        """Send int16 samples as one audio delta."""
        delta = base64.b64encode(samples.astype("<i2").tobytes()).decode()
        fields = {"format": "pcm16", "sample_rate": 22050, "channels": 1, "audio_codes": [0] * 31}
        self.send("response.audio.delta", frame_index=self.frames, delta=delta, **fields)
        self.frames += 1

    def done(self) -> None:
        self.send("input_audio_buffer.committed")
        self.send("response.done", frame_index=self.frames)


def rate(hz: int) -> dict[str, Any]:
    return {"type": "pcm16", "sample_rate": hz}


@contextmanager
def scripted_server(script: Callable[[Visitor], None], **options: Any) -> Iterator[str]:
    """Serve inside the block; yields the address. What went wrong in a script is raised at the end."""
    failures: list[BaseException] = []

    def handle(socket: ServerConnection) -> None:
        try:
            script(Visitor(socket))
        except BaseException as failure:
            failures.append(failure)

    with serve(handle, "127.0.0.1", 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)
    if failures:
        raise failures[0]
