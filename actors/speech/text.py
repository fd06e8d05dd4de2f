"""Text that arrives in pieces of any size -> token ids, the same that encoding all of it at once would give.

Two steps, each in constant memory: the segmenter decides when text is let go, the bridge turns what was let go into ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vcpipe.schemas.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Longest run of text without a space that is kept together.
LONGEST_WORD = 200

_BLANKS = re.compile(r"[\s\x00-\x1f\x7f]+")

#: Where a clause ends: signs, with what closes behind them, before a space; those of scripts without spaces anywhere.
_CLAUSE_END = re.compile(r"[.!?,;:…][\"'”’)\]]* |[。！？、，；：][」』”’）]*")

#: A space that ends a word. No token reaches over it, see :class:`TextBridge`.
_BOUNDARY = re.compile(r"(?<=\S) ")

#: The bridge's premise on a tokenizer, tried out on these.
_PROBES = ("one two", "One, two. Three", "a 12 34b", "it's: (not) so!", "über naïve 語 x")


@dataclass
class Segmenter:
    """Lets text go at the end of a clause once there is enough of it, or at a space once there is much.

    Every run of blanks and control characters becomes one space, which goes with the text before it: only with the space a
    word is known to be complete.
    """

    min_characters: int
    max_characters: int
    _buffer: str = ""
    _ended_in_space: bool = True

    def push(self, text: str) -> list[str]:
        """The segments that ``text`` completes."""
        buffer = _BLANKS.sub(" ", self._buffer + text)
        segments = []
        while True:
            if self._ended_in_space:
                buffer = buffer.removeprefix(" ")
            if not (cut := self._cut(buffer)):
                break
            segments.append(buffer[:cut])
            self._ended_in_space = buffer[cut - 1] == " "
            buffer = buffer[cut:]
        self._buffer = buffer
        return segments

    def settle(self) -> list[str]:
        """The complete words that are left: up to the last space."""
        words = self._buffer.rfind(" ") + 1
        settled, self._buffer = self._buffer[:words], self._buffer[words:]
        if settled:
            self._ended_in_space = True
        return [settled] if settled else []

    def flush(self) -> list[str]:
        """The rest."""
        rest, self._buffer = self._buffer, ""
        if rest:
            self._ended_in_space = rest[-1] == " "
        return [rest] if rest else []

    def _cut(self, buffer: str) -> int:
        """Where ``buffer`` is to be cut now, 0: nowhere."""
        for end in _CLAUSE_END.finditer(buffer):
            if end.end() >= self.min_characters:
                return end.end()
        if len(buffer) >= self.max_characters:
            if space := buffer.rfind(" ") + 1:
                return space
            if len(buffer) > LONGEST_WORD:
                return len(buffer)
        return 0


class TextBridge:
    """Text deltas -> ids, every id as soon as no later text can change it.

    The tokenizers in question split text into pieces before they look for tokens, from left to right, without looking back,
    and no piece goes on over a space that follows another character. So up to such a space the ids are settled, whatever comes
    next, and what comes next is encoded as if it stood alone. What is kept is the text from the last of these spaces on: every
    character is encoded once, and the ids are those of the whole text encoded at once (words of more than
    :data:`LONGEST_WORD` characters are cut). ``tokenizer``: one that went through :func:`prepare_tokenizer`.

    Names of special tokens in the text are text: they are spelled, not obeyed.
    """

    def __init__(self, tokenizer: Tokenizer, hold_back: int = 0) -> None:
        self._tokenizer = tokenizer
        self._hold_back = hold_back
        self._tail = ""
        self._held: list[int] = []

    def push(self, text: str) -> list[int]:
        """The ids that ``text`` settles."""
        self._tail += text
        boundary = 0
        for match in _BOUNDARY.finditer(self._tail):
            boundary = match.start()
        ids = self._release(self._tail[:boundary])
        self._tail = self._tail[boundary:]
        while len(self._tail) > LONGEST_WORD:
            ids += self._release(self._tail[:LONGEST_WORD])
            self._tail = self._tail[LONGEST_WORD:]
        return ids

    def flush(self) -> list[int]:
        """The rest: no text follows."""
        ids, self._held = self._held + encode(self._tokenizer, self._tail), []
        self._tail = ""
        return ids

    def _release(self, text: str) -> list[int]:
        # A new list: a copy of the bridge keeps the old one.
        ids = self._held + encode(self._tokenizer, text)
        settled = max(0, len(ids) - self._hold_back)
        self._held = ids[settled:]
        return ids[:settled]


def prepare_tokenizer(tokenizer: Tokenizer) -> None:
    """Make a tokenizer spell the names of special tokens; it belongs to speech alone from here on.
    One that was prepared before may be in use.

    ConfigError unless words can be encoded one by one, see :class:`TextBridge`.
    """
    if not tokenizer.encode_special_tokens:  # setting it fails while another thread encodes
        tokenizer.encode_special_tokens = True
    for probe in _PROBES:
        boundaries = [match.start() for match in _BOUNDARY.finditer(probe)]
        pieces = [probe[start:end] for start, end in zip([0, *boundaries], [*boundaries, len(probe)], strict=True)]
        splits = tokenizer.pre_tokenizer.pre_tokenize_str(probe) if tokenizer.pre_tokenizer is not None else []
        apart = [token for piece in pieces for token in encode(tokenizer, piece)]
        if not {*boundaries} <= {start for _, (start, _) in splits} or apart != encode(tokenizer, probe):
            raise ConfigError(
                f"tokenizer.json does not split {probe!r} before every space; text for speech needs a tokenizer that does"
            )


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of ``text`` alone, nothing added."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids) if text else []
