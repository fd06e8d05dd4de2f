"""Text that pauses: the voice speaks to the end of what it has, then waits in silence."""

from __future__ import annotations

import numpy as np
import pytest
from speaking import EOS, PAD, SpeakingPipeline

from vcpipe.actors.speech.turns import SpeechTurns
from vcpipe.schemas.errors import TurnError
from vcpipe.schemas.speech import SpeechChunk, SpeechOptions


@pytest.fixture
def turns() -> SpeechTurns:
    return begun()


def begun() -> SpeechTurns:
    turns = SpeakingPipeline().open_speech(SpeechOptions())
    turns.reset_turn()
    return turns


def ids(chunks: list[SpeechChunk]) -> list[int]:
    return [int(row[0]) for chunk in chunks for row in chunk.codes]


def spoken(chunks: list[SpeechChunk]) -> list[int]:
    return [token for token in ids(chunks) if token != PAD]


def everything(turns: SpeechTurns) -> list[SpeechChunk]:
    chunks = []
    while turns.frames_waiting:
        chunks += turns.wait()
    return chunks


def test_whole_words_are_spoken_to_their_end(turns: SpeechTurns) -> None:
    turns.push_text("So is ")
    assert turns.frames_waiting == 0  # held, since more of the clause may come
    turns.rest()
    chunks = everything(turns)
    assert spoken(chunks) and ids(chunks)[-3:] == [PAD] * 3
    assert turns.rest() == [] and turns.frames_waiting == 0  # silence needs no frames
    turns.push_text("it.")
    turns.end_text()
    chunks += turns.drain()
    assert [chunk.frame_index for chunk in chunks] == list(range(len(chunks)))
    twin = begun()
    twin.push_text("So is it.")
    twin.end_text()
    at_once = twin.drain()
    assert spoken(chunks) == spoken(at_once) and len(chunks) > len(at_once)


def test_the_start_of_a_word_waits_for_the_rest(turns: SpeechTurns) -> None:
    turns.push_text("So Pa")
    turns.rest()
    before = spoken(everything(turns))
    turns.push_text("ris.")
    turns.end_text()
    after = spoken(turns.drain())
    twin = begun()
    twin.push_text("So Paris.")
    twin.end_text()
    assert before + after == spoken(twin.drain()) and before and after[-1] == EOS


def test_rest_without_text_is_nothing(turns: SpeechTurns) -> None:
    assert turns.rest() == [] and turns.frames_waiting == 0
    turns.end_text()
    with pytest.raises(TurnError):
        turns.rest()


def test_wait_gives_what_is_under_way_only(turns: SpeechTurns) -> None:
    assert turns.wait() == []
    turns.push_text_tokens([100, 101], paced=False)
    assert turns.frames_waiting == 2
    first = turns.wait()
    assert ids(first) == [100] and turns.frames_waiting == 1
    np.testing.assert_array_equal(first[0].samples, np.full(1764, 0.1, np.float32))
    turns.cancel()
    assert turns.frames_waiting == 0
    with pytest.raises(TurnError):
        turns.wait()
