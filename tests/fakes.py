"""Stages of plain arithmetic for tests of processes and coordination: real actors, no weights.

The input is what makes the output: a frame of ones gives the text id 100 + its samples' sum, codes of that id + seed, and
samples of codes / 1000. A session's system prompt carries faults, separated by spaces:

``language:refuse`` the session is not opened · ``tts:open=0.5`` opening takes so many seconds · ``tts:fail@3`` an expected
error in frame 3 · ``tts:raise@3`` a bug · ``tts:exit@3`` the process vanishes · ``tts:abort@3`` it crashes ·
``tts:hang@3`` never returns · ``tts:sleep=0.05`` slow steps · ``tts:mute@3`` passes nothing on · ``tts:twice@3`` passes it
on twice · ``codec:short@3`` a sample too few.

A stage that is told of a bounded history warns of it.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np

from vcpipe.actors.stage import Emitter, Progress, StageConfig
from vcpipe.schemas.errors import VcpipeError
from vcpipe.schemas.geometry import STAGES
from vcpipe.schemas.messages import Codes, OpenSession, PcmFrame, Projected, TextStep
from vcpipe.schemas.reports import AudioFrame, Tokens, Transcribed, Transcript

CODEBOOKS = 31
OUTPUT_SAMPLES = 1764

#: For ``Pipeline(..., modules=FAKES)``; the children need tests/ on their path (tests/conftest.py).
FAKES = dict.fromkeys(STAGES, "fakes")


class FakeStage:
    def __init__(self, name: str, *warnings: str) -> None:
        self.name = name
        self.warnings = list(warnings)

    @property
    def prompt_codes(self) -> np.ndarray | None:
        return np.zeros((38, CODEBOOKS), np.int32) if self.name == "codec" else None

    def warm_up(self) -> None:
        pass

    def open(self, request: OpenSession) -> tuple[FakeSession, OpenSession]:
        faults = parse_faults(request.system_prompt or "", self.name)
        if "refuse" in faults:
            raise VcpipeError("no such prompt; accepted: any other")
        time.sleep(faults.get("open", 0.0))
        return FakeSession(self.name, faults, request.seed, request.task), replace(request, prompt_positions=2)


class FakeSession:
    def __init__(self, stage: str, faults: dict[str, float], seed: int, task: str) -> None:
        self._stage = stage
        self._faults = faults
        self._seed = seed
        self._task = task
        self._frame = 0

    def step(self, message: Any, emit: Emitter) -> None:
        self._apply_faults()
        with emit.span(self._stage):
            time.sleep(self._faults.get("sleep", 0.0))
        for _ in range(0 if self._at("mute") else 2 if self._at("twice") else 1):
            getattr(self, "_" + self._stage)(message, emit)
        self._frame += 1

    def prefill(self) -> None:
        pass

    def end(self, emit: Emitter) -> None:
        if self._task == "transcription":
            emit.report(Transcript(" end"), frame_index=self._frame)
            emit.report(Transcribed(self._frame + 1))

    def _apply_faults(self) -> None:
        if self._at("raise"):
            raise RuntimeError("a bug in the network")
        if self._at("fail"):
            raise VcpipeError("this frame cannot be")
        if self._at("exit"):
            os._exit(9)
        if self._at("abort"):
            os.abort()
        if self._at("hang"):
            time.sleep(3600)

    def _at(self, fault: str) -> bool:
        return self._faults.get(fault) == self._frame

    def _perception(self, message: PcmFrame, emit: Emitter) -> None:
        emit.send(Projected(np.full((1, 1, 4), message.samples.sum(), np.float32)))
        if self._frame % 2 == 0:
            emit.report(Transcript(f" w{self._frame}" if self._frame else "w0"))

    def _language(self, message: Projected, emit: Emitter) -> None:
        text_id = 100 + int(message.projected[0, 0, 0])
        emit.send(TextStep(text_id))
        emit.report(Tokens(text_id, 12, text_delta=f"<{text_id}>", text_append=f"<{text_id}>"))

    def _tts(self, message: TextStep, emit: Emitter) -> None:
        emit.send(Codes(np.full(CODEBOOKS, message.text_id + self._seed, np.int32)))

    def _codec(self, message: Codes, emit: Emitter) -> None:
        samples = OUTPUT_SAMPLES - (1 if self._at("short") else 0)
        audio = AudioFrame(np.full(samples, message.codes[0] / 1000, np.float32), np.array(message.codes))
        emit.report(audio)


def parse_faults(prompt: str, stage: str) -> dict[str, float]:
    faults: dict[str, float] = {}
    for part in prompt.split():
        name, _, fault = part.partition(":")
        if name == stage:
            for mark in "@=":
                if mark in fault:
                    key, _, value = fault.partition(mark)
                    faults[key] = float(value)
                    break
            else:
                faults[fault] = 1.0
    return faults


def load(config: StageConfig, progress: Progress) -> FakeStage:
    progress("loading", 0.5)
    if config.tts_history_frames is not None:
        return FakeStage(config.stage, f"{config.stage} sees {config.tts_history_frames} frames")
    return FakeStage(config.stage)
