"""Replies on the frame clock, and the conversations that the language model learns from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy")

from vcpipe.bench.mini.conversations import PLAIN, RECALLED_WORDS, RESULT_LATER, Conversations, Habits
from vcpipe.bench.mini.corpus import items, transcript
from vcpipe.bench.mini.material import Line, Material, Sounds, SpokenReply, spoken_numbers
from vcpipe.bench.mini.shape import EOS, PAD
from vcpipe.bench.mini.timeline import (
    USER_FRAME,
    USER_RATE,
    Reply,
    first_frame,
    reply_frames,
    reply_tokens,
    text_frames,
)
from vcpipe.bench.mini.tokens import TextTokens, write_tokenizer

WORDS = [("It", 0.02, 0.1), ("is", 0.12, 0.2), ("eleven.", 0.41, 0.95)]
SAMPLES = int(1.05 * 22050)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TextTokens:
    folder: Path = tmp_path_factory.mktemp("tokens")
    write_tokenizer(folder, ["It is eleven.", "Yes, two is even."])
    return TextTokens(folder)


@pytest.fixture(scope="module")
def material(tokens) -> Material:
    """Three questions of 1, 1.5 and 2 s and two replies; the sound of a rendering is its number."""
    sounds = Sounds()
    echoes = [sounds.add(np.full(16800, 10 + i, np.int16), 0.0) for i in range(2)]
    yes = [("Yes,", 0.02, 0.3), ("two", 0.4, 0.5), ("is", 0.5, 0.6), ("even.", 0.62, 1.0)]
    replies = [
        SpokenReply("It is eleven.", Reply.lay(WORDS, SAMPLES, tokens, 0), echoes[0]),
        SpokenReply("Yes, two is even.", Reply.lay(yes, SAMPLES, tokens, 0), echoes[1]),
    ]
    lines = []
    for i, seconds in enumerate((1.0, 1.5, 2.0)):
        rendering = sounds.add(np.full(int(seconds * USER_RATE), i + 1, np.int16), 0.06)
        lines.append(Line(f"line {i}", "test", i % 2, (i + 1, 7), (i, 20)[: i % 3], 11 * i, [rendering]))
    sounds.close()
    return Material(sounds, replies, lines, [], [], np.full(3, 1 / 3), ["word"] * 8)


def conversations(material, tokens, frames=200, rows=6, seed=0, **habits) -> Conversations:
    return Conversations(material, tokens.size, rows, frames, seed, replace(PLAIN, **habits))


# ------------------------------------------------------------------------------------------------ one reply
@pytest.mark.parametrize(("end", "frame"), [(0, 4), (1, 5), (1280, 5), (1281, 6), (16000, 17), (16640, 17)])
def test_text_begins_four_frames_after_the_question(end, frame):
    assert first_frame(end) == frame


def test_a_word_stands_in_the_frame_in_which_it_starts_and_its_sign_behind_it(tokens):
    it, dot = tokens.word("It"), tokens.word("eleven.")[1:]
    placed = reply_tokens(WORDS, tokens, 100)
    assert [frame for frame, _ in placed] == [100, 101, 105, 106]
    assert [placed[0][1]] == it and [placed[3][1]] == dot


def test_a_word_whose_frame_is_taken_goes_to_the_next_free_one(tokens):
    words = [("eleven.", 0.0, 0.1), ("It", 0.1, 0.15), ("is", 0.3, 0.4)]
    assert [frame for frame, _ in reply_tokens(words, tokens, 0)] == [0, 1, 2, 3]


def test_sound_lies_two_frames_late_and_eos_in_the_first_frame_after_it(tokens):
    reply = Reply.lay(WORDS, SAMPLES, tokens, 50)
    assert reply_frames(SAMPLES) == 14 and reply_frames(1764) == 1 and reply_frames(1765) == 2
    assert (reply.sound, reply.end) == (52, 66)
    assert reply == Reply.lay(WORDS, SAMPLES, tokens, 0).moved(50)
    text = text_frames([reply], 70)
    assert np.flatnonzero(text != PAD).tolist() == [50, 51, 55, 56, 66] and text[66] == EOS


def test_an_interruption_ends_text_and_sound_three_frames_later(tokens):
    reply = Reply.lay(WORDS, SAMPLES, tokens, 50)
    cut = reply.interrupted(51 * USER_FRAME + 700)
    assert cut.cut and cut.end == 54 and [frame for frame, _ in cut.tokens] == [50, 51]
    assert cut.samples == 2 * 1764  # frames 52 and 53
    assert reply.interrupted(63 * USER_FRAME) == reply  # it would have ended then in any case
    early = reply.interrupted(48 * USER_FRAME)
    assert (early.end, early.samples) == (51, 0)


# ------------------------------------------------------------------------------------------------ conversations
def test_every_question_is_followed_by_its_reply(material, tokens):
    batch = conversations(material, tokens).batch()
    length = batch.text.shape[1] * USER_FRAME
    rendering = {int(offset): i for i, offset in enumerate(material.sounds.offset)}
    expected = np.full_like(batch.text, PAD)
    for source, samples, place, ratio, gain in batch.speech:
        assert ratio == 1.0 and 0.5 < gain < 2
        line = next(line for line in material.lines if rendering[source] in line.spoken)
        row, start = divmod(place, length)
        if samples == material.sounds.samples[rendering[source]]:  # not cut off by the row's end
            reply = material.replies[line.reply].laid.moved(first_frame(start + samples))
            said = text_frames([reply], batch.text.shape[1])
            expected[row] = np.where(said != PAD, said, expected[row])
    np.testing.assert_array_equal(batch.text, expected)
    np.testing.assert_array_equal(batch.previous[:, 1:], batch.text[:, :-1])
    assert (batch.previous[:, 0] == PAD).all() and len(batch.speech) > 12


def test_frames_before_a_reply_count_in_full_and_quiet_ones_little(material, tokens):
    batch = conversations(material, tokens).batch()
    assert (batch.weight[batch.text != PAD] == 1).all()
    for row, reply, _ in batch.replies:
        assert (batch.weight[row, reply.first - 6 : reply.first] == 1).all()
    assert batch.weight.min() == pytest.approx(0.1)


def test_stretches_lie_in_their_rows_and_do_not_overlap(material, tokens):
    habits = replace(Habits(), interrupted=0.5, no_question=0.0)
    batch = Conversations(material, tokens.size, 8, 150, 3, habits).batch()
    for stretches in (batch.speech, batch.echo):
        assert stretches
        places = sorted((place, place + samples) for _, samples, place, _, _ in stretches)
        assert places[0][0] >= 0 and places[-1][1] <= batch.text.size * USER_FRAME
        assert all(end <= start for (_, end), (start, _) in zip(places, places[1:], strict=False))
        assert all(start // (150 * USER_FRAME) == (end - 1) // (150 * USER_FRAME) for start, end in places)


def test_a_late_reply_is_not_asked_for_where_it_was_due(material, tokens):
    batch = conversations(material, tokens, late=1.0).batch()
    firsts = [(row, reply.tokens[0][0]) for row, reply, _ in batch.replies if reply.tokens[0][0] < 200]
    assert all(batch.weight[row, first] == 1 and batch.weight[row, first - 1] == 0 for row, first in firsts)


def test_moved_tokens_are_asked_for_at_neither_place(material, tokens):
    batch = conversations(material, tokens, moved=1.0).batch()
    heard = np.concatenate([batch.previous[:, 1:], batch.text[:, -1:]], axis=1)
    differ = (heard != batch.text)[:, :-1]
    assert differ.sum() > 10 and (batch.weight[:, :-1][differ] == 0).all()


def test_interruptions_end_replies(material, tokens):
    batch = conversations(material, tokens, interrupted=1.0, rows=12).batch()
    cut = [(row, reply) for row, reply, _ in batch.replies if reply.cut and reply.end < 200]
    assert len(cut) > 5 and all(batch.text[row, reply.end] == EOS for row, reply in cut)


def test_a_prompt_takes_the_first_frames(material, tokens):
    batch = conversations(material, tokens, prompt=1.0).batch()
    for prompt, text, weight in zip(batch.prompt, batch.text, batch.weight, strict=True):
        frames = int((prompt >= 0).sum())
        assert frames >= 5 and (prompt[frames:] == -1).all() and prompt[0] == 1 and prompt[frames - 1] == EOS
        assert (text[:frames] == PAD).all() and (weight[:frames] == 0).all()


def test_the_questions_last_words_come_first_in_what_is_recalled(material, tokens):
    batch = conversations(material, tokens).batch()
    assert batch.recall_words.shape[1] == RECALLED_WORDS and len(batch.recall_at) == len(batch.recall_words) > 10
    assert (batch.recall_words[:, 0] == 7).all() and set(batch.recall_words[:, 1]) <= {1, 2, 3}
    assert {tuple(row) for row in batch.recall_numbers.tolist()} == {(-1, -1), (1, -1), (2, 20)}
    assert ((batch.recall_numbers[:, 1] == 20) == (batch.recall_words[:, 1] == 3)).all()


def test_the_number_in_the_reply_is_recalled_later_where_the_row_goes_on(material, tokens):
    batch = conversations(material, tokens, rows=60).batch()
    within = batch.recall_at[:, 1] + RESULT_LATER < 200
    assert (batch.recall_results[within] == 11 * (batch.recall_words[within, 1] - 1)).all()
    assert (batch.recall_results[~within] == -1).all() and (~within).any()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("what is twenty one plus five", [21, 5]),
        ("twenty twenty", [20, 20]),
        ("twenty ten", [20, 10]),
        ("one two", [1, 2]),
        ("thirty zero and forty nine", [30, 0, 49]),
        ("what comes before one hundred", [100]),
        ("three hundred sixty five days a year", [365]),
        ("one hundred or twenty", [100, 20]),
        ("what day is it", []),
    ],
)
def test_numbers_are_found_among_words(text, numbers):
    assert spoken_numbers(text.split()) == numbers


def test_calculations_hold_their_operands_and_no_other_number():
    for item in items():
        if found := re.fullmatch(r"(\d+) (?:plus|minus|times) (\d+)", item.composition):
            operands = sorted(int(each) for each in found.groups())
            assert sorted(spoken_numbers(transcript(item.question).split())) == operands, item.question


def test_without_questions_nothing_is_said(material, tokens):
    batch = conversations(material, tokens, no_question=1.0).batch()
    assert (batch.text == PAD).all() and not batch.speech and batch.weight.max() < 0.2


def test_the_same_seed_gives_the_same_conversations(material, tokens):
    one, other = (Conversations(material, tokens.size, 4, 120, 5).batch() for _ in range(2))
    np.testing.assert_array_equal(one.previous, other.previous)
    assert one.speech == other.speech
