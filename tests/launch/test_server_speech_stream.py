"""``/v1/audio/speech/stream``: text in pieces, sound with numbers, over real sockets."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import FRAME, MODEL, Client, RunningServer, kinds, pcm_of, running_server, until
from speaking import SpeakingPipeline
from websockets.exceptions import InvalidStatus

from vcpipe.launch.server.connection import Limits
from vcpipe.launch.server.security import Gate
from vcpipe.launch.server.speech_thread import SpeechLimits
from vcpipe.schemas.errors import ActorDiedError
from vcpipe.schemas.pcm import pcm16

TEXT = "The capital of France is Paris."
PIPELINE = SpeakingPipeline()
PATH = "/v1/audio/speech/stream"
TINY = Path(__file__).parent.parent / "data" / "tiny" / "bf16"

LIMITS = SpeechLimits(turn_s=20.0, pause_s=0.1, stall_s=0.4, characters=500, turns=3)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(PIPELINE.start, Limits(teardown_s=2.0), speech=LIMITS) as server:
        yield server


@pytest.fixture
def pipeline(server: RunningServer) -> Iterator[SpeakingPipeline]:
    """The fake behind the shared server; afterwards no slot is held and every voice is closed."""
    PIPELINE.reset()
    PIPELINE.failure = None
    yield PIPELINE
    until(lambda: server.server.speech.reservations.taken == 0)
    until(lambda: PIPELINE.all_closed)


def connect(server: RunningServer, query: str = "", **options: Any) -> Client:
    client = server.connect(query, PATH, **options)
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


# ---------------------------------------------------------------------------------------------------------------- one turn
def test_a_turn_in_order(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with server.connect(path=PATH) as client:
        session = client.expect("session.created")["session"]
        assert (session["type"], session["model"], session["frame_samples"]) == ("speech", MODEL, 1764)
        assert session["output_audio_format"] == {"type": "pcm16", "sample_rate": 22050}
        client.send("input_text.append", text="The capital of France ")
        first = client.expect("input_text.appended")
        client.send("input_text.append", text="is Paris.")
        client.send("input_text.done")
        messages = hear(client)
    assert (first["sequence"], first["characters_waiting"]) == (0, 22)
    deltas = [message for message in messages if message["type"] == "speech.audio.delta"]
    assert [message["sequence"] for message in deltas] == list(range(len(deltas)))
    assert [message["frame_index"] for message in deltas] == list(range(len(deltas)))
    assert {(m["format"], m["sample_rate"], m["channels"], len(m["delta"])) for m in deltas} == {
        ("pcm16", 22050, 1, 4704)
    }
    assert sound(messages) == pcm16(pipeline.said(TEXT))
    others = [message for message in messages if message["type"] != "speech.audio.delta"]
    assert kinds(others) == ["input_text.appended", "input_text.committed", "speech.audio.done"]
    assert others[1]["appends"] == 2
    assert (others[2]["status"], others[2]["frames"]) == ("completed", len(deltas))
    assert len({message["turn_id"] for message in messages}) == 1


def test_any_pieces_say_the_same(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    wanted = pcm16(pipeline.said(TEXT))
    with connect(server) as client:
        for pieces in ([TEXT], list(TEXT), [TEXT[:5], "", TEXT[5:]]):
            assert sound(say(client, *pieces)) == wanted


def test_turn_after_turn(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    """Each begins where the one before is still spoken; numbers go on, frames begin anew."""
    texts = ["Well, go on.", "Who else?", "So it is."]
    with connect(server) as client:
        for text in texts:
            client.send("input_text.append", text=text)
            client.send("input_text.done")
        turns = [hear(client) for _ in texts]
        again = say(client, texts[0])
    assert [sound(turn) for turn in turns] == [pcm16(pipeline.said(text)) for text in texts]
    assert sound(again) == sound(turns[0])
    deltas = [m for turn in (*turns, again) for m in turn if m["type"] == "speech.audio.delta"]
    assert [m["sequence"] for m in deltas] == list(range(len(deltas)))
    assert [m["frame_index"] for m in deltas].count(0) == 4
    assert len({m["turn_id"] for m in deltas}) == 4
    assert len(pipeline.voices) == 1


def test_sound_comes_while_text_does(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    pipeline.frame_s = 0.02
    with connect(server) as client:
        push(client, "Well, go on then, ")
        first = client.expect("speech.audio.delta")
        assert first["frame_index"] == 0
        rest = say(client, "who else?")
    assert rest[-1]["status"] == "completed"


def test_seed_of_the_turns_that_follow(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with connect(server) as client:
        client.send("session.update", session={"seed": 7.0, "window": "125", "voice": "alloy", "speed": 1})
        updated = client.expect("session.updated")["session"]
        assert (updated["seed"], updated["window"], updated["ignored_fields"]) == (7, 125, ["voice"])
        assert sound(say(client, TEXT)) == pcm16(pipeline.said(TEXT, seed=7))


# ------------------------------------------------------------------------------------------------------------------ pauses
def test_the_voice_waits_in_silence(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    """A language model that thinks: the words so far are spoken to their end, then nothing is made until it goes on."""
    with connect(server) as client:
        push(client, "So is ")
        until(lambda: pipeline.frames_made >= 3)
        made = -1
        while made != pipeline.frames_made:
            made = pipeline.frames_made
            time.sleep(0.3)
        messages = say(client, "it.")
    quiet = np.frombuffer(sound(messages), "<i2").reshape(-1, 1764)[:, 0]
    whole = pcm16(pipeline.said("So is it."))
    spoken = [value for value in quiet if value]
    assert spoken == [value for value in np.frombuffer(whole, "<i2").reshape(-1, 1764)[:, 0] if value]
    assert quiet[made - 1] == 0 and len(quiet) > len(whole) // 3528
    assert messages[-1]["status"] == "completed"


def test_a_word_is_not_torn_by_a_pause(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with connect(server) as client:
        push(client, "Pa")
        time.sleep(3 * LIMITS.pause_s)
        assert pipeline.frames_made == 0
        assert sound(say(client, "ris.")) == pcm16(pipeline.said("Paris."))


# ------------------------------------------------------------------------------------------------------- acknowledgements
def test_the_voice_is_no_further_ahead_than_allowed(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with connect(server) as client:
        client.send("session.update", session={"window": 3})
        client.expect("session.updated")
        client.send("input_text.append", text=TEXT)
        client.send("input_text.done")
        messages = [m for _ in range(3) for m in client.until("speech.audio.delta")]
        client.send("session.ping")
        client.expect("session.pong")  # nothing between
        client.send("speech.audio.ack", sequence=1)
        messages += [client.expect("speech.audio.delta") for _ in range(2)]
        client.send("session.ping")
        client.expect("session.pong")
        client.send("speech.audio.ack", sequence=0)  # an old one means nothing
        client.send("session.ping")
        client.expect("session.pong")
        client.send("speech.audio.ack", sequence=4)
        messages += hear(client)
    assert sound(messages) == pcm16(pipeline.said(TEXT))


def test_a_client_that_acknowledges_nothing_is_told_so(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with connect(server) as client:
        client.send("session.update", session={"window": 3})
        client.expect("session.updated")
        turn = push(client, TEXT)
        client.send("input_text.done")
        client.send("input_text.append", text="Who else?")
        messages = client.until("error")
        error = messages[-1]
        assert kinds(messages).count("speech.audio.delta") == 3
        assert error["turn_id"] == turn and error["error"]["code"] == "inference_error"
        assert "3 messages with audio are not acknowledged" in error["error"]["message"]
        dropped = [client.expect("speech.audio.done") for _ in range(2)]
        assert [done["status"] for done in dropped] == ["failed", "failed"]
        client.send("input_text.append", text="the rest")
        assert "the turn has failed" in client.expect_error("invalid_request")["message"]
        client.send("input_text.done")
        assert client.expect("input_text.committed")["turn_id"] == dropped[1]["turn_id"]
        assert sound(say(client, TEXT)) == pcm16(pipeline.said(TEXT))


@pytest.mark.parametrize("sequence", [0, -1, 1.5, None, "x", True])
def test_what_cannot_be_acknowledged(server: RunningServer, pipeline: SpeakingPipeline, sequence: Any) -> None:
    with connect(server) as client:
        client.send("speech.audio.ack", sequence=sequence, event_id="mine")
        error = client.expect_error("invalid_request")
        assert (error["param"], error["event_id"]) == ("sequence", "mine")
        assert "no audio was sent yet" in error["message"]


# ------------------------------------------------------------------------------------------------------------------ cancel
@pytest.mark.parametrize("kind", ["speech.cancel", "response.cancel"])
def test_cancel_drops_everything_at_once(server: RunningServer, pipeline: SpeakingPipeline, kind: str) -> None:
    pipeline.frame_s = 0.02
    with connect(server) as client:
        push(client, TEXT)
        client.send("input_text.done")
        push(client, "Who else?")
        client.until("speech.audio.delta")
        client.send(kind)
        messages = client.until("speech.audio.done")
        second = client.expect("speech.audio.done")
        assert (messages[-1]["status"], second["status"], second["frames"]) == ("cancelled", "cancelled", 0)
        assert kinds(messages).count("speech.audio.delta") < 5
        made = pipeline.frames_made
        pipeline.frame_s = 0.0
        next_turn = say(client, "So it is.")
        assert sound(next_turn) == pcm16(pipeline.said("So it is."))
        assert made < 15
        client.send(kind)
        assert client.expect_error("invalid_request")["message"] == "nothing is being spoken"


def test_cancel_while_the_window_is_full(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with connect(server) as client:
        client.send("session.update", session={"window": 1})
        client.expect("session.updated")
        push(client, TEXT)
        client.until("speech.audio.delta")
        started = time.monotonic()
        client.send("speech.cancel")
        assert client.expect("speech.audio.done")["status"] == "cancelled"
        assert sound(say(client, TEXT)) == pcm16(pipeline.said(TEXT))
        assert time.monotonic() - started < LIMITS.stall_s + 5


def test_a_client_that_vanishes_ends_the_turn(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    pipeline.frame_s = 0.05
    client = connect(server)
    push(client, TEXT * 5)
    client.until("speech.audio.delta")
    client.vanish()
    until(lambda: pipeline.all_closed, 2.0)
    assert pipeline.frames_made < 10
    pipeline.frame_s = 0.0
    with connect(server) as second:
        assert sound(say(second, TEXT)) == pcm16(pipeline.said(TEXT))


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
    server: RunningServer,
    pipeline: SpeakingPipeline,
    message: dict[str, Any],
    code: str,
    param: str,
    said: str,
) -> None:
    with connect(server) as client:
        client.send_text(json.dumps({"event_id": "mine", **message}))
        error = client.expect_error(code)
        assert (error["param"], error["event_id"]) == (param, "mine") and said in error["message"]
        client.send("session.ping")
        client.expect("session.pong")


def test_messages_that_are_none(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with connect(server) as client:
        for text in ("[]", "no", "1"):
            client.send_text(text)
            assert client.expect_error("invalid_request")["message"] == "message must be a JSON object"
        client.socket.send(b"\0\0")
        assert "binary messages are not understood" in client.expect_error("invalid_request")["message"]
        assert sound(say(client, TEXT)) == pcm16(pipeline.said(TEXT))


def test_a_turn_that_fails_leaves_the_connection_open(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    pipeline.fail_at = 4
    with connect(server) as client:
        turn = push(client, "Well, go on then, who else? ")
        messages = client.until("speech.audio.done")
        assert (messages[-1]["status"], messages[-1]["turn_id"]) == ("failed", turn)
        assert messages[-2]["error"]["message"] == "codec: this frame cannot be"
        client.send("input_text.append", text="more")
        client.expect_error("invalid_request")
        client.send("speech.cancel")
        pipeline.fail_at = None
        assert sound(say(client, TEXT)) == pcm16(pipeline.said(TEXT))
    assert len(pipeline.voices) == 1


def test_a_pipeline_that_was_lost_starts_anew_with_the_next_turn(
    server: RunningServer, pipeline: SpeakingPipeline
) -> None:
    starts = pipeline.starts
    with connect(server) as client:
        say(client, TEXT)
        pipeline.failure = ActorDiedError("codec ended")
        assert sound(say(client, TEXT)) == pcm16(pipeline.said(TEXT))
    assert pipeline.starts == starts + 1


def test_a_voice_that_cannot_be_opened(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    pipeline.refuse = "tts: no room"
    with connect(server) as client:
        messages = say(client, TEXT)
        assert [m["error"]["message"] for m in messages if m["type"] == "error"] == ["tts: no room"]
        pipeline.refuse = None
        assert sound(say(client, TEXT)) == pcm16(pipeline.said(TEXT))


def test_a_turn_beyond_the_limit(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with connect(server) as client:
        client.send("input_text.append", text="Well, go on then, who else? " * 17)
        client.send("input_text.done")
        messages = hear(client)
        assert "limited to 20 s" in messages[-2]["error"]["message"]
        assert (messages[-1]["status"], messages[-1]["frames"]) == ("failed", 250)
        assert sound(say(client, TEXT)) == pcm16(pipeline.said(TEXT))


def test_more_than_may_wait(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    pipeline.frame_s = 0.05
    with connect(server) as client:
        for _ in range(LIMITS.turns):
            push(client, "Go on.")
            client.send("input_text.done")
            client.until("input_text.committed")
        client.send("input_text.append", text="Go on.")
        assert "3 turns wait" in client.until("error")[-1]["error"]["message"]
        client.send("speech.cancel")
        assert client.until("speech.audio.done")[-1]["status"] == "cancelled"


def test_sequence_numbers_of_text_are_checked(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with connect(server) as client:
        client.send("input_text.append", text="So ", sequence=0)
        client.send("input_text.append", text="it ", sequence="1")
        client.send("input_text.append", text="no ", sequence=1)
        client.send("input_text.append", text="is.", sequence=2)
        client.send("input_text.done")
        messages = hear(client)
    assert [m["sequence"] for m in messages if m["type"] == "input_text.appended"] == [0, 1, 2]
    assert [m["error"]["param"] for m in messages if m["type"] == "error"] == ["sequence"]
    assert sound(messages) == pcm16(pipeline.said("So it is."))


# ------------------------------------------------------------------------------------------------------------ who may connect
def test_busy(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with connect(server), server.connect(path=PATH) as second:
        second.expect_error("server_busy")
        assert second.close_code() == 1013
    with connect(server):
        pass


def test_speech_has_slots_of_its_own(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with server.configured() as talking, connect(server) as speaking:
        talking.append(np.full(FRAME, 0.25))
        heard = talking.until("response.audio.delta")
        assert sound(say(speaking, TEXT)) == pcm16(pipeline.said(TEXT))
    assert np.frombuffer(pcm_of(heard), "<i2")[0] == round(0.25 * 32767)


def test_refused_before_anything_is_taken(server: RunningServer, pipeline: SpeakingPipeline) -> None:
    with pytest.raises(InvalidStatus, match="400"):
        server.connect("?model=tts-1", PATH).close()
    with pytest.raises(InvalidStatus, match="403"):
        server.connect(path=PATH, origin="https://evil.example").close()
    with connect(server, f"?model={MODEL}"):
        pass


def test_key() -> None:
    pipeline = SpeakingPipeline()
    with running_server(pipeline.start, gate=Gate("secret")) as server:
        with pytest.raises(InvalidStatus, match="401"):
            server.connect(path=PATH).close()
        with connect(server, additional_headers={"Authorization": "Bearer secret"}):
            pass
        with connect(server, subprotocols=["realtime", "openai-insecure-api-key.secret"]) as client:
            assert client.socket.subprotocol == "realtime"


def test_a_client_that_says_nothing_is_given_up() -> None:
    pipeline = SpeakingPipeline()
    limits = Limits(idle_s=0.4)
    speech = SpeechLimits(pause_s=0.05)
    with running_server(pipeline.start, limits, speech=speech) as server, connect(server) as client:
        push(client, "So is ")
        messages = client.rest()
        assert "no message within 0.4 s" in messages[-1]["error"]["message"]
        assert client.socket.close_code == 1008


def test_a_long_turn_is_no_silence_of_the_client() -> None:
    pipeline = SpeakingPipeline()
    pipeline.frame_s = 0.05
    with running_server(pipeline.start, Limits(idle_s=0.5)) as server, connect(server) as client:
        client.send("input_text.append", text=TEXT)
        client.send("input_text.done")
        assert client.until("speech.audio.done")[-1]["status"] == "completed"


def test_the_server_stops_in_the_middle() -> None:
    pipeline = SpeakingPipeline()
    pipeline.frame_s = 0.1
    with running_server(pipeline.start) as server:
        client = connect(server)
        push(client, TEXT * 5)
        client.until("speech.audio.delta")
        started = time.monotonic()
    assert time.monotonic() - started < 5.0
    assert client.close_code() == 1012
    client.close()
    until(lambda: pipeline.all_closed)


# ------------------------------------------------------------------------------------------------- beside a conversation
@pytest.mark.process
def test_a_conversation_and_a_voice_on_the_same_stages() -> None:
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
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return bytes(answer.read())

    limits = SpeechLimits(turn_s=30.0)
    with running_server(starter(ServeOptions(model=str(TINY))), speech=limits) as server:
        until(lambda: server.server.engine.state == "ready", 60)
        quiet, alone = converse(server), speak(server)
        assert request(server) == alone
        together: list[bytes] = []
        speaker = threading.Thread(target=lambda: together.append(speak(server)))
        speaker.start()
        heard = [converse(server)]
        speaker.join(60)
        paused = pause(server)
    assert heard == [quiet] and together == [alone]
    assert paused[-1]["status"] == "completed" and len(sound(paused)) > 10 * 3528
    assert np.frombuffer(alone, "<i2").any() and len(alone) > 20 * 3528
