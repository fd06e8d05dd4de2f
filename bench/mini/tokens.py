"""The text tokens of the assistant and the pieces of the user's transcript.

A text token is a word of the replies with the space before it, or a sign: one token a word, so that it can stand in the frame
in which the word begins. Other words are spelled in single bytes. Transcript pieces are a byte-pair encoding of the lower-case
transcripts, in the writing of SentencePiece ("▁" begins a word).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, 32))]

_SIGNS = ".,!?"
_WORD = re.compile(rf"[^\s{re.escape(_SIGNS)}]+|[{re.escape(_SIGNS)}]")
_SPACE = "Ġ"  # how byte-level encodings write a space


# ------------------------------------------------------------------------------------------------ text
def write_tokenizer(folder: Path, replies: Iterable[str]) -> int:
    """Write the tokenizer whose words are those of ``replies`` into ``folder``; return the size of its vocabulary."""
    words = sorted({word for reply in replies for word in _WORD.findall(reply)} - set(_SIGNS))
    if (odd := [word for word in words if not word.isascii()]) != []:
        raise ValueError(f"words of replies are written in ASCII; these are not: {', '.join(odd)}")
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(_SPACE + word for word in words)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = names | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, value in (("tokenizer_config.json", settings), ("special_tokens_map.json", names)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return len(tokens)


class TextTokens:
    """The tokenizer in ``folder`` as training needs it: words to ids."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.size = self.tokenizer.get_vocab_size()

    def word(self, word: str) -> list[int]:
        """Ids of a word as a reply writes it, signs and all: "eleven." is " eleven" and "."."""
        return [int(i) for i in self.tokenizer.encode(" " + word, add_special_tokens=False).ids]

    def text(self, ids: Iterable[int]) -> str:
        """What the ids say, without specials and outer spaces."""
        return str(self.tokenizer.decode([i for i in ids if i >= len(SPECIALS)], skip_special_tokens=False)).strip()

    def continuations(self) -> list[int]:
        """1 for every id that continues a word or is a sign, 0 for ids that begin a word and for specials."""
        vocab = sorted(self.tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        return [int(not token.startswith((_SPACE, "<"))) for token, _ in vocab]


# ------------------------------------------------------------------------------------------------ transcript
class Pieces:
    """Byte-pair pieces of transcripts; ids index :attr:`names`, blank is one past them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.names = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])]
        self.blank = len(self.names)

    @classmethod
    def train(cls, transcripts: Iterable[str], size: int) -> Pieces:
        """``size`` pieces with ``<unk>`` as the first, learnt from lower-case ``transcripts``."""
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<unk>"],
            initial_alphabet=list("▁abcdefghijklmnopqrstuvwxyz'"),
            show_progress=False,
        )
        tokenizer.train_from_iterator(list(transcripts), trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> Pieces:
        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        self._tokenizer.save(str(path), pretty=False)

    def ids(self, transcript: str) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(transcript).ids]

    def text(self, ids: Iterable[int]) -> str:
        return "".join(self.names[i] for i in ids).replace("▁", " ").strip()
