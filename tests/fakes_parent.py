"""A program that runs a pipeline of fakes, for tests of its end: ``python fakes_parent.py WAY``.

It prints "ready" when it is in the state WAY: ``loading`` (a stage that never gets ready), ``idle``, ``session`` (in the middle
of slow frames), ``leave`` (runs to its end without closing anything), ``error`` (leaves the block by an exception).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from fakes import FAKES

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.reports import Loading

CHECKPOINT = Path(__file__).parent / "data" / "tiny" / "bf16"


def main(way: str) -> None:
    slow = {"language": "fakes_slow"} if way == "loading" else {}

    def show(loading: Loading) -> None:
        if slow and loading.stage == "language" and loading.step == "loading":
            print("ready", flush=True)

    pipeline = Pipeline(PipelineConfig(CHECKPOINT), show, modules=FAKES | slow)
    if way == "leave":
        session = pipeline.open_session()
        session.push_audio(np.zeros(5000))
        print("ready", any(name.split(".")[0] == "mlx" for name in sys.modules), flush=True)
        return
    with pipeline:
        if way == "idle":
            print("ready", flush=True)
            sys.stdin.read()
        session = pipeline.open_session(system_prompt="tts:sleep=0.05 codec:sleep=0.02")
        session.push_audio(np.zeros(2 * 1280))
        print("ready", flush=True)
        if way == "error":
            raise ValueError("the program is wrong")
        while True:
            session.push_audio(np.zeros(10 * 1280))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(130)
