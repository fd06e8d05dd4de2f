"""Text in pieces to ids: the bridge beside encoding everything at once, and when the segmenter lets text go."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vcpipe.actors.checkpoint import load_tokenizer
from vcpipe.actors.speech.text import LONGEST_WORD, Segmenter, TextBridge, encode, prepare_tokenizer
from vcpipe.schemas.errors import ConfigError

ROOT = Path(__file__).parents[2]

#: How newer tokenizers split: by case, numbers in threes, signs with the line ends behind them.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = (
    "Hello there!  It's 12345.678 o'clock, isn't it?\n\n  \n 'Yes' -- HELLOworld said;\t“naïve” über-語言 …\r\n"
    "\u00a0 a\u0301 b \u0301c 🎉🎉 </s> <SPECIAL_12>x  \n\u3000y.com/ \n//z   "
)
ALPHABET = "ab C'.,!?\n\t  1-é語\u0301\u00a0\u0085🎉"


def learnt(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT, "the cat's 'll isn't HELLO hello 123 1234 \n \n .\n.\n"], trainer)
    return tokenizer


TOKENIZERS = {
    "tiny": lambda: load_tokenizer(ROOT / "tests/data/tiny/bf16"),
    "embedded": lambda: load_tokenizer(ROOT / "launch/embedded"),
    "bytes": lambda: learnt(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefixed": lambda: learnt(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "tekken": lambda: learnt(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(TEKKEN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
}


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made = TOKENIZERS[request.param]()
    prepare_tokenizer(made)
    return made


def cut(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        size = rng.choice([1, 1, 2, 3, 7, 40])
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("hold_back", [0, 1, 5])
def test_any_partition_gives_the_ids_of_the_whole_text(tokenizer: Tokenizer, hold_back: int) -> None:
    rng = random.Random(hold_back)
    texts = [TEXT, "", " ", *("".join(rng.choices(ALPHABET, k=60)) for _ in range(60))]
    for text in texts:
        wanted = encode(tokenizer, text)
        for _ in range(3):
            bridge, ids = TextBridge(tokenizer, hold_back), []
            for piece in cut(text, rng):
                ids += bridge.push(piece)
                # What was said is never taken back.
                assert ids == wanted[: len(ids)]
            assert ids + bridge.flush() == wanted
            assert bridge.flush() == []


def test_ids_come_as_soon_as_they_are_settled(tokenizer: Tokenizer) -> None:
    bridge = TextBridge(tokenizer)
    assert bridge.push("Hello") == []
    assert bridge.push(" wor") == encode(tokenizer, "Hello")
    assert bridge.push("ld") == []
    held = TextBridge(tokenizer, hold_back=2)
    ids = held.push("Hello there my wor")
    assert ids == encode(tokenizer, "Hello there my")[:-2]


def test_work_and_memory_do_not_grow(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge, longest = TextBridge(tokenizer), 0
    characters = []
    monkeypatch.setattr(
        "vcpipe.actors.speech.text.encode", lambda t, text: characters.append(len(text)) or encode(t, text)
    )
    for word in ["word "] * 500 + ["x" * 90] * 50:
        bridge.push(word)
        longest = max(longest, len(bridge._tail))
    bridge.flush()
    assert longest <= LONGEST_WORD
    # Every character is encoded once.
    assert sum(characters) == 500 * 5 + 50 * 90
    assert max(characters) <= LONGEST_WORD + 90


def test_names_of_special_tokens_are_text() -> None:
    tokenizer = TOKENIZERS["tiny"]()
    assert tokenizer.encode("</s>", add_special_tokens=False).ids == [2]
    prepare_tokenizer(tokenizer)
    bridge = TextBridge(tokenizer)
    ids = bridge.push("a </s> <SPECIAL_12> b") + bridge.flush()
    assert not {2, 12} & set(ids)
    assert tokenizer.decode(ids) == "a </s> <SPECIAL_12> b"


@pytest.mark.parametrize("kind", ["none", "metaspace", "prepend"])
def test_a_tokenizer_that_does_not_split_at_spaces_is_refused(kind: str) -> None:
    tokenizer = learnt(pre_tokenizers.ByteLevel(add_prefix_space=False))
    if kind == "none":
        tokenizer.pre_tokenizer = None
    elif kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    else:
        tokenizer.normalizer = normalizers.Prepend("x")
    with pytest.raises(ConfigError, match="does not split .* before every space"):
        prepare_tokenizer(tokenizer)


# ------------------------------------------------------------------------------------------------ segments
def segments(text: str, size: int, least: int = 8, most: int = 24) -> list[str]:
    segmenter = Segmenter(least, most)
    found = [s for start in range(0, len(text), size) for s in segmenter.push(text[start : start + size])]
    return found + segmenter.flush()


def test_a_segment_ends_at_a_sign_once_it_is_long_enough() -> None:
    assert segments("Hi. Oh, my! Is this (really) so?) Yes.", 1) == ["Hi. Oh, ", "my! Is this (really) ", "so?) Yes."]
    assert segments("Well now, go on. ", 100) == ["Well now, ", "go on. "]
    assert segments('He said "so." Then 3.14, no.', 100, 8, 90) == ['He said "so." ', "Then 3.14, ", "no."]
    assert segments("我不知道，你呢？好。", 1, 4) == ["我不知道，", "你呢？好。"]


def test_a_long_segment_ends_at_a_space() -> None:
    text = "one two three four five six seven eight nine"
    found = segments(text, 1)
    assert found[0] == "one two three four five "
    assert all(len(segment) <= 24 for segment in found)
    assert "".join(found) == text


def test_a_word_without_end_is_cut() -> None:
    found = segments("x" * 450, 1)
    assert "".join(found) == "x" * 450
    assert max(map(len, found)) == LONGEST_WORD + 1


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_blanks_become_single_spaces(size: int) -> None:
    text = "\n one\n\n two\t\x00\x1b  three .\r\n Four, five six seven \u00a0 eight nine \n "
    assert "".join(segments(text, size)) == "one two three . Four, five six seven eight nine "


def test_blanks_around_a_flush() -> None:
    segmenter = Segmenter(8, 24)
    assert segmenter.push("one ") + segmenter.flush() + segmenter.push("  two") + segmenter.flush() == ["one ", "two"]
    assert segmenter.flush() == []
    assert segmenter.push(" ") + segmenter.flush() == [" "]
