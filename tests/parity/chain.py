"""The four stages in one process, stage by stage without sockets: quick enough to try many sizes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from collector import Collector
from parity.compare import Heard, as_row

from vcpipe.actors.stage import Stage, StageConfig
from vcpipe.pipeline.tracks import CumulativeTexts
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import STAGES
from vcpipe.schemas.messages import OpenSession, PcmFrame
from vcpipe.schemas.reports import AudioFrame, Tokens, Transcript

FRAME = 1280


class Chain:
    """Stages of one checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self.stages: dict[str, Stage] = {}
        for name in STAGES:
            module = import_module(f"vcpipe.actors.{name}.actor")
            self.stages[name] = module.load(StageConfig(name, checkpoint, "cpu"), lambda step, share: None)

    def run(self, wav: np.ndarray, **options: Any) -> Heard:
        """One session over ``wav`` (n,); streaming, a last frame that is not full is padded."""
        request = OpenSession(prompt_codes=self.stages["codec"].prompt_codes, **options)
        sessions = []
        for stage in self.stages.values():
            session, request = stage.open(request)
            session.prefill()
            sessions.append(session)
        size = len(wav) if request.offline else FRAME
        padded = np.concatenate([wav, np.zeros(-len(wav) % size, np.float32)])
        messages: list[tuple[int, Any]] = [(i, PcmFrame(frame)) for i, frame in enumerate(padded.reshape(-1, size))]
        reports: list[tuple[int, Any]] = []
        # No stage hears of a later one, so each may take all frames before the next one begins.
        for session in sessions:
            emit = Collector()
            for index, message in messages:
                emit.frame_index = index
                session.step(message, emit)
            session.end(emit)
            messages = emit.sent
            reports += emit.reported
        return _heard(reports)


def _heard(reports: list[tuple[int, Any]]) -> Heard:
    tokens = [report for _, report in reports if isinstance(report, Tokens)]
    audio = [report for _, report in reports if isinstance(report, AudioFrame)]
    texts = CumulativeTexts()
    return Heard(
        events=[as_row(event) for event in _events(reports, len(tokens), texts)],
        codes=np.stack([report.codes for report in audio if report.codes.size]),
        samples=np.concatenate([report.samples for report in audio]),
        text=texts.text,
        transcript=texts.transcript if any(isinstance(report, Transcript) for _, report in reports) else None,
        text_ids=[report.text_id for report in tokens],
        function_ids=[report.function_id for report in tokens],
    )


def _events(reports: list[tuple[int, Any]], frames: int, texts: CumulativeTexts) -> Iterator[Event]:
    """The events of each frame in the order in which a session has them."""
    transcripts = {index: report for index, report in reports if isinstance(report, Transcript)}
    tokens = {index: report for index, report in reports if isinstance(report, Tokens)}
    for index in range(frames):
        if index in transcripts:
            yield texts.transcript_event(index, transcripts[index])
        yield from texts.token_events(index, tokens[index])
        yield Event("audio", index)
    yield Event("done", frames)
