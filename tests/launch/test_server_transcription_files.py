"""``/v1/audio/transcriptions``: files over real sockets, by OpenAI's own client and by hand."""

from __future__ import annotations

import io
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from serving import MODEL, RunningServer, changed
from transcribing import CHECKPOINT, FRAME, RATE, messages, said, transcribing_server, wav
from waiting import PATIENCE_S, wait_until

from vcpipe.launch.server import uploads
from vcpipe.launch.server.security import Gate
from vcpipe.launch.server.uploads import UploadLimits
from vcpipe.pipeline.transcription import TAIL_SILENCE_S

ROUTE = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with transcribing_server(stages=("perception",), max_transcriptions=2) as server:
        yield server


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    """Afterwards no slot is held."""
    yield shared
    wait_until(lambda: shared.server.transcriptions.taken == 0)


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="x", max_retries=0, timeout=4 * PATIENCE_S) as client:
        yield client


def silence(count: int, rate: int = RATE) -> bytes:
    return wav(np.zeros(round(messages(count) * rate / RATE), np.float32), rate)


def post(server: RunningServer, fields: dict[str, str], file: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """A form by hand; the status and the JSON of the answer."""
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()
    ]
    body = "".join(parts).encode()
    if file is not None:
        body += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + file + b"\r\n"
    body += b"--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"} | headers
    request = urllib.request.Request(server.http + ROUTE, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=4 * PATIENCE_S) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


# ----------------------------------------------------------------------------------------------------------- OpenAI's client
def test_every_format(client: openai.OpenAI) -> None:
    def create(**options: Any) -> Any:
        return client.audio.transcriptions.create(file=("a.wav", silence(30)), model=MODEL, **options)

    seconds = round(messages(30) / RATE, 3)
    as_json = create()
    assert as_json.text == said(30)
    assert (as_json.usage.type, as_json.usage.seconds) == ("duration", pytest.approx(seconds))
    assert create(response_format="json", language="en", temperature=0, prompt="hint").text == said(30)
    assert create(response_format="text") == said(30) + "\n"
    verbose = create(response_format="verbose_json", timestamp_granularities=["word", "segment"])
    assert (verbose.text, verbose.language, verbose.duration) == (said(30), "english", pytest.approx(seconds))
    assert (verbose.usage.type, verbose.usage.seconds) == ("duration", pytest.approx(seconds))
    assert " ".join(segment.text for segment in verbose.segments) == said(30)
    assert [segment.id for segment in verbose.segments] == list(range(len(verbose.segments)))
    assert " ".join(word.word for word in verbose.words) == said(30)
    assert (verbose.words[1].word, verbose.words[1].start, verbose.words[1].end) == ("w2", 0.08, 0.16)
    srt = create(response_format="srt")
    assert srt.startswith("1\n00:00:00,000 --> ") and "w0 w2" in srt and "end" in srt
    vtt = create(response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n") and "00:00:00.000 --> " in vtt


def test_a_stream(client: openai.OpenAI) -> None:
    with client.audio.transcriptions.create(file=("a.wav", silence(30)), model=MODEL, stream=True) as events:
        received = list(events)
    assert [event.type for event in received[:-1]] == ["transcript.text.delta"] * 20
    done = received[-1]
    assert done.type == "transcript.text.done" and done.text == said(30)
    assert (done.usage.type, done.usage.seconds) == ("duration", pytest.approx(messages(30) / RATE, abs=1e-3))
    assert "".join(event.delta for event in received[:-1]) == said(30)


def test_the_last_word_comes_after_the_end_and_no_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file holds four messages; their recogniser says its last words in the silence behind them."""
    monkeypatch.setenv("FAKE_WORDS", json.dumps({1: "good", 9: " morn", 10: "ing", 11: " all"}))
    modules, seconds = {"perception": "fakes_words"}, messages(4) / RATE
    with transcribing_server(stages=("perception",), modules=modules) as server:

        def create(**options: Any) -> Any:
            return client.audio.transcriptions.create(file=("a.wav", silence(4)), model=MODEL, **options)

        with openai.OpenAI(base_url=f"{server.http}/v1", api_key="x", max_retries=0, timeout=4 * PATIENCE_S) as client:
            verbose = create(response_format="verbose_json", timestamp_granularities=["word"])
            assert verbose.text == create().text == list(create(stream=True))[-1].text == "good morning all"
            assert [(word.word, word.start, word.end) for word in verbose.words] == [
                ("good", 0.0, 0.08),
                ("morning", 0.24, seconds),
                ("all", 0.24, seconds),
            ]
            (segment,) = verbose.segments
            assert (segment.start, segment.end, verbose.duration) == (0.0, seconds, seconds)
            assert create(response_format="srt") == "1\n00:00:00,000 --> 00:00:00,256\ngood morning all\n\n"
            assert create(response_format="vtt") == "WEBVTT\n\n00:00:00.000 --> 00:00:00.256\ngood morning all\n\n"


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_other_kinds_of_files_and_rates(client: openai.OpenAI, kind: str) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(22050), 22050, format=kind)
    answer = client.audio.transcriptions.create(file=("a", file.getvalue()), model=MODEL)
    assert answer.text.startswith("w0 w2") and answer.usage is not None
    assert answer.usage.seconds == pytest.approx(1.0, abs=0.1)


def test_a_long_file_goes_through_whole(client: openai.OpenAI) -> None:
    answer = client.audio.transcriptions.create(file=("a.wav", silence(1500)), model=MODEL)
    assert answer.text == said(1500)


def test_errors_as_openais_client_sees_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="is not audio that can be read"):
        client.audio.transcriptions.create(file=("a.wav", b"no audio at all"), model=MODEL)
    with pytest.raises(openai.NotFoundError, match="this server has one model, 'tiny', not 'whisper-1'"):
        client.audio.transcriptions.create(file=("a.wav", silence(3)), model="whisper-1")
    with pytest.raises(openai.BadRequestError, match='language must be "en"'):
        client.audio.transcriptions.create(file=("a.wav", silence(3)), model=MODEL, language="de")
    cut = silence(30)[:2000].replace(b"data", b"dat_")
    with pytest.raises(openai.BadRequestError, match="without a data chunk"):
        client.audio.transcriptions.create(file=("a.wav", cut), model=MODEL, stream=True)


# ------------------------------------------------------------------------------------------------------------------- by hand
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "srt", "stream": "true"}, "stream"),
        ({"stream": "perhaps"}, "stream"),
        ({"temperature": "0.7"}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"include[]": "logprobs"}, "include"),
        ({"timestamp_granularities[]": "letter"}, "timestamp_granularities"),
        ({"channel": "-1"}, "channel"),
        ({"channel": "1"}, "file"),
        ({"language": "klingon"}, "language"),
    ],
)
def test_bad_fields_are_named(server: RunningServer, fields: dict[str, str], param: str) -> None:
    status, answer = post(server, fields, silence(3))
    error = answer["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error") and error["message"]


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        (None, "no file in the field file"),
        (b"", "is empty"),
        (silence(3)[:44], "holds no samples"),
        (wav(np.zeros(100, np.float32), 1000), "sample rate of 1000 Hz"),
        (wav(np.zeros((100, 65), np.float32)), "65 channels; accepted: up to 64"),
        (b"\0" * 5000, "is not audio that can be read"),
    ],
)
def test_bad_files_are_one_clear_error(server: RunningServer, file: bytes | None, complaint: str) -> None:
    status, answer = post(server, {}, file)
    assert status == 400 and complaint in answer["error"]["message"] and answer["error"]["param"] == "file"
    assert "\n" not in answer["error"]["message"]


def test_what_is_no_form(server: RunningServer) -> None:
    status, answer = post(server, {}, silence(3), **{"Content-Type": "application/json"})
    assert (status, answer["error"]["param"]) == (400, "file")
    status, answer = post(server, {}, silence(3), **{"Content-Type": "multipart/form-data"})
    assert status == 400 and "cannot be read" in answer["error"]["message"]
    assert server.get(ROUTE)[0] == 405


def test_one_channel_is_heard(server: RunningServer) -> None:
    pcm = np.zeros((5 * FRAME, 2), np.float32)
    assert post(server, {"channel": "1"}, wav(pcm))[0] == 200


# ------------------------------------------------------------------------------------------------------------------- bounds
def test_size_and_length_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = UploadLimits(max_bytes=50_000, max_seconds=1.0, pause_s=PATIENCE_S)
    monkeypatch.setattr(uploads, "_DRAIN_S", PATIENCE_S)  # whoever sends slowly sees the answer too
    with transcribing_server(stages=("perception",), uploads=limits) as server:
        for file in (b"\0" * 50_001, b"\0" * 2_000_000):
            status, answer = post(server, {}, file)
            assert (status, answer["error"]["message"]) == (413, "the file is larger than 50000 bytes")
        status, answer = post(server, {}, wav(np.zeros(RATE + 1, np.float32)))
        assert status == 413 and "at most 1 s" in answer["error"]["message"]
        lying = bytearray(wav(np.zeros(RATE + FRAME, np.float32)))
        assert post(server, {}, silence(3))[0] == 200
        bomb = io.BytesIO()  # a small file of much silence, whose length is known only to who decodes it
        soundfile.write(bomb, np.zeros(60 * RATE), RATE, format="OGG")
        assert len(bomb.getvalue()) < 50_000 < len(lying) * 2
        status, answer = post(server, {}, bomb.getvalue())
        assert status == 413
        with changed(limits, pause_s=0.3), socket.create_connection(("127.0.0.1", server.port)) as slow:
            head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            slow.sendall(head.encode() + b"Content-Length: 1000\r\n\r\n--b\r\n")
            slow.settimeout(PATIENCE_S)
            assert b"408" in slow.recv(1000)
        wait_until(lambda: server.server.transcriptions.taken == 0)


def test_files_and_live_transcriptions_share_their_slots(server: RunningServer) -> None:
    with server.connect("?intent=transcription") as first, server.connect("?intent=transcription") as second:
        first.expect("session.created")
        second.expect("session.created")
        status, answer = post(server, {}, silence(3))
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (503, "server_busy", "server_error")
    wait_until(lambda: server.server.transcriptions.taken == 0)
    assert post(server, {}, silence(3))[0] == 200


@pytest.mark.parametrize(
    "fields", ["", '--b\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n'], ids=["whole", "stream"]
)
def test_a_client_that_leaves_frees_its_slot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fields: str) -> None:
    """In the middle of its file, and though the stage is busy with that."""
    hold = tmp_path / "hold"
    hold.touch()
    monkeypatch.setenv("FAKE_HOLD", str(hold))
    body = fields.encode() + b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    body += silence(3000) + b"\r\n--b--\r\n"
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    with transcribing_server(stages=("perception",), modules={"perception": "fakes_held"}) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            leaving.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(hold.with_suffix(".met").exists, "the stage works on it")
            assert server.server.transcriptions.taken == 1
        wait_until(lambda: server.server.transcriptions.taken == 0)
        hold.unlink()
        assert post(server, {}, silence(3))[0] == 200


def test_keys_and_origins() -> None:
    with transcribing_server(stages=("perception",), gate=Gate("secret")) as server:
        assert post(server, {}, silence(3))[0] == 401
        assert post(server, {}, silence(3), Authorization="Bearer secret", Origin="https://evil.example")[0] == 403
        assert post(server, {}, silence(3), Authorization="Bearer secret")[0] == 200


def test_several_files_at_a_time(server: RunningServer) -> None:
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda count=count: answers.append((count, post(server, {}, silence(count)))))
        for count in (100, 60)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 2
    for count, (status, answer) in answers:
        assert (status, answer["text"]) == (200, said(count))


def test_a_stage_that_dies_is_a_server_error_and_the_next_file_is_heard() -> None:
    import os
    import signal

    with transcribing_server(stages=("perception",)) as server:
        assert post(server, {}, silence(3))[0] == 200
        os.kill(server.server.engine._pipeline.pids["perception"], signal.SIGKILL)
        status, answer = post(server, {}, silence(2000))
        assert status in (200, 500)  # it may have been noticed already
        if status == 500:
            assert "perception" in answer["error"]["message"] and answer["error"]["type"] == "server_error"
        assert post(server, {}, silence(3))[1]["text"] == said(3)


def test_the_tiny_checkpoint_over_http_as_in_the_library() -> None:
    path = CHECKPOINT.parents[1] / "golden" / "input.wav"
    with transcribing_server(stages=("perception",), modules=None) as server:
        status, answer = post(server, {}, path.read_bytes())
        assert status == 200
        pcm, _ = soundfile.read(path, dtype="float32")
        pipeline = server.server.engine._pipeline
        with pipeline.open_transcription(tail_s=TAIL_SILENCE_S) as session:
            session.feed(pcm)
            session.close()
            assert answer["text"] == "".join(delta.text for delta in session.deltas())
