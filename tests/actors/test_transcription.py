"""Live transcription in the process of the model: text however the input is cut, and decoders whose pieces the test chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hearing import FRAME, RATE, cut, golden_input, load_tiny, noise, texts, transcribe, whole

from vcpipe.actors.perception.actor import PerceptionStage
from vcpipe.actors.perception.fastconformer import FastConformer, subsampled_length
from vcpipe.actors.perception.rnnt import GreedyDecoder, PredictionNetwork
from vcpipe.actors.perception.transcript import PieceTable
from vcpipe.actors.perception.transcription import FlushedStream, TranscriptionSession
from vcpipe.schemas.streaming import TranscriptDelta


@pytest.fixture(scope="module")
def stage() -> PerceptionStage:
    stage = load_tiny()
    stage.warm_up()
    return stage


@pytest.fixture(scope="module")
def waveform() -> np.ndarray:
    return golden_input()


# -- the same text as the whole waveform, however it is cut


@pytest.mark.parametrize("length", [257, 1280, 1536, 1537, 5120, 8000, 8100, 9999])
def test_any_cut_gives_the_whole_waveforms_text(length: int, stage: PerceptionStage, waveform: np.ndarray) -> None:
    clip = waveform[4000 : 4000 + length]
    pieces, frames = whole(stage, clip)
    results = []
    for size in (8000, FRAME, 159):
        deltas, heard = transcribe(stage.create_streaming_session(), cut(clip, size))
        assert heard == frames == subsampled_length(1 + length // 160)
        assert [delta.frame_index for delta in deltas] == [index for index, _ in pieces]
        assert texts(deltas) == "".join(text for _, text in pieces).lstrip()
        results.append(deltas)
    assert results[0] == results[1] == results[2]


def test_half_a_second_in_chunks_of_1_159_1280_and_8000_samples(stage: PerceptionStage, waveform: np.ndarray) -> None:
    clip = waveform[:8000]
    first, *others = (transcribe(stage.create_streaming_session(), cut(clip, size)) for size in (8000, 1280, 159, 1))
    assert first[1] == 8 and texts(first[0])
    assert all(other == first for other in others)


def test_no_cut_changes_a_bit_of_the_encoder_frames(stage: PerceptionStage, waveform: np.ndarray) -> None:
    def encoded(sizes: Iterable[int]) -> list[np.ndarray]:
        stream, start, found = FlushedStream(stage._step), 0, []
        for size in sizes:
            if stream.flushed:
                break
            stream.push(clip[start : start + size], final=start + size >= clip.size)
            start += size
            while stream.due:
                found.append(np.array(stream.next_frame(stage.transducer.start[1])[0]))
        return found

    clip = waveform[:7000]
    rng = np.random.default_rng(4)
    expected = encoded([clip.size])
    for sizes in (
        [FRAME] * 6,
        [256] * 28,
        [415, *[FRAME] * 6],
        [416] * 20,
        [1] * 7000,
        rng.integers(1, 900, 40).tolist(),
    ):
        np.testing.assert_array_equal(encoded(sizes), expected)


@pytest.mark.parametrize("length", [1, 159, 160, 171, 256])
def test_input_shorter_than_a_window_ends_with_all_its_frames(length: int, stage: PerceptionStage) -> None:
    for size in (1, length):
        _, frames = transcribe(stage.create_streaming_session(), cut(noise(length), size))
        assert frames == subsampled_length(1 + length // 160)


def test_a_session_without_input_ends_without_a_frame(stage: PerceptionStage) -> None:
    session = stage.create_streaming_session()
    session.feed(np.zeros(0, np.float32))
    assert session.step() == [] and not session.done
    session.close()
    assert (session.step(), session.done, session.frames) == ([], True, 0)


@pytest.mark.parametrize("checkpoint", ["bf16", "q4"])
def test_the_golden_input_as_the_whole_file_decoder_hears_it(checkpoint: str, waveform: np.ndarray) -> None:
    stage = load_tiny(checkpoint)
    pieces, frames = whole(stage, waveform)
    deltas, heard = transcribe(stage.create_streaming_session(), cut(waveform, 320))
    assert (texts(deltas), heard) == ("".join(text for _, text in pieces).lstrip(), frames)


def test_any_budget_gives_the_same_text(stage: PerceptionStage, waveform: np.ndarray) -> None:
    results = [
        transcribe(stage.create_streaming_session(), cut(waveform[:16000], FRAME), budget) for budget in (1, 3, 50)
    ]
    assert results[0] == results[1] == results[2]


def test_nothing_is_traced_after_warm_up(
    stage: PerceptionStage, waveform: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(*arguments: Any) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(FastConformer, "step", trace)
    monkeypatch.setattr(PredictionNetwork, "__call__", trace)
    deltas, _ = transcribe(stage.create_streaming_session(), cut(waveform[:9000], 500))
    assert deltas


# -- live


def test_text_comes_before_the_end_and_as_early_as_it_can(stage: PerceptionStage, waveform: np.ndarray) -> None:
    session = stage.create_streaming_session()
    early: list[tuple[TranscriptDelta, int]] = []
    fed = 0
    for chunk in cut(waveform[:16000], 320):
        session.feed(chunk)
        fed += chunk.size
        while session.waiting:
            early += [(delta, fed) for delta in session.advance(4)]
    assert early
    for delta, fed_by_then in early:
        complete = FRAME * delta.frame_index + 256  # the end of what the encoder frame hears
        assert complete <= fed_by_then < complete + 320


def test_deltas_say_which_part_of_the_input_they_are_of() -> None:
    first, later = (TranscriptDelta.of_frame("x", frame, 0.08) for frame in (0, 25))
    assert (first.start_s, first.end_s) == (0.0, 0.0)
    assert (later.start_s, later.end_s) == (pytest.approx(1.92), pytest.approx(2.0))


def test_one_step_takes_in_one_frames_samples_at_most(stage: PerceptionStage) -> None:
    session = stage.create_streaming_session()
    session.feed(noise(10 * FRAME))
    for step in range(1, 11):
        while not session._decoder.finished:
            session.step(max_decode_tokens=1)
        session.step(max_decode_tokens=1)
        assert (session.frames, session._queued) == (step, (10 - step) * FRAME)


# -- decoders whose pieces the test chooses


class Scripted(GreedyDecoder):
    """Every frame has the pieces that the script gives it, then the blank (which ``evaluate`` says as None)."""

    def __init__(self, transducer: Any, script: Callable[[int], list[int]], max_symbols: int) -> None:
        super().__init__(transducer)
        self._script = script
        self._max_symbols = max_symbols
        self._frame = -1
        self.evaluations = 0

    def begin(self, scored: Any) -> None:
        self._frame += 1
        self._left = self._script(self._frame)[: self._max_symbols]
        self._capped = len(self._left) == self._max_symbols
        self.finished = False

    def evaluate(self) -> int | None:
        self.evaluations += 1
        token = self._left.pop(0) if self._left else None
        self.finished = token is None or (self._capped and not self._left)
        return token


PIECES = ("<unk>", "▁the", "▁cat", "s", "▁", "<en-US>", "</s>")


@pytest.fixture
def scripted(stage: PerceptionStage, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TranscriptionSession]:
    """Makes a session with a scripted decoder over PIECES."""

    def make(script: Callable[[int], list[int]], max_symbols: int = 10) -> TranscriptionSession:
        session = TranscriptionSession(stage._step, stage.transducer, PieceTable(PIECES))
        session._decoder = Scripted(stage.transducer, script, max_symbols)
        return session

    return make


def test_special_pieces_and_language_tags_say_nothing(scripted: Callable[..., TranscriptionSession]) -> None:
    session = scripted(lambda frame: [[5], [0], [4], [4, 1], [6, 3], [5, 2], [4], [99]][frame % 8])
    deltas, _ = transcribe(session, cut(noise(8 * FRAME - 1000), FRAME))
    # White space in front is stripped until there is text; later pieces are as they are.
    assert [(delta.frame_index, delta.text) for delta in deltas] == [(3, "the"), (4, "s"), (5, " cat"), (6, " ")]


def test_blanks_count_against_the_budget(scripted: Callable[..., TranscriptionSession]) -> None:
    session = scripted(lambda frame: [])
    session.feed(noise(3 * FRAME))
    for step in range(1, 4):
        assert session.step(max_decode_tokens=1) == []
        assert session._decoder.evaluations == session.frames == step


def test_a_budget_ends_within_a_frame_and_the_next_step_goes_on(scripted: Callable[..., TranscriptionSession]) -> None:
    session = scripted(lambda frame: [1, 2, 3])
    session.feed(noise(2 * FRAME))
    found = [session.step(max_decode_tokens=2) for _ in range(5)]
    # A frame is three pieces and a blank: two steps each, and no frame is begun while another is decoded.
    assert found == [["the", " cat"], ["s"], [" the", " cat"], ["s"], []]
    assert session.frames == 2


def test_a_symbol_cap_ends_the_frame_without_a_blank(scripted: Callable[..., TranscriptionSession]) -> None:
    session = scripted(lambda frame: [1, 2, 3], max_symbols=2)
    deltas, frames = transcribe(session, cut(noise(3 * FRAME), FRAME), budget=2)
    assert texts(deltas) == "the cat" + " the cat" * (frames - 1)
    assert session._decoder.evaluations == 2 * frames


def biased(towards_blank: float, **rnnt: Any) -> PerceptionStage:
    """The tiny checkpoint, drawn to the blank or away from it."""
    stage = load_tiny()
    last, blank = stage.transducer._joint.joint_net[-1], stage.config.rnnt.blank_id
    last.bias = last.bias + mx.where(mx.arange(len(last.bias)) == blank, towards_blank, 0.0)
    stage.transducer.config = dataclasses.replace(stage.config.rnnt, **rnnt)
    return stage


def counting(session: TranscriptionSession, method: str) -> list[None]:
    """Grows with every call of a method of the decoder's."""
    calls: list[None] = []
    decoder: Any = session._decoder
    counted = getattr(decoder, method)
    setattr(decoder, method, lambda: (calls.append(None), counted())[1])
    return calls


def test_the_checkpoints_own_cap_is_met_across_steps(waveform: np.ndarray) -> None:
    stage = biased(-1e6, max_symbols=3)
    pieces, frames = whole(stage, waveform[:5000])
    session = stage.create_streaming_session()
    evaluations = counting(session, "evaluate")
    deltas, heard = transcribe(session, cut(waveform[:5000], FRAME), budget=2)
    assert len(evaluations) == 3 * frames == 3 * heard
    assert texts(deltas) == "".join(text for _, text in pieces).lstrip() != ""


def test_blank_input_keeps_the_predictors_state() -> None:
    """The prediction network runs once a piece: never where the blank is always the best."""
    session = biased(1e6).create_streaming_session()
    evaluations, before = counting(session, "evaluate"), session._decoder.from_prediction
    deltas, frames = transcribe(session, cut(noise(20 * FRAME), FRAME), budget=1)
    assert (deltas, len(evaluations)) == ([], frames)
    assert session._decoder.from_prediction is before


@pytest.mark.parametrize("level", [0.0, 1e-4])
def test_silence_ends(level: float, stage: PerceptionStage) -> None:
    session = stage.create_streaming_session()
    silence = (level * noise(5 * RATE)).astype(np.float32)
    _, frames = transcribe(session, cut(silence, 3000), budget=1)
    assert (session.done, frames) == (True, subsampled_length(1 + 500))
