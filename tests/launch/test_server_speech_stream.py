"""``/v1/audio/speech/stream``: text in pieces, sound with numbers, over real sockets."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from serving import MODEL, RunningServer, changed, kinds
from speaking import LIMITS, STREAM, TEXT, SpeakingPipeline, connect, hear, push, say, sound
from waiting import wait_until

from vcpipe.launch.server import speech_thread
from vcpipe.schemas.pcm import pcm16


# ---------------------------------------------------------------------------------------------------------------- one turn
def test_a_turn_in_order(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    with speaking_server.connect(path=STREAM) as client:
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
    assert sound(messages) == pcm16(voices.said(TEXT))
    others = [message for message in messages if message["type"] != "speech.audio.delta"]
    assert kinds(others) == ["input_text.appended", "input_text.committed", "speech.audio.done"]
    assert others[1]["appends"] == 2
    assert (others[2]["status"], others[2]["frames"]) == ("completed", len(deltas))
    assert len({message["turn_id"] for message in messages}) == 1


def test_any_pieces_say_the_same(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    wanted = pcm16(voices.said(TEXT))
    with connect(speaking_server) as client:
        for pieces in ([TEXT], list(TEXT), [TEXT[:5], "", TEXT[5:]]):
            assert sound(say(client, *pieces)) == wanted


def test_turn_after_turn(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    """Each begins where the one before is still spoken; numbers go on, frames begin anew."""
    texts = ["Well, go on.", "Who else?", "So it is."]
    with connect(speaking_server) as client:
        for text in texts:
            client.send("input_text.append", text=text)
            client.send("input_text.done")
        turns = [hear(client) for _ in texts]
        again = say(client, texts[0])
    assert [sound(turn) for turn in turns] == [pcm16(voices.said(text)) for text in texts]
    assert sound(again) == sound(turns[0])
    deltas = [m for turn in (*turns, again) for m in turn if m["type"] == "speech.audio.delta"]
    assert [m["sequence"] for m in deltas] == list(range(len(deltas)))
    assert [m["frame_index"] for m in deltas].count(0) == 4
    assert len({m["turn_id"] for m in deltas}) == 4
    assert len(voices.voices) == 1


def test_sound_comes_while_text_does(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    voices.allow(1)
    with connect(speaking_server) as client:
        push(client, "Well, go on then, ")
        first = client.expect("speech.audio.delta")
        assert first["frame_index"] == 0
        voices.allow(math.inf)
        rest = say(client, "who else?")
    assert rest[-1]["status"] == "completed"


def test_seed_of_the_turns_that_follow(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    with connect(speaking_server) as client:
        client.send("session.update", session={"seed": 7.0, "window": "125", "voice": "alloy", "speed": 1})
        updated = client.expect("session.updated")["session"]
        assert (updated["seed"], updated["window"], updated["ignored_fields"]) == (7, 125, ["voice"])
        assert sound(say(client, TEXT)) == pcm16(voices.said(TEXT, seed=7))


# ------------------------------------------------------------------------------------------------------------------ pauses
@pytest.fixture
def pausing(voices: SpeakingPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The voice speaks what it has when text has paused for a moment."""
    monkeypatch.setattr(speech_thread, "_LEAST_S", 0.1)


def test_the_voice_waits_in_silence(speaking_server: RunningServer, voices: SpeakingPipeline, pausing: None) -> None:
    """A language model that thinks: the words so far are spoken to their end, then nothing is made until it goes on."""
    with connect(speaking_server) as client, changed(LIMITS, pause_s=0.1):
        push(client, "So is ")
        wait_until(lambda: voices.at_rest)
        made = voices.frames_made
        time.sleep(0.3)
        assert made == voices.frames_made >= 3
        messages = say(client, "it.")
    quiet = np.frombuffer(sound(messages), "<i2").reshape(-1, 1764)[:, 0]
    whole = pcm16(voices.said("So is it."))
    spoken = [value for value in quiet if value]
    assert spoken == [value for value in np.frombuffer(whole, "<i2").reshape(-1, 1764)[:, 0] if value]
    assert quiet[made - 1] == 0 and len(quiet) > len(whole) // 3528
    assert messages[-1]["status"] == "completed"


def test_a_word_is_not_torn_by_a_pause(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    with connect(speaking_server) as client:
        with changed(LIMITS, pause_s=0.1):
            push(client, "Pa")
            wait_until(lambda: voices.at_rest)
            assert voices.frames_made == 0
        assert sound(say(client, "ris.")) == pcm16(voices.said("Paris."))


# ------------------------------------------------------------------------------------------------------- acknowledgements
def test_the_voice_is_no_further_ahead_than_allowed(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    with connect(speaking_server) as client:
        client.send("session.update", session={"window": 3})
        client.expect("session.updated")
        voices.allow(0)
        push(client, TEXT)
        client.send("input_text.done")
        client.expect("input_text.committed")
        voices.allow(math.inf)
        messages = [client.expect("speech.audio.delta") for _ in range(3)]
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
    assert sound(messages) == pcm16(voices.said(TEXT))


def test_a_client_that_acknowledges_nothing_is_told_so(
    speaking_server: RunningServer, voices: SpeakingPipeline
) -> None:
    with connect(speaking_server) as client:
        client.send("session.update", session={"window": 3})
        client.expect("session.updated")
        voices.allow(0)
        turn = push(client, TEXT)
        client.send("input_text.done")
        push(client, "Who else?")
        with changed(LIMITS, stall_s=0.4):
            voices.allow(math.inf)
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
        assert sound(say(client, TEXT)) == pcm16(voices.said(TEXT))


@pytest.mark.parametrize("sequence", [0, -1, 1.5, None, "x", True])
def test_what_cannot_be_acknowledged(speaking_server: RunningServer, voices: SpeakingPipeline, sequence: Any) -> None:
    with connect(speaking_server) as client:
        client.send("speech.audio.ack", sequence=sequence, event_id="mine")
        error = client.expect_error("invalid_request")
        assert (error["param"], error["event_id"]) == ("sequence", "mine")
        assert "no audio was sent yet" in error["message"]


# ------------------------------------------------------------------------------------------------------------------ cancel
@pytest.mark.parametrize("kind", ["speech.cancel", "response.cancel"])
def test_cancel_drops_everything_at_once(speaking_server: RunningServer, voices: SpeakingPipeline, kind: str) -> None:
    voices.allow(0)
    with connect(speaking_server) as client:
        push(client, TEXT)
        client.send("input_text.done")
        push(client, "Who else?")
        voices.allow(1)
        client.until("speech.audio.delta")
        client.send(kind)
        messages = client.until("speech.audio.done")
        second = client.expect("speech.audio.done")
        assert (messages[-1]["status"], second["status"], second["frames"]) == ("cancelled", "cancelled", 0)
        assert kinds(messages) == ["speech.audio.done"] and voices.frames_made == 1
        voices.allow(math.inf)
        next_turn = say(client, "So it is.")
        assert sound(next_turn) == pcm16(voices.said("So it is."))
        client.send(kind)
        assert client.expect_error("invalid_request")["message"] == "nothing is being spoken"


def test_cancel_while_the_window_is_full(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    with connect(speaking_server) as client:
        client.send("session.update", session={"window": 1})
        client.expect("session.updated")
        push(client, TEXT)
        client.until("speech.audio.delta")
        client.send("speech.cancel")
        assert client.expect("speech.audio.done")["status"] == "cancelled"
        assert sound(say(client, TEXT)) == pcm16(voices.said(TEXT))


def test_a_client_that_vanishes_ends_the_turn(speaking_server: RunningServer, voices: SpeakingPipeline) -> None:
    voices.allow(1)
    client = connect(speaking_server)
    push(client, TEXT * 5)
    client.until("speech.audio.delta")
    client.vanish()
    wait_until(lambda: voices.all_closed)
    assert voices.frames_made == 1
    voices.allow(math.inf)
    with connect(speaking_server) as second:
        assert sound(say(second, TEXT)) == pcm16(voices.said(TEXT))
