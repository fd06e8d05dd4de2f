"""What a server needs beside the plain session: cancel from another thread, a pipeline that can be closed while it loads."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest
from fakes import FAKES
from waiting import wait_until

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.errors import SessionClosedError

pytestmark = pytest.mark.process


def test_abort_from_another_thread_ends_the_reading(pipeline: Pipeline) -> None:
    with pipeline.open_session(system_prompt="tts:sleep=0.05") as session:
        session.feed(np.ones(300 * 1280, np.float32))
        kinds = []
        for event in session.events():
            if event.kind == "audio" and "audio" not in kinds:
                threading.Thread(target=session.abort).start()
            kinds.append(event.kind)
        assert kinds[-1] == "cancelled"
        assert kinds.count("audio") < 300
        with pytest.raises(SessionClosedError):
            session.feed(np.zeros(1280, np.float32))
        session.abort()
        assert session.cancel() == []


def test_the_pipeline_is_given_before_its_stages_load(start: Callable[..., Pipeline]) -> None:
    given: list[Pipeline] = []
    pipeline = start("codec", on_start=given.append)
    assert given == [pipeline]


def test_failure_and_dead_stages(start: Callable[..., Pipeline]) -> None:
    pipeline = start()
    assert (pipeline.failure, pipeline.dead_stages) == (None, [])
    os.kill(pipeline.pids["tts"], signal.SIGKILL)
    wait_until(lambda: pipeline.failure is not None, "the pipeline's failure")
    assert str(pipeline.failure).startswith("tts ended")
    assert pipeline.dead_stages == ["tts"]
    assert set(FAKES) == set(pipeline.pids)
