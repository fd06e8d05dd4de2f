"""Transcription over /v1/realtime by the tiny checkpoint: no cut changes it, and it is live."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import soundfile
from transcribing import (
    CHECKPOINT,
    COMPLETED,
    DELTA,
    DONE,
    RATE,
    transcribing,
    transcribing_server,
)
from waiting import PATIENCE_S, assert_quick, wait_until

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.transcription import TAIL_SILENCE_S
from vcpipe.schemas.config import PipelineConfig


@pytest.fixture(scope="module")
def tiny() -> Iterator[Pipeline]:
    with Pipeline(PipelineConfig(CHECKPOINT, stages=("perception",), device="cpu")) as pipeline:
        yield pipeline


def question() -> np.ndarray:
    pcm, _ = soundfile.read(CHECKPOINT.parents[1] / "golden" / "input.wav", dtype="float32")
    return np.rint(pcm * 32767).astype(np.float32) / 32768


def test_over_the_socket_as_in_the_library_whatever_the_chunks(tiny: Pipeline) -> None:
    pcm = question()[:8000]
    with tiny.open_transcription(tail_s=TAIL_SILENCE_S) as session:
        session.feed(pcm)
        session.close()
        expected = [(delta.frame_index, delta.text) for delta in session.deltas()]
        frames = session.frames
    assert expected
    with transcribing_server(pipeline=tiny) as server:
        for size in (1, 159, 1280, 8000):
            with transcribing(server) as client:
                for start in range(0, len(pcm), size):
                    client.append(pcm[start : start + size])
                client.send("input_audio_buffer.commit")
                received = client.until(DONE)
            assert [(m["frame_index"], m["delta"]) for m in received if m["type"] == DELTA] == expected, size
            assert received[-2]["frame_index"] == frames


def test_the_first_text_comes_before_the_commit_at_real_time_pace(tiny: Pipeline) -> None:
    """However slow the machine is there is text before the commit; and none so slow that it is not live once in a while."""
    pcm = question()

    def attempt() -> float:
        """Seconds from the first sample to the first text."""
        times: dict[str, float] = {}

        def listen() -> None:
            while DONE not in times:
                message = client.receive()
                times.setdefault(message["type"], time.monotonic())

        with transcribing(server) as client:
            listener = threading.Thread(target=listen)
            listener.start()
            started = time.monotonic()
            for index, start in enumerate(range(0, len(pcm), 320)):
                time.sleep(max(started + 0.02 * index - time.monotonic(), 0.0))
                client.append(pcm[start : start + 320])
            wait_until(lambda: DELTA in times, "text before the commit")
            committed = time.monotonic()
            client.send("input_audio_buffer.commit")
            listener.join(PATIENCE_S)
        assert times[DELTA] < committed < times[COMPLETED]
        return times[DELTA] - started

    with transcribing_server(pipeline=tiny) as server:
        assert_quick(attempt, len(pcm) / RATE)
