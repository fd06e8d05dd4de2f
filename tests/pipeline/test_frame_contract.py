"""What stages may report of a frame, and of a whole waveform: the coordinator driven by hand-made reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rig import GEOMETRY, Rig

from vcpipe.pipeline.tracks import OfflineResult, OfflineTrack
from vcpipe.schemas.control import Cancel
from vcpipe.schemas.errors import FrameContractError
from vcpipe.schemas.geometry import STAGES
from vcpipe.schemas.messages import CloseSession, EndOfStream, OpenSession, PcmFrame
from vcpipe.schemas.reports import AudioFrame, Opened, StageTiming, Tokens, Transcript


def _break(frame: int, stage: str, *reports: Any) -> str:
    """Right frames up to ``frame``, in which ``stage`` says ``reports`` instead; returns the session's error."""
    rig = Rig()
    rig.open()
    rig.feed(8)
    rig.sent()
    for before in range(frame):
        rig.step_all(before)
    for upstream in STAGES[: STAGES.index(stage)]:
        rig.step(upstream, frame)
    for index, report in reports:
        rig.say(report, frame=index)
    error = rig.error()
    assert isinstance(error, FrameContractError)
    assert {event.frame_index for event in rig.events()} == set(range(frame))
    assert [type(out.message) for out in rig.sent()] == [Cancel, CloseSession]
    rig.end(frame)
    assert rig.got["s"][-1] == "ended"
    return str(error)


DONE = {stage: StageTiming(stage, 0, 1, 2, []) for stage in STAGES}
GOOD_AUDIO = AudioFrame(np.zeros(1764, np.float32), np.zeros(31, np.int32))


def test_missing_audio_is_a_breach() -> None:
    error = _break(4, "codec", (4, DONE["codec"]))
    assert error == "codec returned no samples for frame 4, expected 1764"


def test_a_missing_sample_is_a_breach() -> None:
    short = AudioFrame(np.zeros(1763, np.float32), np.zeros(31, np.int32))
    assert _break(2, "codec", (2, short)) == "codec returned 1763 samples for frame 2, expected 1764"


def test_a_missing_code_is_a_breach() -> None:
    short = AudioFrame(np.zeros(1764, np.float32), np.zeros(30, np.int32))
    assert _break(2, "codec", (2, short)) == "codec returned 30 codes for frame 2, expected 31"


def test_missing_ids_are_a_breach() -> None:
    assert _break(0, "language", (0, DONE["language"])) == "language returned no ids for frame 0, expected 2"


def test_a_skipped_frame_is_a_breach() -> None:
    assert _break(3, "tts", (4, DONE["tts"])) == "tts reported frame 4, expected frame 3"


def test_a_frame_reported_twice_is_a_breach() -> None:
    assert _break(3, "tts", (3, DONE["tts"]), (3, DONE["tts"])) == "tts reported frame 3, expected frame 4"


def test_audio_of_one_frame_given_twice_is_a_breach() -> None:
    error = _break(3, "codec", (3, GOOD_AUDIO), (3, GOOD_AUDIO))
    assert error == "codec returned audio_frame of frame 3 twice"


@pytest.mark.parametrize(
    ("stage", "report"),
    [("perception", Transcript("x")), ("language", Tokens(1, 2)), ("tts", DONE["tts"]), ("codec", GOOD_AUDIO)],
)
@pytest.mark.parametrize("frame", [1, 40])
def test_a_report_of_a_frame_that_is_not_in_flight_is_a_breach(stage: str, report: Any, frame: int) -> None:
    """Frame 1 has left, frame 40 was never sent."""
    error = _break(2, stage, (frame, report))
    assert error == f"{stage} sent {report.KIND} for frame {frame}, which is not in flight"


# -- a run over a whole waveform


class OfflineRig(Rig):
    def run(self, chunks: int = 2) -> None:
        deliver = self.got.setdefault("s", []).append
        self.coordinator.open("s", OpenSession(offline=True), OfflineTrack(GEOMETRY, deliver), deliver)
        self.coordinator.feed("s", [np.zeros(16000, np.float32)] * chunks)
        self.coordinator.finish("s")
        for stage in STAGES:
            self.say(Opened(stage, 1.0))
        assert [type(out.message) for out in self.sent()] == [OpenSession, *[PcmFrame] * chunks, EndOfStream]

    def codes(self, frame: int) -> None:
        self.say(AudioFrame(np.zeros(0, np.float32), np.full(31, frame, np.int32)), frame=frame)

    def waveform(self, first: int, frames: int) -> None:
        samples = np.repeat(np.arange(first, first + frames, dtype=np.float32), 1764)
        self.say(AudioFrame(samples, np.zeros(0, np.int32)), frame=first)


def test_an_offline_run_collects_everything() -> None:
    rig = OfflineRig()
    rig.run()
    rig.say(Transcript("hello you"), frame=0)
    for frame in range(3):
        rig.say(Tokens(frame, 12, "t", 0, "t"), frame=frame)
        rig.codes(frame)
    rig.waveform(0, 2)
    rig.waveform(2, 1)
    rig.end(0)
    result = rig.got["s"][-2]
    assert isinstance(result, OfflineResult)
    assert (result.text, result.user_transcript, result.text_tokens, result.function_tokens) == (
        "ttt",
        "hello you",
        [0, 1, 2],
        [12, 12, 12],
    )
    np.testing.assert_array_equal(result.audio_codes[:, 0], [0, 1, 2])
    np.testing.assert_array_equal(result.audio[::1764], [0, 1, 2])
    assert (result.audio.shape, result.audio.dtype, result.sample_rate) == ((3 * 1764,), np.float32, 22050)


def test_an_offline_run_without_transcript_says_none() -> None:
    rig = OfflineRig()
    rig.run()
    rig.end(0)
    result = rig.got["s"][-2]
    assert isinstance(result, OfflineResult)
    assert result.user_transcript is None
    assert (result.audio_codes.shape, result.audio.shape) == ((0, 31), (0,))


def test_an_offline_run_checks_that_audio_and_text_have_the_same_length() -> None:
    rig = OfflineRig()
    rig.run()
    for frame in range(3):
        rig.say(Tokens(frame, 12), frame=frame)
        rig.codes(frame)
    rig.waveform(0, 2)
    rig.end(0)
    assert str(rig.error()) == ("codec returned 3 frames of codes and 3528 samples for 3 frames, expected 5292 samples")
    assert rig.got["s"][-1] == "ended"


def test_an_offline_run_refuses_a_skipped_frame() -> None:
    rig = OfflineRig()
    rig.run()
    rig.codes(0)
    rig.codes(2)
    assert str(rig.error()) == "codec reported frame 2, expected frame 1"
