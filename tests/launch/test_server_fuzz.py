"""Random messages to a conversation, over sockets and without."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections import deque
from typing import Any

import pytest
from serving import MODEL, FakePipeline, RunningServer, patient
from starlette.types import ASGIApp, Message
from waiting import PATIENCE_S
from websockets.exceptions import ConnectionClosed

from vcpipe.launch.server.app import ServerConfig, make_app


def test_ten_thousand_random_messages(caplog: pytest.LogCaptureFixture) -> None:
    """No connection is dropped but by an end that was asked for; every slot comes back; every error is one of the four."""
    pipeline = FakePipeline()
    app = make_app(pipeline.start, ServerConfig(MODEL, limits=patient()))
    random_ = random.Random(4)

    async def run() -> int:
        sent = 0
        async with app.router.lifespan_context(app):
            for connection in range(100):
                texts = [fuzz_message(random_) for _ in range(105)]
                if connection % 4 == 0:
                    texts.insert(0, json.dumps({"type": "session.update", "session": {"max_streaming_seconds": 2}}))
                sent += await fuzz_connection(app, texts)
                assert app.state.server.reservations.taken == 0
        return sent

    assert asyncio.run(run()) > 9_500
    assert len(pipeline.opened) > 20
    assert len(pipeline.closed) == len(pipeline.opened)
    assert [record for record in caplog.records if record.name.startswith("vcpipe")] == []


async def fuzz_connection(app: ASGIApp, texts: list[str | bytes]) -> int:
    """One connection without a socket: all messages, a ping, and the client is gone. Returns how many messages were read."""
    incoming = deque(texts)
    ponged = asyncio.Event()
    closed: list[int] = []

    async def receive() -> Message:
        if len(incoming) == len(texts):
            await asyncio.sleep(0)
        if not incoming:
            await asyncio.wait_for(ponged.wait(), PATIENCE_S)
            return {"type": "websocket.disconnect", "code": 1006}
        text = incoming.popleft()
        return {"type": "websocket.receive", "bytes" if isinstance(text, bytes) else "text": text}

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        if message["type"] == "websocket.close":
            closed.append(message["code"])
        elif message["type"] == "websocket.send":
            said = json.loads(message["text"])
            if said["type"] == "error":
                assert said["error"]["code"] in ("invalid_request", "session_initialization_failed", "inference_error")
            if said["type"] == "session.pong" and not incoming:
                ponged.set()

    connected = iter([{"type": "websocket.connect"}])

    async def receive_from_connect() -> Message:
        for message in connected:
            return message
        return await receive()

    incoming.append(json.dumps({"type": "session.ping"}))
    scope = {
        "type": "websocket",
        "path": "/v1/realtime",
        "headers": [],
        "query_string": b"",
        "scheme": "ws",
        "server": ("127.0.0.1", 80),
        "subprotocols": [],
    }
    await app(scope, receive_from_connect, send)
    assert closed in ([], [1000])
    assert closed or not incoming
    return len(texts) - len(incoming)


def test_random_messages_over_sockets(server: RunningServer, pipeline: FakePipeline) -> None:
    random_ = random.Random(5)
    for connection in range(10):
        client = server.connect()
        if connection % 2:
            client.send("session.update", session={"max_streaming_seconds": 2})
        try:
            for _ in range(30):
                client.socket.send(fuzz_message(random_))
            client.send("session.ping")
            client.until("session.pong")
        except ConnectionClosed:
            assert client.socket.close_code == 1000
        client.vanish() if connection % 3 else client.close()
    with server.configured():
        pass


VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    2**70,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    "\ud800",
    "日本",
    "AAAA",
    "16000",
    [],
    {},
    [[]],
    {"a": 1},
    base64.b64encode(bytes(600)).decode(),
]
TYPES: list[Any] = [
    *["input_audio_buffer.append"] * 6,
    "input_audio_buffer.clear",
    "session.update",
    "session.ping",
    "response.create",
    "conversation.item.create",
    "",
    None,
    5,
    [],
    {},
    "\ud800",
    "session.created",
    "response.done",
]
#: Ends, so that not every connection has one.
ENDS = ("input_audio_buffer.commit", "session.cancel", "response.cancel")
FIELDS = ("audio", "sample_rate", "session", "event_id", "pad_partial", "item", "response", "model")
SESSION_FIELDS = ("model", "system_prompt", "instructions", "seed", "max_streaming_seconds", "timings", "voice")


def fuzz_message(random_: random.Random) -> str | bytes:
    choice = random_.random()
    if choice < 0.05:
        return random_.randbytes(random_.randrange(50))
    if choice < 0.1:
        return random_.choice(["", "{", "[]", "nul", '{"type":', "\0", "[" * 2000, "1e999", "\u2028", '"\\ud800"'])
    kind = random_.choice(ENDS) if random_.random() < 0.003 else random_.choice(TYPES)
    message: dict[str, Any] = {"type": kind} if random_.random() < 0.97 else {}
    for name in random_.sample(FIELDS, random_.randrange(4)):
        message[name] = random_.choice(VALUES)
    if random_.random() < 0.3:
        names = random_.sample(SESSION_FIELDS, random_.randrange(4))
        message["session"] = {name: random_.choice(VALUES) for name in names}
    text = json.dumps(message)
    if random_.random() < 0.05:
        at = random_.randrange(len(text))
        text = text[:at] + random_.choice('"{}[]\\,:0') + text[at + 1 :]
    return text
