"""The order of calls, the end of a turn and its bounds, over an engine of plain arithmetic."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from word_tokenizer import word_tokenizer

from vcpipe.actors.speech.frames import TextFrames
from vcpipe.actors.speech.pacing import Pacing, WordLength
from vcpipe.actors.speech.turns import MAX_STEPS, SpeechTurns
from vcpipe.schemas.errors import BacklogError, SessionClosedError, TurnError, VcpipeError
from vcpipe.schemas.speech import SpeechChunk, SpeechOptions

PAD, EOS = 12, 2
EVEN = Pacing(WordLength(4, 0, 0), WordLength(6, 0, 0), end_margin=0)


class Loudness:
    """A frame sounds as loud as ``level`` says of its id and index. Frames come when they are waited for, or at once."""

    def __init__(self, level: Callable[[int, int], float], at_once: bool = True, ahead: int = 1) -> None:
        self.calls: list[str] = []
        self.ids: list[int] = []
        self.ahead = ahead
        self._level = level
        self._at_once = at_once
        self._queued: deque[tuple[int, int]] = deque()
        self.broken = False

    def start(self, seed: int) -> None:
        self.calls.append(f"start {seed}")
        self.ids = []
        self._queued.clear()

    def queue(self, ids: Sequence[int]) -> None:
        self._queued.extend((len(self.ids) + number, token) for number, token in enumerate(ids))
        self.ids += ids

    def take(self) -> list[SpeechChunk]:
        return [self._frame() for _ in range(len(self._queued))] if self._at_once else []

    def wait(self) -> SpeechChunk | None:
        if self.broken:
            raise VcpipeError("tts: this frame cannot be")
        return None if self.calls[-1] == "stop" else self._frame()

    def _frame(self) -> SpeechChunk:
        index, token = self._queued.popleft()
        return SpeechChunk(index, np.full(4, self._level(token, index), np.float32), np.full((1, 2), token, np.int32))

    def finish(self) -> None:
        self.calls.append("finish")

    def stop(self) -> None:
        if self.calls[-1:] != ["stop"]:
            self.calls.append("stop")

    def close(self) -> None:
        self.calls.append("close")


def loud_text(token: int, index: int) -> float:
    return 0.0 if token in (PAD, EOS) else 0.5


def open_turns(engine: Loudness | None = None, **options: Any) -> SpeechTurns:
    settings = SpeechOptions.of(**options)
    text = TextFrames(word_tokenizer(), EVEN, PAD, EOS, settings)
    return SpeechTurns(engine or Loudness(loud_text), text, settings)


def count(chunks: list[SpeechChunk]) -> int:
    return sum(chunk.frames for chunk in chunks)


# ------------------------------------------------------------------------------------------------ order of calls
def test_turn_after_turn() -> None:
    engine = Loudness(loud_text)
    turns = open_turns(engine, seed=5)
    for seed in (None, 9):
        turns.reset_turn(seed=seed)
        chunks = turns.push_text("is it ") + turns.push_text_tokens([], paced=True) + turns.push_text("so")
        chunks += turns.end_text() + turns.end_text() + turns.drain()
        assert [chunk.frame_index for chunk in chunks] == list(range(len(chunks)))
        assert engine.ids.index(EOS) == len(engine.ids) - turns.options.silence_frames
    assert engine.calls == ["start 5", "stop", "start 9", "stop"]
    assert turns.close() == [] and turns.close() == []
    assert engine.calls[-1] == "close"


@pytest.mark.parametrize(
    "call",
    [
        lambda turns: turns.push_text("a"),
        lambda turns: turns.push_text_tokens([40]),
        lambda turns: turns.end_text(),
        lambda turns: turns.drain(),
        lambda turns: turns.audio(),
        lambda turns: turns.poll(),
    ],
)
def test_calls_out_of_order(call: Callable[[SpeechTurns], Any]) -> None:
    turns = open_turns()
    with pytest.raises(TurnError, match=r"outside a turn; call reset_turn\(\) first"):
        call(turns)
    turns.reset_turn()
    turns.cancel()
    with pytest.raises(TurnError, match=r"cancelled or failed; call reset_turn\(\) first"):
        call(turns)
    turns.reset_turn()
    turns.end_text()
    turns.drain()
    with pytest.raises(TurnError, match="outside a turn"):
        call(turns)
    turns.close()
    with pytest.raises(SessionClosedError, match="the speech session is closed"):
        call(turns)


def test_an_unfinished_turn_is_not_reset() -> None:
    turns = open_turns()
    turns.reset_turn()
    for unfinished in (lambda: None, turns.end_text):
        unfinished()
        with pytest.raises(TurnError, match=r"not drained; drain\(\) or cancel\(\) it first"):
            turns.reset_turn()
    turns.drain()
    turns.reset_turn()


def test_text_ends_once() -> None:
    turns = open_turns()
    turns.reset_turn()
    with pytest.raises(TurnError, match=r"call end_text\(\) before drain\(\)"):
        turns.drain()
    turns.end_text()
    with pytest.raises(TurnError, match="the turn's text has ended"):
        turns.push_text("more")


def test_close_drains() -> None:
    engine = Loudness(loud_text, at_once=False)
    turns = open_turns(engine)
    turns.reset_turn()
    assert turns.push_text("is it so") == []
    chunks = turns.close()
    assert count(chunks) == len(engine.ids) and EOS in engine.ids
    assert engine.calls[-2:] == ["stop", "close"]
    with pytest.raises(SessionClosedError):
        turns.reset_turn()
    with pytest.raises(SessionClosedError):
        turns.cancel()


def test_leaving_the_block_drops_the_turn() -> None:
    engine = Loudness(loud_text, at_once=False)
    with open_turns(engine) as turns:
        turns.reset_turn()
        turns.push_text("is it so")
    assert engine.calls == ["start 0", "stop", "close"]
    with pytest.raises(KeyError), open_turns(engine) as turns:
        raise KeyError


# ------------------------------------------------------------------------------------------------ the end of a turn
def test_a_turn_ends_after_a_run_of_silence() -> None:
    engine = Loudness(lambda token, index: 0.5 if index in (20, 22, 26) else 0.001)
    turns = open_turns(engine, silence_frames=5)
    turns.reset_turn()
    chunks = turns.push_text("is it so") + turns.end_text()
    end = engine.ids.index(EOS)
    assert end == 16  # the silence before it, within the text, ends nothing
    chunks += turns.drain()
    assert count(chunks) == len(engine.ids) == 26 + 1 + 5


@pytest.mark.parametrize(("steps", "ahead"), [(0, 1), (7, 1), (7, 8), (None, 8)])
def test_a_turn_that_does_not_fall_silent(steps: int | None, ahead: int) -> None:
    engine = Loudness(lambda token, index: 0.5, ahead=ahead)
    turns = open_turns(engine)
    turns.reset_turn()
    text = turns.push_text("is it so") + turns.end_text()
    rest = turns.drain() if steps is None else turns.drain(max_steps=steps)
    assert count(rest) == (MAX_STEPS if steps is None else steps)
    assert len(engine.ids) == count(text) + count(rest)
    assert engine.calls.count("finish") == 1 - (steps == 0)


def test_what_ran_ahead_of_the_end_is_not_heard() -> None:
    engine = Loudness(loud_text, at_once=False, ahead=8)
    turns = open_turns(engine, silence_frames=3)
    turns.reset_turn()
    turns.push_text("is it so")
    turns.end_text()
    assert count(turns.drain()) == engine.ids.index(EOS) + 3
    assert len(engine.ids) > engine.ids.index(EOS) + 3
    turns.reset_turn()


@pytest.mark.parametrize("level", [0.0, 0.5])
def test_what_counts_as_silence_can_be_said(level: float) -> None:
    engine = Loudness(lambda token, index: 0.5 if index else 0.0)
    turns = open_turns(engine, silence_level=level, silence_frames=1)
    turns.reset_turn()
    turns.end_text()
    assert count(turns.drain(3)) == (3 if level == 0.0 else 0)


@pytest.mark.parametrize("steps", [-1, 1.5, True, None])
def test_steps_that_cannot_be(steps: Any) -> None:
    turns = open_turns()
    turns.reset_turn()
    turns.end_text()
    with pytest.raises(ValueError, match="max_steps must be an integer from 0 on"):
        turns.drain(max_steps=steps)
    assert turns.drain() != []


def test_a_drain_that_is_left_can_be_taken_up() -> None:
    engine = Loudness(loud_text, at_once=False)
    turns = open_turns(engine)
    turns.reset_turn()
    turns.push_text("is it so")
    turns.end_text()
    first = next(turns.audio())
    assert first.frame_index == 0
    assert [chunk.frame_index for chunk in turns.drain()][:2] == [1, 2]


def test_a_cancelled_drain_ends() -> None:
    engine = Loudness(loud_text, at_once=False)
    turns = open_turns(engine)
    turns.reset_turn()
    turns.push_text("is it so")
    turns.end_text()
    audio = turns.audio()
    next(audio)
    turns.cancel()
    turns.cancel()
    assert list(audio) == []
    turns.reset_turn()
    assert engine.calls == ["start 0", "stop", "start 0"]


def test_a_turn_that_fails_is_over() -> None:
    engine = Loudness(loud_text, at_once=False)
    turns = open_turns(engine)
    turns.reset_turn()
    turns.end_text()
    engine.broken = True
    with pytest.raises(VcpipeError, match="this frame cannot be"):
        turns.drain()
    assert engine.calls[-1] == "stop"
    with pytest.raises(TurnError, match="cancelled or failed"):
        turns.poll()
    turns.reset_turn()


# ------------------------------------------------------------------------------------------------ chunks and bounds
@pytest.mark.parametrize("chunk_frames", [1, 4, 7, 1000])
def test_chunks_hold_so_many_frames_and_the_last_one_the_rest(chunk_frames: int) -> None:
    engine = Loudness(lambda token, index: index / 100)
    turns = open_turns(engine, chunk_frames=chunk_frames)
    turns.reset_turn()
    chunks = turns.push_text("is it so") + turns.end_text() + turns.drain(5)
    assert {chunk.frames for chunk in chunks[:-1]} <= {chunk_frames}
    assert 1 <= chunks[-1].frames <= chunk_frames
    samples = np.concatenate([chunk.samples for chunk in chunks])
    np.testing.assert_array_equal(samples, np.repeat(np.arange(len(engine.ids)) / 100, 4).astype(np.float32))
    assert np.concatenate([chunk.codes for chunk in chunks])[:, 0].tolist() == engine.ids


def test_too_much_at_once_is_refused_whole() -> None:
    engine = Loudness(loud_text, at_once=False)
    turns = open_turns(engine, max_pending_frames=40)
    turns.reset_turn()
    turns.push_text("is it so? ")
    waiting = len(engine.ids)
    with pytest.raises(
        BacklogError, match=f"{waiting} frames wait and .* at most 40 .* Nothing of this text"
    ) as caught:
        turns.push_text("is it " * 10)
    assert isinstance(caught.value, BufferError)
    with pytest.raises(BacklogError):
        turns.push_text_tokens([PAD] * 40, paced=False)
    assert len(engine.ids) == waiting
    turns.push_text("No.")
    turns.end_text()
    turns.drain()
    said = list(engine.ids)
    turns.reset_turn()
    turns.push_text("is it so? No.")
    turns.end_text()
    assert engine.ids == said[: len(engine.ids)]


def test_the_bound_is_4096_frames_that_wait() -> None:
    turns = open_turns(Loudness(loud_text, at_once=False))
    turns.reset_turn()
    turns.push_text_tokens([PAD] * 4096, paced=False)
    with pytest.raises(BacklogError, match="4096 frames wait and 1 more"):
        turns.push_text_tokens([PAD], paced=False)
    flowing = open_turns()
    flowing.reset_turn()
    for _ in range(3):
        assert count(flowing.push_text_tokens([PAD] * 4096, paced=False)) == 4096


@pytest.mark.parametrize("at_once", [True, False])
def test_a_text_of_any_length_is_taken_no_faster_than_it_is_spoken(at_once: bool) -> None:
    engine = Loudness(loud_text, at_once=at_once, ahead=8)
    turns = open_turns(engine, max_pending_frames=1000)
    taken = []

    def texts() -> Iterator[str]:
        for number in range(30):
            taken.append(number)
            yield "is it so? " * 20

    turns.reset_turn()
    heard = waiting = 0
    for chunk in turns.speak(texts()):
        heard += chunk.frames
        waiting = max(waiting, len(engine.ids) - heard)
    assert taken == list(range(30)) and heard > 30 * 20 * 10
    assert waiting < 300
    turns.reset_turn()


# ------------------------------------------------------------------------------------------------ options
@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty is not accepted: .* mixture of Gaussians"),
        ({"repetition_window": 50}, "repetition_window is not accepted: .* no token logits"),
        ({"repetition_penalty": None}, "repetition_penalty is not accepted"),
        ({"top_p": 0.9}, "top_p is not accepted: .* belongs to the checkpoint"),
        ({"chunk_frames": 0}, "chunk_frames must be an integer of at least 1, not 0"),
        ({"chunk_frames": True}, "chunk_frames must be"),
        ({"overlap_frames": -1}, "overlap_frames must be an integer of at least 0"),
        ({"chunk_frames": 4, "overlap_frames": 4}, r"overlap_frames must be smaller than chunk_frames \(4\), not 4"),
        ({"overlap_frames": 1}, "smaller than chunk_frames"),
        ({"max_pending_frames": 0}, "max_pending_frames must be"),
        ({"hold_back": -1}, "hold_back must be"),
        ({"min_segment_characters": 0}, "min_segment_characters must be"),
        ({"min_segment_characters": 9, "max_segment_characters": 8}, "max_segment_characters must be .* at least 9"),
        ({"silence_frames": 0}, "silence_frames must be"),
        ({"silence_level": -1.0}, "silence_level must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        SpeechOptions.of(**options)


def test_options_of_a_turn() -> None:
    turns = open_turns()
    with pytest.raises(ValueError, match="repetition_penalty is not accepted"):
        turns.reset_turn(repetition_penalty=1.2)
    with pytest.raises(TypeError, match="no option 'speed'; accepted: seed"):
        turns.reset_turn(speed=1.2)
    with pytest.raises(ValueError, match="seed must be"):
        turns.reset_turn(seed=-4)
    with pytest.raises(TurnError):
        turns.poll()
