"""The codec stage against the oracle, frame by frame and offline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from collector import Collector

from vcpipe.actors.codec import actor
from vcpipe.actors.codec.actor import CodecStage
from vcpipe.actors.stage import StageConfig
from vcpipe.schemas.errors import ConfigError, FrameContractError
from vcpipe.schemas.messages import Codes, OpenSession

DATA = Path(__file__).parents[1] / "data"
FRAME = 1764
#: bfloat16 activations, amplified by the phase: what another order of summation (another BLAS) may change.
TOLERANCE = 4e-2
RUNS = sorted(path.stem for path in (DATA / "golden").glob("*_*_*.npz"))


def load(folder: Path) -> CodecStage:
    return actor.load(StageConfig("codec", folder), lambda step, fraction: None)


@pytest.fixture(scope="module")
def stages() -> dict[str, CodecStage]:
    return {kind: load(DATA / "tiny" / kind) for kind in ("bf16", "q4")}


@pytest.fixture
def stage(stages: dict[str, CodecStage]) -> CodecStage:
    return stages["bf16"]


def run(stage: CodecStage, codes: np.ndarray, *, offline: bool) -> Collector:
    """Step a session over codes (frames, Q) and end it."""
    session, _ = stage.open(OpenSession(offline=offline))
    emit = Collector()
    for frame, row in enumerate(codes):
        emit.frame_index = frame
        session.step(Codes(row), emit)
    session.end(emit)
    return emit


def generated_codes(run_name: str) -> np.ndarray:
    """(frames, 31) int32 codes as the speech decoder sent them, from the oracle."""
    golden = np.load(DATA / "golden" / f"{run_name}.npz")
    frames = len(golden["codes"])
    raw = golden["raw_codes"][0].astype(np.int32)  # timeline positions from 1
    if len(raw) >= frames:  # a prompt comes first
        return raw[len(raw) - frames :]
    silence = np.load(DATA / "golden" / f"prompt_{'q4' if '_q4_' in run_name else 'bf16'}.npz")["silence"]
    first = np.zeros(31, np.int32) if run_name.startswith("offline") else silence.astype(np.int32)
    return np.concatenate([first[None], raw])


@pytest.mark.parametrize("kind", ["bf16", "q4"])
def test_prompt_codes_are_the_oracles(stages: dict[str, CodecStage], kind: str) -> None:
    mask_code = 32
    golden = np.load(DATA / "golden" / f"prompt_{kind}.npz")["codes"][0]  # (37, 31)
    codes = stages[kind].prompt_codes
    assert codes.shape == (38, 31) and codes.dtype == np.int32
    masked = (golden == mask_code).all(axis=1)
    assert np.flatnonzero(masked).tolist() == [0, 36]
    assert np.array_equal(codes[:37][~masked], golden[~masked])


@pytest.mark.parametrize("name", RUNS)
def test_runs_equal_the_oracle(stages: dict[str, CodecStage], name: str) -> None:
    golden = np.load(DATA / "golden" / f"{name}.npz")
    codes = generated_codes(name)
    emit = run(stages["q4" if "_q4_" in name else "bf16"], codes, offline=name.startswith("offline"))
    reported_codes = np.stack([message.codes for _, message in emit.reported if message.codes.size])
    samples = np.concatenate([message.samples for _, message in emit.reported])
    assert np.array_equal(reported_codes, golden["codes"])
    assert (reported_codes != codes).any(), "the oracle's control codes 3 and 17 occur in every run"
    assert samples.dtype == np.float32
    error = samples - golden["samples"].reshape(-1)
    assert np.abs(error).max() < TOLERANCE
    assert np.sqrt(np.mean(error**2)) < 2e-3


def test_a_stream_reports_every_frame_once_and_sends_nothing(stage: CodecStage) -> None:
    emit = run(stage, generated_codes(RUNS[-1]), offline=False)
    frames = len(emit.reported)
    assert [index for index, _ in emit.reported] == list(range(frames))
    assert all(message.samples.shape == (FRAME,) for _, message in emit.reported)
    assert emit.spans == ["codec"] * frames
    assert emit.sent == []


def test_offline_reports_codes_at_once_and_samples_in_pieces_of_whole_frames(stage: CodecStage) -> None:
    codes = np.tile(generated_codes(RUNS[0]), (2, 1))[:60]
    emit = run(stage, codes, offline=True)
    steps, pieces = emit.reported[:60], emit.reported[60:]
    assert [index for index, _ in steps] == list(range(60))
    assert all(message.samples.size == 0 and message.codes.size == 31 for _, message in steps)
    assert [(index, message.samples.size, message.codes.size) for index, message in pieces] == [
        (0, 25 * FRAME, 0),
        (25, 25 * FRAME, 0),
        (50, 10 * FRAME, 0),
    ]
    assert emit.sent == []


def test_offline_without_frames_reports_nothing(stage: CodecStage) -> None:
    assert run(stage, np.zeros((0, 31), np.int32), offline=True).reported == []


@pytest.mark.parametrize("control", [32, 3, 17])
def test_control_codes_sound_like_silence(stage: CodecStage, control: int) -> None:
    silence = np.load(DATA / "golden" / "prompt_bf16.npz")["silence"].astype(np.int32)
    codes = np.full((2, 31), control, np.int32)
    codes[1] = silence
    codes[1, ::2] = control
    emit = run(stage, codes, offline=False)
    expected = run(stage, np.stack([silence, silence]), offline=False)
    for (_, got), (_, wanted) in zip(emit.reported, expected.reported, strict=True):
        assert np.array_equal(got.codes, silence)
        assert np.array_equal(got.samples, wanted.samples)


def test_sessions_do_not_mix(stage: CodecStage) -> None:
    codes = generated_codes(RUNS[0])[:4]
    alone = [run(stage, rows, offline=False) for rows in (codes, codes[::-1])]
    sessions = [stage.open(OpenSession())[0] for _ in range(2)]
    emits = [Collector(), Collector()]
    for frame in range(4):
        sessions[0].step(Codes(codes[frame]), emits[0])
        sessions[1].step(Codes(codes[3 - frame]), emits[1])
    for mixed, single in zip(emits, alone, strict=True):
        for (_, got), (_, wanted) in zip(mixed.reported, single.reported, strict=True):
            assert np.array_equal(got.samples, wanted.samples)


@pytest.mark.parametrize("offline", [False, True])
def test_codes_that_are_none_break_the_contract(stage: CodecStage, offline: bool) -> None:
    session, _ = stage.open(OpenSession(offline=offline))
    session.step(Codes(np.zeros(31, np.int32)), Collector())
    with pytest.raises(FrameContractError, match="30 codes for frame 1, expected 31"):
        session.step(Codes(np.zeros(30, np.int32)), Collector())
    codes = np.zeros(31, np.int32)
    codes[7] = 33
    with pytest.raises(FrameContractError, match="code 33 in codebook 7 of frame 1, expected 0 to 31"):
        session.step(Codes(codes), Collector())
    codes[7] = -1
    with pytest.raises(FrameContractError, match="code -1 in codebook 7"):
        session.step(Codes(codes), Collector())


def test_warm_up_leaves_no_trace(stage: CodecStage) -> None:
    codes = generated_codes(RUNS[0])[:2]
    before = run(stage, codes, offline=False)
    stage.warm_up()
    after = run(stage, codes, offline=False)
    for (_, got), (_, wanted) in zip(after.reported, before.reported, strict=True):
        assert np.array_equal(got.samples, wanted.samples)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_rate": 24000}, "22050 Hz, codec_config.sample_rate 24000 Hz"),
        ({"num_quantizers": 30}, "num_quantizers is 31 and codec_config.num_quantizers is 30"),
        ({"hop_length": 8}, "3528 samples of one frame"),
    ],
)
def test_a_codec_off_the_frame_clock_is_refused(tmp_path: Path, change: dict[str, int], message: str) -> None:
    source = DATA / "tiny" / "bf16"
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    config["codec_config"].update(change)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
