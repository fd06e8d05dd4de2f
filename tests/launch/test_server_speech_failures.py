"""``/v1/audio/speech/stream``: what fails, who may connect, and a conversation beside it."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.request
from typing import Any

import numpy as np
import pytest
from serving import FRAME, MODEL, RunningServer, changed, patient, pcm_of, running_server
from speaking import CHECKPOINT, LIMITS, STREAM, TEXT, SpeakingPipeline, connect, hear, push, say, sound
from waiting import PATIENCE_S, assert_quick, wait_until
from websockets.exceptions import InvalidStatus

from vcpipe.launch.server import speech_thread
from vcpipe.launch.server.security import Gate
from vcpipe.launch.server.speech_thread import SpeechLimits
from vcpipe.schemas.errors import ActorDiedError
from vcpipe.schemas.pcm import pcm16


# --------------------------------------------------------------------------------------------------------------- what fails
@pytest.mark.parametrize(
    ("message", "code", "param", "said"),
    [
        ({"type": "input_audio_buffer.append"}, "invalid_request", "type", "unsupported event type"),
        ({"type": ["x"]}, "invalid_request", "type", "unsupported event type"),
        ({"type": "input_text.append"}, "invalid_request", "text", "text must be a string"),
        ({"type": "input_text.append", "text": "\ud800"}, "invalid_request", "text", "surrogate"),
        (
            {"type": "input_text.append", "text": "a", "sequence": 1},
            "invalid_request",
            "sequence",
            "sequence must be 0, not 1",
        ),
        ({"type": "input_text.append", "text": "a" * 501}, "inference_error", "text", "at most 500 may"),
        ({"type": "input_text.done"}, "invalid_request", "type", "no text was appended"),
        ({"type": "speech.cancel"}, "invalid_request", "type", "nothing is being spoken"),
        ({"type": "session.update", "session": 1}, "invalid_request", "session", "must be an object"),
        ({"type": "session.update", "session": {"seed": -1}}, "invalid_request", "session.seed", "seed"),
        ({"type": "session.update", "session": {"speed": 2}}, "invalid_request", "session.speed", "must be 1.0"),
        ({"type": "session.update", "session": {"window": 0}}, "invalid_request", "session.window", "from 1 to 125"),
        ({"type": "session.update", "session": {"model": "x"}}, "invalid_request", "session.model", "the one model"),
        (
            {"type": "session.update", "session": {"repetition_penalty": 1}},
            "invalid_request",
            "session.repetition_penalty",
            "no token logits",
        ),
    ],
)
def test_an_error_names_what_was_wrong(
    speaking_server: RunningServer,
    voices: SpeakingPipeline,
    message: dict[str, Any],
    code: str,
    param: str,
    said: str,
) -> None:
    with connect(speaking_server) as client:
        client.send_text(json.dumps({"event_id": "mine", **message}))
        error = client.expect_error(code)
        assert (error["param"], error["event_id"]) == (param, "mine") and said in error["message"]
        client.send("session.ping")
        client.expect("session.pong")


def test_messages_that_are_none(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    with connect(speaking_server) as client:
        for text in ("[]", "no", "1"):
            client.send_text(text)
            assert client.expect_error("invalid_request")["message"] == "message must be a JSON object"
        client.socket.send(b"\0\0")
        assert "binary messages are not understood" in client.expect_error("invalid_request")["message"]
        assert sound(say(client, TEXT)) == pcm16(voices.said(TEXT))


def test_a_turn_that_fails_leaves_the_connection_open(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    voices.fail_at = 4
    with connect(speaking_server) as client:
        turn = push(client, "Well, go on then, who else? ")
        messages = client.until("speech.audio.done")
        assert (messages[-1]["status"], messages[-1]["turn_id"]) == ("failed", turn)
        assert messages[-2]["error"]["message"] == "codec: this frame cannot be"
        client.send("input_text.append", text="more")
        client.expect_error("invalid_request")
        client.send("speech.cancel")
        voices.fail_at = None
        assert sound(say(client, TEXT)) == pcm16(voices.said(TEXT))
    assert len(voices.voices) == 1


def test_a_pipeline_that_was_lost_starts_anew_with_the_next_turn(
    speaking_server: RunningServer, voices: SpeakingPipeline
) -> None:
    starts = voices.starts
    with connect(speaking_server) as client:
        say(client, TEXT)
        voices.failure = ActorDiedError("codec ended")
        assert sound(say(client, TEXT)) == pcm16(voices.said(TEXT))
    assert voices.starts == starts + 1


def test_a_voice_that_cannot_be_opened(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    voices.refuse = "tts: no room"
    with connect(speaking_server) as client:
        messages = say(client, TEXT)
        assert [m["error"]["message"] for m in messages if m["type"] == "error"] == ["tts: no room"]
        voices.refuse = None
        assert sound(say(client, TEXT)) == pcm16(voices.said(TEXT))


def test_a_turn_beyond_the_limit(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    with connect(speaking_server) as client:
        client.send("input_text.append", text="Well, go on then, who else? " * 17)
        client.send("input_text.done")
        messages = hear(client)
        assert "limited to 20 s" in messages[-2]["error"]["message"]
        assert (messages[-1]["status"], messages[-1]["frames"]) == ("failed", 250)
        assert sound(say(client, TEXT)) == pcm16(voices.said(TEXT))


def test_more_than_may_wait(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    voices.allow(0)
    with connect(speaking_server) as client:
        for _ in range(LIMITS.turns):
            push(client, "Go on.")
            client.send("input_text.done")
            client.until("input_text.committed")
        client.send("input_text.append", text="Go on.")
        assert "3 turns wait" in client.until("error")[-1]["error"]["message"]
        client.send("speech.cancel")
        assert client.until("speech.audio.done")[-1]["status"] == "cancelled"


def test_sequence_numbers_of_text_are_checked(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    with connect(speaking_server) as client:
        client.send("input_text.append", text="So ", sequence=0)
        client.send("input_text.append", text="it ", sequence="1")
        client.send("input_text.append", text="no ", sequence=1)
        client.send("input_text.append", text="is.", sequence=2)
        client.send("input_text.done")
        messages = hear(client)
    assert [m["sequence"] for m in messages if m["type"] == "input_text.appended"] == [0, 1, 2]
    assert [m["error"]["param"] for m in messages if m["type"] == "error"] == ["sequence"]
    assert sound(messages) == pcm16(voices.said("So it is."))


# ------------------------------------------------------------------------------------------------------------ who may connect
def test_busy(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    with connect(speaking_server), speaking_server.connect(path=STREAM) as second:
        second.expect_error("server_busy")
        assert second.close_code() == 1013
    with connect(speaking_server):
        pass


def test_speech_has_slots_of_its_own(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    with speaking_server.configured() as talking, connect(speaking_server) as speaking:
        talking.append(np.full(FRAME, 0.25))
        heard = talking.until("response.audio.delta")
        assert sound(say(speaking, TEXT)) == pcm16(voices.said(TEXT))
    assert np.frombuffer(pcm_of(heard), "<i2")[0] == round(0.25 * 32767)


def test_refused_before_anything_is_taken(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    with pytest.raises(InvalidStatus, match="400"):
        speaking_server.connect("?model=tts-1", STREAM).close()
    with pytest.raises(InvalidStatus, match="403"):
        speaking_server.connect(path=STREAM, origin="https://evil.example").close()
    with connect(speaking_server, f"?model={MODEL}"):
        pass


def test_key() -> None:
    pipeline = SpeakingPipeline()
    with running_server(pipeline.start, gate=Gate("secret")) as server:
        with pytest.raises(InvalidStatus, match="401"):
            server.connect(path=STREAM).close()
        with connect(server, additional_headers={"Authorization": "Bearer secret"}):
            pass
        with connect(server, subprotocols=["realtime", "openai-insecure-api-key.secret"]) as client:
            assert client.socket.subprotocol == "realtime"


def test_a_client_that_says_nothing_is_given_up() -> None:
    pipeline = SpeakingPipeline()
    limits = patient()
    speech = SpeechLimits(pause_s=0.05)
    with running_server(pipeline.start, limits, speech=speech) as server, connect(server) as client:
        push(client, "So is ")
        with changed(limits, idle_s=0.4):
            messages = client.rest()
        assert "no message within 0.4 s" in messages[-1]["error"]["message"]
        assert client.socket.close_code == 1008


def test_a_long_turn_is_no_silence_of_the_client() -> None:
    pipeline = SpeakingPipeline()
    pipeline.frame_s = 0.05
    pipeline.allow(0)
    limits = patient()
    with running_server(pipeline.start, limits) as server, connect(server) as client:
        client.send("input_text.append", text=TEXT)
        client.send("input_text.done")
        client.until("input_text.committed")
        with changed(limits, idle_s=0.5):
            pipeline.allow(math.inf)
            assert client.until("speech.audio.done")[-1]["status"] == "completed"


def test_the_server_stops_in_the_middle() -> None:
    def attempt() -> float:
        pipeline = SpeakingPipeline()
        pipeline.allow(1)
        with running_server(pipeline.start) as server:
            client = connect(server)
            push(client, TEXT * 5)
            client.until("speech.audio.delta")
            started = time.monotonic()
        seconds = time.monotonic() - started
        assert client.close_code() == 1012
        client.close()
        wait_until(lambda: pipeline.all_closed)
        return seconds

    assert_quick(attempt, 5.0)


# ------------------------------------------------------------------------------------------------- beside a conversation
@pytest.mark.process
def test_a_conversation_and_a_voice_on_the_same_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny checkpoint: neither changes a byte of the other's."""
    from vcpipe.launch.serve import ServeOptions, starter

    noise = np.random.default_rng(2).normal(0, 0.1, 12 * FRAME)

    def converse(server: RunningServer) -> bytes:
        with server.configured(seed=5) as client:
            messages: list[dict[str, Any]] = []
            for start in range(0, len(noise), FRAME):
                client.append(noise[start : start + FRAME])
                messages += client.until("response.audio.delta")
            return pcm_of(messages)

    def speak(server: RunningServer) -> bytes:
        with connect(server) as client:
            return sound(say(client, *(word + " " for word in TEXT.split())))

    def pause(server: RunningServer) -> list[dict[str, Any]]:
        with connect(server) as client:
            push(client, "So is ")
            first = client.until("speech.audio.delta")
            time.sleep(1.0)
            return first + say(client, "it.")

    def request(server: RunningServer) -> bytes:
        """The same by the other route."""
        body = json.dumps({"input": TEXT, "response_format": "pcm", "sample_rate": 22050}).encode()
        asked = urllib.request.Request(server.http + "/v1/audio/speech", body)
        with urllib.request.urlopen(asked, timeout=4 * PATIENCE_S) as answer:
            return bytes(answer.read())

    pause_s, least_s = SpeechLimits().pause_s, speech_thread._LEAST_S
    limits = SpeechLimits(turn_s=30.0, pause_s=PATIENCE_S)
    monkeypatch.setattr(speech_thread, "_LEAST_S", PATIENCE_S)
    with running_server(starter(ServeOptions(model=str(CHECKPOINT))), speech=limits) as server:
        wait_until(lambda: server.server.engine.state == "ready", timeout_s=4 * PATIENCE_S)
        quiet, alone = converse(server), speak(server)
        assert request(server) == alone
        together: list[bytes] = []
        speaker = threading.Thread(target=lambda: together.append(speak(server)))
        speaker.start()
        heard = [converse(server)]
        speaker.join(4 * PATIENCE_S)
        monkeypatch.setattr(speech_thread, "_LEAST_S", least_s)
        with changed(limits, pause_s=pause_s):
            paused = pause(server)
    assert heard == [quiet] and together == [alone]
    assert paused[-1]["status"] == "completed" and len(sound(paused)) > 10 * 3528
    assert np.frombuffer(alone, "<i2").any() and len(alone) > 20 * 3528
