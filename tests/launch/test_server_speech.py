"""``POST /v1/audio/speech`` as clients meet it: raw, and with OpenAI's own package."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import logging
import math
import socket
import threading
import time
import wave
from collections.abc import Iterator
from typing import Any

import pytest
from serving import MODEL, RunningServer, running_server
from speaking import SAMPLES, SpeakingPipeline, fresh_voices
from waiting import PATIENCE_S, assert_quick, wait_until

from vcpipe.launch.server.security import Gate
from vcpipe.launch.server.speech_http import wav_header
from vcpipe.launch.server.speech_thread import SpeechLimits
from vcpipe.launch.wav import read_header
from vcpipe.schemas.errors import ActorDiedError, VcpipeError
from vcpipe.schemas.pcm import pcm16

TEXT = "The capital of France is Paris."
PIPELINE = SpeakingPipeline()
PATH = "/v1/audio/speech"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    limits = SpeechLimits(turn_s=20.0, stall_s=PATIENCE_S)
    with running_server(PIPELINE.start, speech=limits) as server:
        yield server


@pytest.fixture
def pipeline(server: RunningServer) -> Iterator[SpeakingPipeline]:
    with fresh_voices(server, PIPELINE) as pipeline:
        yield pipeline


class Answer:
    """An answer that is read piece by piece."""

    def __init__(self, server: RunningServer, body: Any, **headers: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request("POST", PATH, data, {"Content-Type": "application/json", **headers})
        self.response = self.connection.getresponse()

    def error(self) -> dict[str, Any]:
        return json.loads(self.response.read())["error"]

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *details: object) -> None:
        self.connection.close()


def ask(server: RunningServer, **fields: Any) -> Answer:
    return Answer(server, {"model": MODEL, "input": TEXT, "voice": "alloy", **fields})


# --------------------------------------------------------------------------------------------------------------- the sound
def test_wav_holds_what_the_library_says(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with ask(server, response_format="wav", seed=3) as answer:
        body = answer.response.read()
        assert (answer.response.status, answer.response.headers["content-type"]) == (200, "audio/wav")
        assert answer.response.headers["x-ignored-fields"] == "voice"
    header = read_header(io.BytesIO(body), "answer")
    assert header is not None and (header.rate, header.channels, header.subtype) == (22050, 1, "PCM_16")
    assert header.data_bytes == header.riff_bytes == 0xFFFFFFFF and header.data_offset == len(wav_header(22050)) == 44
    assert body[44:] == pcm16(pipeline.said(TEXT, seed=3))
    with wave.open(io.BytesIO(body)) as wav:
        assert wav.readframes(wav.getnframes()) == body[44:]


def test_wav_without_a_format(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    """The official client leaves the format out; OpenAI's default, mp3, is none here."""
    with ask(server) as answer:
        assert answer.response.headers["content-type"] == "audio/wav"
        assert answer.response.read(4) == b"RIFF"


def test_pcm_at_the_rate_that_clients_play_it_at(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    frames = len(pipeline.said(TEXT)) // SAMPLES
    with ask(server, response_format="pcm") as answer:
        assert answer.response.headers["content-type"] == "audio/pcm;rate=24000;channels=1"
        assert len(answer.response.read()) == frames * 1920 * 2
    with ask(server, response_format="pcm", sample_rate=22050) as answer:
        assert answer.response.headers["content-type"] == "audio/pcm;rate=22050;channels=1"
        assert answer.response.read() == pcm16(pipeline.said(TEXT))
    with ask(server, sample_rate="24000") as answer:
        header = read_header(io.BytesIO(answer.response.read()), "answer")
        assert header is not None and header.rate == 24000


def test_sound_comes_while_it_is_made(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    pipeline.allow(1)
    with ask(server, response_format="pcm", sample_rate=22050) as answer:
        answer.response.read(2 * SAMPLES)
        assert pipeline.frames_made == 1
        pipeline.allow(math.inf)
        rest = answer.response.read()
    assert len(rest) == 2 * SAMPLES * (pipeline.frames_made - 1)


def test_events(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with ask(server, stream_format="sse", response_format="pcm", sample_rate=22050) as answer:
        assert answer.response.headers["content-type"] == "text/event-stream"
        lines = answer.response.read().decode().split("\n\n")
    assert lines.pop() == ""
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["type"] for event in events[:-1]] == ["speech.audio.delta"] * (len(events) - 1)
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == pcm16(pipeline.said(TEXT))
    assert events[-1] == {"type": "speech.audio.done"}


# ---------------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": "mp3"}, "response_format", "response_format must be 'wav' or 'pcm', not 'mp3'"),
        ({"response_format": ["wav"]}, "response_format", "not ['wav']"),
        ({"stream_format": "chunks"}, "stream_format", "must be 'audio' or 'sse'"),
        ({"speed": 1.5}, "speed", "speed must be 1.0, not 1.5: the model speaks at one speed"),
        ({"speed": "fast"}, "speed", "must be 1.0"),
        ({"model": "tts-1"}, "model", "must be 'tiny', the one model of this server"),
        ({"input": ""}, "input", "must hold something to say"),
        ({"input": " \n"}, "input", "must hold something to say"),
        ({"input": None}, "input", "must be a string"),
        ({"input": "a" * 4097}, "input", "at most 4096 characters, not 4097"),
        ({"input": "\ud800"}, "input", "half a surrogate pair"),
        ({"seed": -1}, "seed", "seed"),
        ({"seed": 1.5}, "seed", "must be a whole number"),
        ({"sample_rate": 16000}, "sample_rate", "must be 22050 or 24000, not 16000"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "there are no token logits"),
        ({"temperature": 0.5}, "temperature", "belongs to the checkpoint"),
    ],
)
def test_a_field_that_cannot_be(
    server: RunningServer, pipeline: SpeakingPipeline, fields: dict[str, Any], param: str, said: str
) -> None:
    with ask(server, **fields) as answer:
        error = answer.error()
        assert answer.response.status == 400
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_request", param)
    assert said in error["message"]
    assert pipeline.voices == []


@pytest.mark.parametrize(
    ("body", "status"), [(b"[1]", 400), (b"{", 400), (b"\xff", 400), (b'{"input": "' + b"a" * 70_000, 413)]
)
def test_a_body_that_cannot_be(server: RunningServer, pipeline: SpeakingPipeline, body: bytes, status: int) -> None:
    with Answer(server, body) as answer:
        assert answer.response.status == status
        assert ("JSON object" if status == 400 else "at most 65536 bytes") in answer.error()["message"]


def test_other_methods(server: RunningServer) -> None:
    assert server.get(PATH)[0] == 405
    status, headers, text = server.get(PATH + "/stream")
    assert (status, headers["upgrade"]) == (426, "websocket") and "is a WebSocket" in text


def test_key_and_origin() -> None:
    pipeline = SpeakingPipeline()
    with running_server(pipeline.start, gate=Gate("secret")) as server:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer secret", "Origin": "https://evil.example"}, 403),
            ({"Authorization": "Bearer secret", "Origin": "http://localhost:3000"}, 200),
        ):
            with Answer(server, {"input": TEXT}, **headers) as answer:
                assert answer.response.status == status
                assert ("WWW-Authenticate" in answer.response.headers) == (status == 401)
                answer.response.read()


def test_busy(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    pipeline.allow(1)
    with ask(server) as first:
        first.response.read(50)
        with ask(server) as second:
            assert (second.response.status, second.response.headers["Retry-After"]) == (503, "1")
            assert second.error()["code"] == "server_busy"
        assert server.json("/health")["speech"] == {"active": 1, "max": 1}
        assert server.json("/health")["sessions"]["active"] == 0


# ------------------------------------------------------------------------------------------------------------ how it may end
def test_a_client_that_leaves_ends_the_turn_at_once(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    pipeline.allow(1)
    with ask(server) as answer:
        answer.response.read(50)
    wait_until(lambda: pipeline.all_closed)
    assert pipeline.frames_made == 1
    wait_until(lambda: server.server.speech.reservations.taken == 0)
    pipeline.allow(math.inf)
    with ask(server) as answer:
        assert answer.response.read()[44:] == pcm16(pipeline.said(TEXT))


def test_a_client_that_leaves_before_the_first_sound(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    pipeline.allow(0)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("POST", PATH, json.dumps({"input": TEXT}))
    wait_until(lambda: pipeline.voices)
    connection.close()
    wait_until(lambda: pipeline.all_closed)


def test_a_client_that_reads_nothing_is_given_up() -> None:
    """No other limit ends this turn."""
    start, limits = SpeakingPipeline().start, SpeechLimits(stall_s=0.5)
    with (
        running_server(start, speech=limits) as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"input": "Well, go on then, who else? " * 100, "stream_format": "sse"}).encode()
        client.sendall(
            b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (PATH.encode(), len(body), body)
        )
        wait_until(lambda: 'vcpipe_speech_turns_total{end="limit"}' in server.get("/metrics")[2])


def test_what_fails_before_the_first_sound_has_a_status(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    pipeline.refuse = "tts: no room"
    with ask(server) as answer:
        assert answer.response.status == 503
        assert answer.error() == {
            "type": "server_error",
            "code": "inference_error",
            "message": "tts: no room",
            "param": None,
        }


def test_what_fails_later_breaks_the_answer_off(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    pipeline.fail_at = 5
    with ask(server, response_format="pcm") as answer, pytest.raises(http.client.IncompleteRead):
        assert answer.response.status == 200
        answer.response.read()
    with ask(server, stream_format="sse") as answer:
        events = answer.response.read().decode().split("\n\n")
    assert "this frame cannot be" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]


def test_a_turn_beyond_the_limit_is_broken_off(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    text = "Well, go on then, who else? " * 30
    with ask(server, input=text, stream_format="sse") as answer:
        events = answer.response.read().decode().split("\n\n")
    assert "limited to 20 s" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    assert pipeline.frames_made <= 251 + 64


def test_a_pipeline_that_was_lost_starts_anew(pipeline: SpeakingPipeline, server: RunningServer) -> None:
    starts = pipeline.starts
    pipeline.failure = ActorDiedError("codec ended")
    wait_until(lambda: server.server.engine.state == "failed")
    with ask(server) as answer:
        assert answer.response.read()[44:] == pcm16(pipeline.said(TEXT))
    assert pipeline.starts == starts + 1


def test_a_model_that_cannot_be_loaded() -> None:
    def start(hooks: Any) -> Any:
        raise VcpipeError("weights are missing")

    with running_server(start) as server, Answer(server, {"input": TEXT}) as answer:
        assert answer.response.status == 503 and answer.error()["message"] == "weights are missing"


def test_the_server_stops_in_the_middle(caplog: pytest.LogCaptureFixture) -> None:
    def attempt() -> float:
        pipeline = SpeakingPipeline()
        pipeline.allow(1)
        broken: list[Exception] = []

        def read_all() -> None:
            try:
                answer.response.read()
            except http.client.IncompleteRead as error:
                broken.append(error)

        with running_server(pipeline.start) as server:
            answer = ask(server, input=TEXT * 5)
            reader = threading.Thread(target=read_all)
            reader.start()
            started = time.monotonic()
        seconds = time.monotonic() - started
        reader.join(PATIENCE_S)
        answer.connection.close()
        assert broken and pipeline.all_closed
        return seconds

    assert_quick(attempt, 2.0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_metrics(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with ask(server) as answer:
        answer.response.read()
    # It is counted when the last of it was written, which a client may be told before the server goes on.
    wait_until(lambda: 'vcpipe_speech_turns_total{end="done"}' in server.get("/metrics")[2])
    text = server.get("/metrics")[2]
    assert 'vcpipe_speech_first_sound_seconds_bucket{le="+Inf"}' in text
    assert "vcpipe_speech_max 1" in text


# ------------------------------------------------------------------------------------------------------ the official client
@pytest.fixture
def official(server: RunningServer, pipeline: SpeakingPipeline) -> Any:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_official_client_streams(official: Any, pipeline: SpeakingPipeline) -> None:
    pipeline.allow(1)
    speech = official.audio.speech.with_streaming_response
    with speech.create(model=MODEL, voice="alloy", input=TEXT, response_format="wav") as response:
        chunks = response.iter_bytes(1000)
        first = next(chunks)
        assert pipeline.frames_made == 1
        pipeline.allow(math.inf)
        body = first + b"".join(chunks)
    assert body == wav_header(22050) + pcm16(pipeline.said(TEXT))


def test_official_client_at_once(official: Any, pipeline: SpeakingPipeline) -> None:
    sound = official.audio.speech.create(
        model=MODEL, voice="alloy", input=TEXT, response_format="pcm", extra_body={"sample_rate": 22050, "seed": 4}
    )
    assert sound.read() == pcm16(pipeline.said(TEXT, seed=4))


def test_official_client_reads_events(official: Any, pipeline: SpeakingPipeline) -> None:
    speech = official.audio.speech.with_streaming_response
    with speech.create(model=MODEL, voice="alloy", input=TEXT, stream_format="sse") as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    sound = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert sound == wav_header(22050) + pcm16(pipeline.said(TEXT))


def test_official_client_is_told_what_is_wrong(official: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="response_format must be 'wav' or 'pcm', not 'mp3'"):
        official.audio.speech.create(model=MODEL, voice="alloy", input=TEXT, response_format="mp3")


def test_official_client_leaves(official: Any, pipeline: SpeakingPipeline) -> None:
    pipeline.allow(1)
    with official.audio.speech.with_streaming_response.create(model=MODEL, voice="alloy", input=TEXT) as response:
        next(response.iter_bytes(100))
    wait_until(lambda: pipeline.all_closed)
    assert pipeline.frames_made == 1


def test_official_asynchronous_client(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")

    async def hear() -> bytes:
        async with openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="none") as client:
            speech = client.audio.speech.with_streaming_response
            async with speech.create(model=MODEL, voice="alloy", input=TEXT, response_format="wav") as response:
                return b"".join([chunk async for chunk in response.iter_bytes()])

    assert asyncio.run(hear())[44:] == pcm16(pipeline.said(TEXT))
