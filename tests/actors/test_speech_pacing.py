"""Which id stands in which frame."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer
from word_tokenizer import word_tokenizer

from vcpipe.actors.speech.frames import FrameText, TextFrames
from vcpipe.actors.speech.pacing import Pacing, WordLength, count_sounds
from vcpipe.actors.speech.text import encode
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.speech import SpeechOptions

PAD, EOS = 12, 2

#: A word takes 4 frames, the last one's sound 6; a clause pauses for 3, a sentence for 2.
EVEN = Pacing(WordLength(4, 0, 0), WordLength(6, 0, 0), clause_pause=3, sentence_pause=2, speech_delay=2, end_margin=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return word_tokenizer()


def frames(tokenizer: Tokenizer, pacing: Pacing = EVEN, **options: Any) -> FrameText:
    return TextFrames(tokenizer, pacing, PAD, EOS, SpeechOptions(**options))()


def shown(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    names = {PAD: "-", EOS: "|"}
    return [names.get(token) or tokenizer.decode([token], skip_special_tokens=False).strip() or "_" for token in ids]


def laid(tokenizer: Tokenizer, text: str, pacing: Pacing = EVEN) -> str:
    words = frames(tokenizer, pacing)
    return " ".join(shown(tokenizer, words.push_text(text) + words.end()))


def test_a_word_begins_where_the_one_before_ends(tokenizer: Tokenizer) -> None:
    # "is" 4 frames, "it," 9 (its sign in the frame after it), "the." 6 and 2 of delay and 1 of margin.
    assert laid(tokenizer, "is it, the.") == "is - - - it , - - - - - - - the . - - - - - - - |"


def test_words_of_several_tokens_take_their_frames_and_delay_the_next(tokenizer: Tokenizer) -> None:
    assert laid(tokenizer, "is qzqzqz it") == "is - - - q z q z q z it - - - - - - - - |"


def test_parts_of_frames_add_up(tokenizer: Tokenizer) -> None:
    pacing = Pacing(WordLength(2.5, 0, 0), WordLength(2.5, 0, 0), end_margin=0.0)
    # Starts at 0, 2.5, 5, 7.5; the end at 10 + 2.
    assert laid(tokenizer, "is is is is", pacing) == "is - is - - is - is - - - - |"


def test_an_empty_turn_is_silence_and_its_end(tokenizer: Tokenizer) -> None:
    assert laid(tokenizer, "") == laid(tokenizer, " \n ") == "- - - |"


def test_a_word_waits_until_it_is_complete(tokenizer: Tokenizer) -> None:
    words = frames(tokenizer, min_segment_characters=1, max_segment_characters=1)
    assert words.push_text("is") == []
    assert words.push_text(",") == []
    assert shown(tokenizer, words.push_text(" ")) == ["is", ",", *"-------"]
    assert words.push_text("it") == []


@pytest.mark.parametrize("options", [{}, {"hold_back": 3}, {"min_segment_characters": 1, "max_segment_characters": 90}])
def test_text_in_pieces_and_its_ids_give_the_same_frames(tokenizer: Tokenizer, options: dict[str, int]) -> None:
    text = "The capital of France is Paris, I think; is it so?  Twelve (12) and zebra-striped..."
    wanted = frames(tokenizer)
    ids = encode(tokenizer, " " + text.replace("  ", " "))
    direct = wanted.push_ids(ids, paced=True) + wanted.end()
    assert direct[-1] == EOS and [token for token in direct[:-1] if token != PAD] == ids
    rng = random.Random(4)
    for _ in range(5):
        words, start, laid = frames(tokenizer, **options), 0, []
        while start < len(text):
            size = rng.randrange(1, 12)
            laid += words.push_text(text[start : start + size])
            start += size
        assert laid + words.end() == direct


def test_ids_one_a_frame(tokenizer: Tokenizer) -> None:
    words, the = frames(tokenizer), encode(tokenizer, " the")
    assert words.push_ids([PAD, *the, PAD, PAD, EOS], paced=False) == [PAD, *the, PAD, PAD, EOS]
    # The sound of "the" began in frame 1, so it ends in frame 7; then 2 of delay and 1 of margin.
    assert shown(tokenizer, words.end()) == ["-"] * 5 + ["|"]


def test_special_ids_take_a_frame_of_their_own(tokenizer: Tokenizer) -> None:
    words, the = frames(tokenizer), encode(tokenizer, " the")
    laid = words.push_ids([*the, PAD, PAD, *the], paced=True)
    assert shown(tokenizer, laid) == ["the", "-", "-", "-", "-", "-"]


def test_text_before_ids_comes_before_them(tokenizer: Tokenizer) -> None:
    words = frames(tokenizer)
    laid = words.push_text("is") + words.push_ids(encode(tokenizer, " it"), paced=True) + words.end()
    assert shown(tokenizer, laid)[:5] == ["is", "-", "-", "-", "it"]


def test_a_copy_goes_its_own_way(tokenizer: Tokenizer) -> None:
    words = frames(tokenizer, hold_back=2)
    words.push_text("is it the is it, th")
    twin = words.copy()
    first = twin.push_text("e more of it") + twin.end()
    assert words.push_text("e more of it") + words.end() == first


def test_a_text_without_spaces_does_not_collect(tokenizer: Tokenizer) -> None:
    words = frames(tokenizer)
    for _ in range(40):
        words.push_text("z" * 50)
        assert len(words._pacer._word) <= 64 and len(words._bridge._tail) <= 200


@pytest.mark.parametrize("token", [-1, 539, 1.0, True, None])
def test_ids_outside_the_vocabulary(tokenizer: Tokenizer, token: Any) -> None:
    with pytest.raises(ValueError, match=r"from 0 to 538, not"):
        frames(tokenizer).push_ids([5, token], paced=True)


def test_text_that_is_none(tokenizer: Tokenizer) -> None:
    with pytest.raises(TypeError, match="must be a str, not bytes"):
        frames(tokenizer).push_text(b"hello")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lone surrogate"):
        frames(tokenizer).push_text("a\ud83d")


@pytest.mark.parametrize(
    ("word", "sounds"),
    [
        ("Paris,", (5, 2)),
        ("eleven.", (6, 3)),
        ("hmm", (3, 1)),
        ("12", (8, 2)),
        ("“über”", (4, 2)),
        ("--", (0, 0)),
        ("日本", (4, 2)),
    ],
)
def test_sounds_of_a_word(word: str, sounds: tuple[int, int]) -> None:
    assert count_sounds(word) == sounds


@pytest.mark.parametrize(
    ("word", "frames"), [("it", 4), ("it,", 9), ("it—", 9), ("it.", 8), ('it?"', 8), ("it.)", 8), ("", 4), ('"', 4)]
)
def test_signs_pause(word: str, frames: float) -> None:
    assert EVEN.frames(word) == frames


def test_a_checkpoints_own_pacing() -> None:
    own = {"running": [1, 2.5, 0], "sentence_pause": 7, "speech_delay": 3, "leading_space": False, "of_others": [1]}
    pacing = Pacing.from_config({"vcpipe": {"random_weights": True, "pacing": own}})
    assert pacing == Pacing(running=WordLength(1, 2.5, 0), sentence_pause=7, speech_delay=3, leading_space=False)
    for config in ({}, {"vcpipe": None}, {"vcpipe": {}}, {"vcpipe": {"pacing": {}}}):
        assert Pacing.from_config(config) == Pacing()


@pytest.mark.parametrize(
    ("pacing", "wrong"),
    [
        ({"final": [1, 2]}, "vcpipe.pacing.final must be three numbers"),
        ({"final": [1, 2, "x"]}, "final must be three numbers"),
        ({"speech_delay": 1.5}, "speech_delay must be a whole number"),
        ({"end_margin": -1}, "end_margin must be a number from 0 on"),
        ({"end_margin": float("nan")}, "end_margin must be a number from 0 on"),
        ({"leading_space": 1}, "leading_space must be true or false"),
        ([], "vcpipe.pacing must be an object"),
    ],
)
def test_a_pacing_that_cannot_be(pacing: Any, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        Pacing.from_config({"vcpipe": {"pacing": pacing}})
