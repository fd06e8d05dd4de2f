"""Transcription over /v1/realtime, turn by turn: real sockets, real actors of plain arithmetic."""

from __future__ import annotations

import json

import numpy as np
import pytest
from serving import MODEL, RunningServer, kinds
from transcribing import (
    COMMITTED,
    COMPLETED,
    DELTA,
    DIALECTS,
    DONE,
    FRAME,
    RATE,
    TAIL,
    messages,
    said,
    transcribing,
    transcribing_server,
    turn_of,
)


def test_the_first_event_and_the_type_match_the_route(transcriber: RunningServer) -> None:
    for dialect in ("", "&dialect=openai"):
        for query, kind in ((f"?intent=transcription{dialect}", "transcription"), (f"?{dialect[1:]}", "realtime")):
            with transcriber.connect(query) as client:
                created = client.expect("session.created")
                assert created["session"]["type"] == kind
                other = {"transcription": "realtime", "realtime": "transcription"}[kind]
                client.send("session.update", session={"type": other})
                error = client.expect_error("session_initialization_failed")
                assert f'type must be "{kind}"' in error["message"] and error["param"] == "session.type"
                client.send("session.update", session={"type": kind})
                assert client.expect("session.updated")["session"]["type"] == kind


def test_a_turn(transcriber: RunningServer) -> None:
    with transcribing(transcriber) as client:
        client.append(messages(4))
        added, first, second = (client.receive() for _ in range(3))
        item = added["item"]["id"]
        assert kinds([added, first, second]) == ["conversation.item.added", DELTA, DELTA]
        assert (first["item_id"], first["delta"], first["frame_index"]) == (item, "w0", 0)
        assert (second["delta"], second["start_s"], second["end_s"]) == (" w2", 0.08, 0.16)
        client.send(COMMITTED.replace("committed", "commit"))
        committed, *rest = client.until(DONE)
        assert committed["type"] == COMMITTED and committed["item_id"] == item and committed["previous_item_id"] is None
        assert turn_of([added, first, second, committed, *rest]) == said(4)
        completed = rest[-2]
        seconds = messages(4) / RATE
        assert completed["frame_index"] == 4 + TAIL + 1
        assert completed["usage"] == {"type": "duration", "seconds": seconds}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_several_turns_on_one_connection_are_independent(transcriber: RunningServer, dialect: str) -> None:
    rate = 16000
    declared = {"audio": {"input": {"format": {"type": "audio/pcm", "rate": rate}}}}
    with transcribing(transcriber, f"?intent=transcription{dialect}", **declared) as client:
        previous = None
        for count in (4, 1, 8):
            client.append(messages(count))
            client.send("input_audio_buffer.commit")
            received = client.until(DONE)
            assert turn_of(received) == said(count)
            committed = next(message for message in received if message["type"] == COMMITTED)
            assert committed["previous_item_id"] == previous
            previous = committed["item_id"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_last_word_of_a_turn_comes_after_its_end(monkeypatch: pytest.MonkeyPatch, dialect: str) -> None:
    """A turn of four messages, whose last word the recogniser says in the last frame of the silence behind them."""
    monkeypatch.setenv("FAKE_WORDS", json.dumps({1: "good", 3 + TAIL: " morning"}))
    declared = {"audio": {"input": {"format": {"type": "audio/pcm", "rate": RATE}}}}
    words = {"perception": "fakes_words"}
    with (
        transcribing_server(stages=("perception",), modules=words) as server,
        transcribing(server, f"?intent=transcription{dialect}", **declared) as client,
    ):
        for _ in range(2):
            client.append(messages(4))
            client.send("input_audio_buffer.commit")
            received = client.until(DONE)
            assert turn_of(received) == "good morning"
            assert received[-2]["usage"]["seconds"] == messages(4) / RATE
            late = [m for m in received if m["type"] == DELTA][-1]
            assert (late["frame_index"], late["start_s"], late["end_s"]) == (3 + TAIL, 0.24, messages(4) / RATE)


def test_turns_may_be_sent_ahead(transcriber: RunningServer) -> None:
    with transcribing(transcriber) as client:
        counts = [3, 6, 2, 5]
        for count in counts:
            client.append(messages(count))
            client.send("input_audio_buffer.commit")
        received = [message for _ in counts for message in client.until(DONE)]
    ids = [message["item"]["id"] for message in received if message["type"] == "conversation.item.added"]
    for item, count in zip(ids, counts, strict=True):
        turn = [m for m in received if (m.get("item_id") or m["item"]["id"]) == item]
        assert turn_of(turn) == said(count)


def test_a_commit_of_nothing_has_an_empty_turn(transcriber: RunningServer) -> None:
    with transcribing(transcriber) as client:
        for _ in range(2):
            client.send("input_audio_buffer.commit")
            received = client.until(DONE)
            assert kinds(received)[:2] == ["conversation.item.added", COMMITTED]
            assert received[-2]["usage"]["seconds"] == 0.0


def test_clear_drops_the_turn_and_the_next_is_whole(transcriber: RunningServer) -> None:
    with transcribing(transcriber) as client:
        client.send("input_audio_buffer.clear")
        client.expect("input_audio_buffer.cleared")
        client.append(messages(6))
        dropped = client.expect("conversation.item.added")["item"]["id"]
        client.send("input_audio_buffer.clear")
        client.until("input_audio_buffer.cleared")
        client.append(messages(4))
        client.send("input_audio_buffer.commit")
        received = [m for m in client.until(DONE) if m.get("item_id") != dropped]
        assert turn_of(received) == said(4)
        assert next(m for m in received if m["type"] == COMMITTED)["previous_item_id"] is None


def test_clear_leaves_the_committed_turn_alone(transcriber: RunningServer) -> None:
    with transcribing(transcriber) as client:
        client.append(messages(40))
        client.send("input_audio_buffer.commit")
        client.append(messages(2))
        client.send("input_audio_buffer.clear")
        received = client.until(DONE)
        item = received[0]["item"]["id"]
        assert turn_of([m for m in received if (m.get("item_id") or m.get("item", {}).get("id")) == item]) == said(40)


@pytest.mark.parametrize("seed", range(3))
def test_turns_in_any_order_of_appends_commits_and_clears(transcriber: RunningServer, seed: int) -> None:
    random = np.random.default_rng(seed)
    expected, pending = [], 0
    with transcribing(transcriber) as client:
        for _ in range(120):
            kind = random.choice(["append", "append", "commit", "clear"])
            if kind == "append":
                count = int(random.integers(1, 30))
                client.append(messages(count) if pending == 0 else count * FRAME)
                pending += count
            elif kind == "clear":
                client.send("input_audio_buffer.clear")
                pending = 0
            elif pending and len(expected) < 40:
                client.send("input_audio_buffer.commit")
                expected.append(said(pending))
                pending = 0
        received = [message for _ in expected for message in client.until(DONE)]
    assert "error" not in kinds(received)
    assert [message["transcript"] for message in received if message["type"] == COMPLETED] == expected
    for message in (m for m in received if m["type"] == COMPLETED):
        deltas = [m["delta"] for m in received if m["type"] == DELTA and m["item_id"] == message["item_id"]]
        assert "".join(deltas) == message["transcript"]


def test_cancel_ends_the_session_at_once(transcriber: RunningServer) -> None:
    with transcribing(transcriber) as client:
        client.append(messages(300))
        client.send("session.cancel")
        assert client.until("response.cancelled")[-1]["frame_index"] == 0
        assert client.close_code() == 1000
    with transcriber.connect("?intent=transcription") as client:
        client.expect("session.created")
        client.send("session.cancel")
        assert "session.update before" in client.expect_error("invalid_request")["message"]


def test_messages_from_the_first_byte_on_are_taken_in_order(transcriber: RunningServer) -> None:
    with transcriber.connect("?intent=transcription") as client:
        client.send("session.update")
        client.append(messages(4))
        client.send("input_audio_buffer.commit")
        client.append(messages(2))
        client.send("session.ping")
        client.send("input_audio_buffer.commit")
        received = [*client.until(DONE), *client.until(DONE)]
    kept = [m for m in received if m["type"] not in ("session.created", "session.updated", "session.pong")]
    assert [m["transcript"] for m in kept if m["type"] == COMPLETED] == [said(4), said(2)]
    assert {"session.created", "session.updated", "session.pong"} <= set(kinds(received))


def test_any_chunking_gives_the_same_text(transcriber: RunningServer) -> None:
    texts = set()
    for size in (159, 320, 1280, 8000):
        with transcribing(transcriber) as client:
            for start in range(0, 8000, size):
                client.append(min(size, 8000 - start))
            client.send("input_audio_buffer.commit")
            texts.add(turn_of(client.until(DONE)))
    assert len(texts) == 1


@pytest.mark.parametrize("rate", [8000, 24000, 44100, 48000])
def test_a_declared_rate_is_resampled_statefully(transcriber: RunningServer, rate: int) -> None:
    second = rate
    texts = set()
    for size in (rate // 50, second):
        with transcribing(transcriber, input_audio_format={"type": "pcm16", "sample_rate": rate}) as client:
            for _ in range(2):  # the next turn begins anew
                for start in range(0, second, size):
                    client.append(min(size, second - start), sample_rate=rate)
                client.send("input_audio_buffer.commit")
                received = client.until(DONE)
                texts.add(turn_of(received))
                assert received[-2]["usage"]["seconds"] == pytest.approx(1.0, abs=0.002)
    assert len(texts) == 1


def test_bad_messages_are_told_and_the_session_goes_on(transcriber: RunningServer) -> None:
    with transcriber.connect("?intent=transcription") as client:
        client.expect("session.created")
        client.append(320)
        assert "session.update before" in client.expect_error("invalid_request")["message"]
        for session, param in (
            ({"language": "de"}, "session.language"),
            ({"audio": {"input": {"transcription": {"language": "fr"}}}}, "session.audio.input.transcription.language"),
            ({"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}, "session.audio.input.turn_detection"),
            ({"audio": {"input": {"format": {"type": "audio/pcmu"}}}}, "session.audio.input.format"),
            ({"input_audio_format": {"type": "pcm16", "sample_rate": 10}}, "session.input_audio_format"),
            ({"input_audio_format": {"type": "pcm16", "sample_rate": "x"}}, "session.input_audio_format"),
            ({"audio": 5}, "session.audio"),
            ({"max_streaming_seconds": -1}, "session.max_streaming_seconds"),
        ):
            client.send("session.update", session=session)
            assert client.expect_error("session_initialization_failed")["param"] == param
        client.send("session.update", session={"model": "whisper-1"})
        assert client.expect_error("invalid_request")["param"] == "session.model"
        client.send("session.update", session={"language": "en-US", "voice": "alloy", "model": MODEL})
        assert client.expect("session.updated")["session"]["ignored_fields"] == ["voice"]
        client.send("session.update", session={})
        client.expect_error("invalid_request")
        client.send("response.create")
        assert "unsupported event type 'response.create'" in client.expect_error("invalid_request")["message"]
        client.append(320, sample_rate=8000)
        assert client.expect_error("inference_error")["param"] == "sample_rate"
        for audio in ("AAA*A==", "AAAA", None, 5):
            client.send("input_audio_buffer.append", audio=audio, event_id="mine")
            assert client.expect_error("inference_error")["event_id"] == "mine"
        client.socket.send(b"\0\0")
        client.expect_error("invalid_request")
        client.append(messages(4))
        client.send("input_audio_buffer.commit")
        assert turn_of(client.until(DONE)) == said(4)
