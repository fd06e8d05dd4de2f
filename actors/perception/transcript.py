"""Ids of text pieces as text, in constant work a frame."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SPECIAL = frozenset({"<unk>", "<pad>", "<s>", "</s>"})
_LANGUAGE_TAG = re.compile(r"<[a-z]{2,3}-[A-Za-z]{2,4}>")
_WORD_START = "\u2581"


class PieceTable:
    """What every id of a SentencePiece vocabulary spells."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._texts = [None if _is_special(piece) else piece.replace(_WORD_START, " ") for piece in pieces]

    def text(self, token: int) -> str | None:
        """Text of an id; None for special pieces and language tags, "" for ids outside the vocabulary."""
        return self._texts[token] if 0 <= token < len(self._texts) else ""


class TranscriptText:
    """A growing transcript without the white space around it: the joined deltas always equal the stripped whole."""

    def __init__(self) -> None:
        self._started = False
        self._withheld: list[str] = []  # white space that belongs to the text only if more text follows

    def append(self, text: str) -> str:
        """More text -> what is added to the stripped transcript."""
        if not self._started:
            text = text.lstrip()
        visible = text.rstrip()
        if not visible:
            if self._started:
                self._withheld.append(text)
            return ""
        delta = "".join([*self._withheld, visible])
        self._started = True
        self._withheld = [text[len(visible) :]]
        return delta


def _is_special(piece: str) -> bool:
    return piece in _SPECIAL or _LANGUAGE_TAG.fullmatch(piece) is not None
