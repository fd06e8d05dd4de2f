"""Cues and their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcpipe.launch.subtitles import MAX_CHARACTERS, MAX_DURATION_S, Cue, CueSplitter, SubtitleFile, as_srt, as_vtt
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.streaming import TranscriptDelta


def delta(frame: int, text: str) -> TranscriptDelta:
    return TranscriptDelta.of_frame(text, frame, 0.08)


def split(*texts: tuple[int, str]) -> list[Cue]:
    splitter = CueSplitter()
    return [cue for frame, text in texts for cue in splitter.add(delta(frame, text))] + splitter.finish()


def words(count: int, every: int = 1, word: str = "abcde") -> list[tuple[int, str]]:
    return [(1 + i * every, f" {word}") for i in range(count)]


def test_pieces_of_words_are_joined_and_white_space_is_one_space() -> None:
    assert [cue.text for cue in split((1, "Hel"), (2, "lo"), (3, " \n wor"), (4, "ld a"), (5, "b "))] == [
        "Hello world ab"
    ]


def test_a_cue_begins_with_its_first_text_and_lasts_to_its_last() -> None:
    (cue,) = split((5, "a"), (10, " b"), (20, " c"))
    assert (cue.index, cue.start_s, cue.end_s) == (1, pytest.approx(0.32), pytest.approx(1.60))


def test_a_pause_ends_a_cue_and_a_shorter_one_does_not() -> None:
    assert [cue.text for cue in split((5, "a"), (15, " b"), (26, " c"))] == ["a b", "c"]


@pytest.mark.parametrize("glances", [1, 3])
def test_cues_do_not_depend_on_when_one_looks(glances: int) -> None:
    texts = [(1, "a"), (4, " b"), (30, " c"), (40, " d"), (51, "e"), (52, " f")]
    splitter, cues, looked = CueSplitter(), [], 0
    for at, text in texts:
        while looked < at:
            cues += splitter.heard(max(looked - 1, 0) * 0.08)
            looked += glances
        cues += splitter.add(delta(at, text))
    assert cues + splitter.finish() == split(*texts)


def test_a_cue_is_there_as_soon_as_the_pause_is_long_enough() -> None:
    splitter = CueSplitter()
    splitter.add(delta(10, "word"))
    assert (splitter.heard(1.52), splitter.open_text) == ([], "word")
    assert [cue.text for cue in splitter.heard(1.6)] == ["word"]
    assert (splitter.open_text, splitter.heard(9.0), splitter.finish()) == ("", [], [])


def test_full_cues_fit_and_hold_all_words_in_order() -> None:
    cues = split(*words(200))
    assert [word for cue in cues for word in cue.text.split()] == ["abcde"] * 200
    assert all(len(cue.text) <= MAX_CHARACTERS for cue in cues)
    assert [cue.index for cue in cues] == list(range(1, len(cues) + 1))


def test_a_cue_is_no_longer_than_one_can_look_at_it() -> None:
    cues = split(*words(30, every=9, word="a"))
    assert len(cues) > 1
    assert all(cue.end_s - cue.start_s <= MAX_DURATION_S + 1e-6 for cue in cues)
    assert sum(len(cue.text.split()) for cue in cues) == 30


@pytest.mark.parametrize(("sign", "first"), [(".", 9), (",", 9), ("", 14)])
def test_a_full_cue_is_cut_behind_a_sign_if_there_is_one(sign: str, first: int) -> None:
    texts = words(20)
    texts[8] = (texts[8][0], texts[8][1] + sign)
    assert len(split(*texts)[0].text.split()) == first


def test_a_sign_in_the_first_half_is_no_place_for_a_cut() -> None:
    texts = words(20)
    texts[2] = (3, " abcde.")
    assert len(split(*texts)[0].text.split()) > 3


def test_a_word_without_an_end_is_cut() -> None:
    cues = split(*((frame, "x" * 7) for frame in range(1, 101)))
    assert "".join(cue.text for cue in cues) == "x" * 700
    assert all(len(cue.text) <= MAX_CHARACTERS for cue in cues)


def test_cues_follow_each_other_and_each_can_be_seen() -> None:
    texts = [(0, "at once"), (0, " " + "y" * 80), *((frame, " zzzz") for frame in range(2, 60)), (90, " last")]
    cues = split(*texts)
    assert all(cue.end_s - cue.start_s > 0.0799 for cue in cues)
    assert all(before.end_s <= after.start_s for before, after in zip(cues, cues[1:], strict=False))
    assert cues[-1].end_s - cues[-1].start_s == pytest.approx(0.88)  # a word of 80 ms, and a pause


def test_the_forms() -> None:
    cue = Cue(7, 3723.9996, 3725.5, "one two, three four five six seven eight nine ten")
    assert as_srt(cue) == ("7\n01:02:04,000 --> 01:02:05,500\none two, three four five\nsix seven eight nine ten\n\n")
    assert as_vtt(Cue(1, 0.0, 0.08, "<b> & --> c")) == ("00:00:00.000 --> 00:00:00.080\n&lt;b&gt; &amp; --&gt; c\n\n")


def test_a_file_is_valid_after_every_cue(tmp_path: Path) -> None:
    path = tmp_path / "a.vtt"
    with SubtitleFile(path, "vtt") as file:
        assert path.read_text() == "WEBVTT\n\n"
        file.write(Cue(1, 0.0, 1.0, "é"))
        assert path.read_text(encoding="utf-8") == "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\né\n\n"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent/a\.srt cannot be written: No such file"):
        SubtitleFile(tmp_path / "absent" / "a.srt", "srt")
    if Path("/dev/full").exists():
        with pytest.raises(ConfigError, match="/dev/full cannot be written: No space left"):
            SubtitleFile(Path("/dev/full"), "vtt")
