"""Ids to text, one at a time and in constant work, with the result that decoding all ids at once would give.

For byte-level BPE tokenizers: a token is a string over an alphabet of 256 characters that stand for bytes (Radford et al.,
2019), and text is the UTF-8 decoding of all bytes, with U+FFFD for every broken sequence. No MLX.
"""

from __future__ import annotations

import codecs
from collections.abc import Set
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders

from vcpipe.schemas.errors import ConfigError


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """The bytes behind each id of a byte-level tokenizer. Raises ConfigError for a tokenizer of another kind."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            found = "none" if tokenizer.decoder is None else type(tokenizer.decoder).__name__
            raise ConfigError(f"tokenizer.json has the decoder {found}; accepted: ByteLevel")
        self._tokenizer = tokenizer
        self._alphabet = _byte_alphabet()

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one id: none for an id without a token; a token with a character outside the alphabet is plain text."""
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(self._alphabet[character] for character in token)
        except KeyError:
            return token.encode()


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """What one id does to a channel's text.

    ``delta``: what an event shows. The cumulative text loses ``erase`` characters at its end and gains ``append``.
    """

    delta: str
    erase: int
    append: str


class TokenAccumulator:
    """The text of one channel. It keeps at most the 3 bytes of an unfinished character, whatever came before.

    While a character is unfinished the cumulative text ends in U+FFFD; the id that completes it replaces that, so it erases
    one character, and its ``delta`` is its own bytes decoded alone. In all other cases ``delta`` is what is appended.
    """

    def __init__(self, token_bytes: TokenBytes, special_ids: Set[int]) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_id: int) -> TextUpdate | None:
        """Take one id; None for a special one, which leaves no trace in the text."""
        if token_id in self._special_ids:
            return None
        new_bytes = self._token_bytes[token_id]
        shown = self._unfinished()
        text = self._decoder.decode(new_bytes) + self._unfinished()  # all that stands from where ``shown`` began
        if text.startswith(shown):
            added = text[len(shown) :]
            return TextUpdate(added, 0, added)
        return TextUpdate(_lossy(new_bytes), len(shown), text)

    def _unfinished(self) -> str:
        """The decoder's held bytes as shown at the end of a text."""
        return _lossy(self._decoder.getstate()[0])


def _lossy(data: bytes) -> str:
    return data.decode("utf-8", "replace")
