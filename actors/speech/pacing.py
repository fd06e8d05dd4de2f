"""Pacing: which id stands in which 80 ms frame, so that text and speech go at one speed.

A word's first token stands in the frame in which the word begins, its further tokens (signs, spelling) in the frames after
it, PAD in those that are left until the next word. The speech decoder has learnt from text laid out in this way, its sound a
few frames later, and the turn's end, EOS, in the first frame after the sound. When a word begins follows from how long those
before it take: a linear rule over letters and vowel groups, fitted to recordings (``python -m vcpipe.bench.pacing``). On half
an hour of one voice it is off by 0.7 frames on average (0.6 for the sound of a last word).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vcpipe.schemas.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_VOWELS = re.compile(r"[aeiouyаеёиоуыэюяαεηιουω]+")

#: A digit and a character of a script that writes syllables or words, in letters and vowel groups.
_DIGIT_LETTERS, _IDEOGRAPH_LETTERS = 4, 2
_IDEOGRAPHS = 0x2E80

_CLAUSE_SIGNS = ",;:、，；：—–"
_SENTENCE_SIGNS = ".!?…。！？"
_CLOSING = "\"'”’)]»"

#: Tokens taken as one word at most, where a text has no spaces.
_MAX_WORD_TOKENS = 64

#: How byte-level and SentencePiece tokenizers write the space before a word.
_SPACES = ("Ġ", "▁", " ")


@dataclass(frozen=True, slots=True)
class WordLength:
    """Frames of a word: ``base + letter * letters + vowel_group * vowel groups``."""

    base: float
    letter: float
    vowel_group: float

    def __call__(self, word: str) -> float:
        letters, groups = count_sounds(word)
        return self.base + self.letter * letters + self.vowel_group * groups


@dataclass(frozen=True, slots=True)
class Pacing:
    """Constants of the rule, in frames. The defaults are fitted to 30 minutes of one calm American voice.

    ``running``: from the start of a word inside a phrase to the start of the next one. ``final``: sound of a word that ends a
    phrase, which is drawn out; ``clause_pause`` and ``sentence_pause`` follow it where more is said. ``speech_delay``: the
    sound's lag behind its text. ``end_margin``: frames that EOS waits beyond the end of the last word by the rule, since a cut
    word is worse than a late end. ``silence_level``: RMS, of samples in -1..1, up to which a frame is silent.
    ``leading_space``: a turn's first word is encoded with a space before it, as all others.
    """

    running: WordLength = WordLength(0.11, 0.62, 0.38)
    final: WordLength = WordLength(2.43, 0.35, 0.59)
    clause_pause: float = 1.91
    sentence_pause: float = 0.93
    speech_delay: int = 2
    end_margin: float = 1.14
    silence_level: float = 0.003
    leading_space: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Pacing:
        """A checkpoint's own: ``"vcpipe": {"pacing": {...}}`` in its config.json.

        Word lengths are lists of three numbers; what is missing takes the default, unknown keys are ignored. ConfigError for
        values of another kind.
        """
        marker = config.get("vcpipe")
        given = marker.get("pacing", {}) if isinstance(marker, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"config.json: vcpipe.pacing must be an object, not {given!r}")
        kinds = {f.name: type(f.default) for f in fields(cls)}
        return cls(**{name: _read(name, kinds[name], value) for name, value in given.items() if name in kinds})

    def frames(self, word: str) -> float:
        """Frames from the start of ``word``, signs and all, to the start of the next one."""
        sign = word.rstrip(_CLOSING)[-1:]
        if sign and sign in _CLAUSE_SIGNS:
            return self.final(word) + self.clause_pause
        if sign and sign in _SENTENCE_SIGNS:
            return self.final(word) + self.sentence_pause
        return self.running(word)


_ACCEPTED = {
    WordLength: "three numbers",
    bool: "true or false",
    int: "a whole number from 0 on",
    float: "a number from 0 on",
}


def _read(name: str, kind: type, value: Any) -> Any:
    if kind is WordLength and isinstance(value, list) and len(value) == 3 and all(map(_is_number, value)):
        return WordLength(*map(float, value))
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (int, float) and _is_number(value) and value >= 0 and value == kind(value):
        return kind(value)
    raise ConfigError(f"config.json: vcpipe.pacing.{name} must be {_ACCEPTED[kind]}, not {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def count_sounds(word: str) -> tuple[int, int]:
    """Letters and vowel groups of a word; at least one group where there is a letter.

    A digit counts as 4 letters and a group ("seven" has 5 and 2, "two" 3 and 1), an ideograph, a kana or a Hangul syllable as
    2 and 1.
    """
    letters = groups = 0
    plain = []
    for character in unicodedata.normalize("NFC", word.lower()):
        if character.isdigit():
            letters, groups = letters + _DIGIT_LETTERS, groups + 1
            plain.append(" ")
        elif character.isalpha() and ord(character) >= _IDEOGRAPHS:
            letters, groups = letters + _IDEOGRAPH_LETTERS, groups + 1
            plain.append(" ")
        elif character.isalpha():
            letters += 1
            plain.append(unicodedata.normalize("NFD", character)[0])
    vowels = len(_VOWELS.findall("".join(plain)))
    return letters, groups + vowels or (1 if letters else 0)


@dataclass(frozen=True, slots=True)
class ControlIds:
    """Ids that are no text. ``special``: all of them, PAD and EOS among them."""

    pad: int
    eos: int
    special: frozenset[int]


class Pacer:
    """Lays ids on frames. It holds one word: how long it takes is known when it is complete."""

    def __init__(self, pacing: Pacing, tokenizer: Tokenizer, control: ControlIds) -> None:
        self._pacing = pacing
        self._tokenizer = tokenizer
        self._control = control
        self._word: tuple[int, ...] = ()
        #: Frames laid, and where the next word begins, both from the turn's first frame on.
        self._frames = 0
        self._start = 0.0
        #: When the sound of the last word ends.
        self._sound_end = 0.0

    def push(self, ids: Iterable[int], complete: bool = False) -> list[int]:
        """Ids of text -> the ids of the next frames: of all words that are complete now, PAD after each included.

        ``complete``: the last word is, too. A special id among them takes one frame of its own after the word before it; ids of
        nothing but spaces take none.
        """
        laid: list[int] = []
        for token in ids:
            if token in self._control.special:
                laid += self._lay_word() + self._lay([token])
                continue
            if self._begins_word(token) or len(self._word) >= _MAX_WORD_TOKENS:
                laid += self._lay_word()
            self._word = (*self._word, token)
        return laid + self._lay_word() if complete else laid

    def lay(self, ids: Sequence[int]) -> list[int]:
        """Ids that go one a frame, unpaced, after what is held."""
        laid = self._lay_word()
        word: list[int] = []
        first = self._frames
        for frame, token in enumerate(ids, self._frames):
            if token in self._control.special:
                continue
            if self._begins_word(token) or not word:
                word, first = [], frame
            word.append(token)
        if word:
            self._sound_end = first + self._pacing.final(self._text(word))
        return laid + self._lay(ids)

    def rest(self) -> list[int]:
        """PAD until the sound of the last word laid is over. What is held waits on."""
        sound_end = math.ceil(self._sound_end + self._pacing.speech_delay + self._pacing.end_margin)
        return self._lay([], until=sound_end if self._sound_end else 0)

    def end(self) -> list[int]:
        """The last word, PAD until its sound is over, EOS."""
        laid = self._lay_word()
        end = math.ceil(self._sound_end + self._pacing.speech_delay + self._pacing.end_margin)
        return laid + self._pad_to(end) + self._lay([self._control.eos])

    def _begins_word(self, token: int) -> bool:
        return str(self._tokenizer.id_to_token(token) or "").startswith(_SPACES)

    def _text(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)).strip()

    def _lay_word(self) -> list[int]:
        if not self._word:
            return []
        if not (word := self._text(self._word)):
            self._word = ()
            return []
        first = max(self._frames, self._start)
        self._sound_end = first + self._pacing.final(word)
        self._start = first + self._pacing.frames(word)
        ids, self._word = self._word, ()
        return self._lay(ids, until=math.floor(self._start))

    def _lay(self, ids: Sequence[int], until: int = 0) -> list[int]:
        self._frames += len(ids)
        self._start = max(self._start, self._frames)
        return [*ids, *self._pad_to(until)]

    def _pad_to(self, frame: int) -> list[int]:
        missing = max(0, frame - self._frames)
        self._frames += missing
        return [self._control.pad] * missing
