"""Text of one id at a time equals the decoding of all ids at once."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from vcpipe.actors.language.text import TokenAccumulator, TokenBytes
from vcpipe.schemas.errors import ConfigError

TINY = Path(__file__).parents[1] / "data" / "tiny" / "bf16" / "tokenizer.json"
SPECIAL = frozenset((12, 11, 1, 2))
UNKNOWN = 100_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tiny byte-level tokenizer with added tokens within and outside the byte alphabet."""
    tokenizer = Tokenizer.from_file(str(TINY))
    tokenizer.add_tokens(["<tool call>", "caf\u00e9", "\U0001f600", AddedToken("\u4f60\u597d", normalized=False)])
    return tokenizer


def check_against_full_decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Feed ``ids``; every update must be what decoding all ids so far gives. Returns the final text."""
    text, kept = TokenAccumulator(TokenBytes(tokenizer), SPECIAL), []
    shown = rebuilt = ""
    for token_id in ids:
        update = text.append(token_id)
        if token_id in SPECIAL:
            assert update is None
            continue
        kept.append(token_id)
        full = tokenizer.decode(kept, skip_special_tokens=False)
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        assert update.delta == (full[len(shown) :] if full.startswith(shown) else alone)
        rebuilt = rebuilt[: len(rebuilt) - update.erase] + update.append
        assert rebuilt == full
        shown = full
    return rebuilt


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id a byte, through the single-character tokens."""
    table = TokenBytes(tokenizer)
    single = {table[i]: i for i in range(tokenizer.get_vocab_size()) if len(table[i]) == 1}
    return [single[bytes([byte])] for byte in data]


def test_every_id_has_the_bytes_the_tokenizer_decodes(tokenizer):
    table = TokenBytes(tokenizer)
    for token_id in [*range(tokenizer.get_vocab_size()), UNKNOWN]:
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        assert table[token_id].decode("utf-8", "replace") == alone


def test_random_ids(tokenizer):
    rng = np.random.default_rng(3)
    for _ in range(150):
        ids = rng.integers(0, tokenizer.get_vocab_size(), 24).tolist()
        ids[int(rng.integers(24))] = UNKNOWN
        check_against_full_decode(tokenizer, ids)


def test_random_bytes_of_broken_utf8(tokenizer):
    """Bytes drawn from the edges of UTF-8: leads, continuations, surrogates, overlong forms, beyond U+10FFFF."""
    single = byte_ids(tokenizer, bytes(range(256)))
    edges = [
        0x41,
        0x7F,
        0x80,
        0x8F,
        0x90,
        0x9F,
        0xA0,
        0xBF,
        0xC1,
        0xC2,
        0xDF,
        0xE0,
        0xE1,
        0xED,
        0xEF,
        0xF0,
        0xF4,
        0xF5,
        0xFF,
    ]
    rng = np.random.default_rng(4)
    for _ in range(400):
        ids = [single[byte] for byte in rng.choice(edges, 20)]
        ids.insert(int(rng.integers(20)), int(rng.choice([12, 30, UNKNOWN])))
        check_against_full_decode(tokenizer, ids)


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        ("\U0001f600", ["\ufffd", "", "", "\ufffd"]),
        ("\ud55c", ["\ufffd", "", "\ufffd"]),
        ("\ufffd", ["\ufffd", "", ""]),  # the replacement character itself is no revision
    ],
)
def test_character_over_several_ids(tokenizer, text, deltas):
    accumulator = TokenAccumulator(TokenBytes(tokenizer), SPECIAL)
    updates = [accumulator.append(token_id) for token_id in byte_ids(tokenizer, text.encode())]
    assert [update.delta for update in updates] == deltas
    assert check_against_full_decode(tokenizer, byte_ids(tokenizer, ("ab" + text + "c").encode())) == "ab" + text + "c"


def test_special_id_within_a_character(tokenizer):
    first, *rest = byte_ids(tokenizer, "\ud55c".encode())
    assert check_against_full_decode(tokenizer, [first, 12, *rest]) == "\ud55c"
    assert check_against_full_decode(tokenizer, [first, 12]) == "\ufffd"
    assert check_against_full_decode(tokenizer, [first, 30, *rest]) == "\ufffd<SPECIAL_30>\ufffd\ufffd"


def test_work_does_not_grow_with_the_text(tokenizer):
    """Neither time nor state: 20,000 ids, the last 1,000 against the first 1,000."""
    ids = np.random.default_rng(5).integers(0, 384, 20_000).tolist()
    accumulator = TokenAccumulator(TokenBytes(tokenizer), SPECIAL)
    seconds = []
    for start in range(0, len(ids), 1000):
        begun = time.thread_time()
        for token_id in ids[start : start + 1000]:
            update = accumulator.append(token_id)
            assert update is None or len(update.append) < 100
        seconds.append(time.thread_time() - begun)
    # The best of five thousands each: a busy machine only ever makes them slower.
    assert min(seconds[-5:]) < 2 * min(seconds[:5])
    assert len(accumulator._decoder.getstate()[0]) <= 3


@pytest.mark.parametrize(("decoder", "name"), [(None, "none"), (decoders.Metaspace(), "Metaspace")])
def test_other_tokenizers_are_refused(decoder, name):
    tokenizer = Tokenizer(BPE())
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ConfigError, match=f"decoder {name}; accepted: ByteLevel"):
        TokenBytes(tokenizer)
