"""Cues: a transcript in lines with times, as subtitles want them, and the two files in which they are kept.

Words are gathered into a cue until a pause, or until it is full: 84 characters (two lines of 42) or 6 s, which is what
a reader can follow. A cue that is full is cut behind a sign if there is one in its latter half, else before its last word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.streaming import TranscriptDelta

#: So long without a word, in seconds, ends a cue; times come in steps of 80 ms.
PAUSE_S = 0.8

MAX_CHARACTERS = 84
MAX_DURATION_S = 6.0
_LINE_CHARACTERS = 42

#: A cue is shown for so long, if the next one lets it, and never for less than the other, in seconds.
_SHOWN_S = 1.0
_LEAST_S = 0.08

#: Sums of times may be off by so much.
_ROUNDING_S = 1e-6

#: Where a full cue is cut, the better sign first.
_SENTENCE_END = re.compile(r"[.!?…]['\")\]]*$")
_CLAUSE_END = re.compile(r"[,;:–—]['\")\]]*$")

SubtitleForm = Literal["srt", "vtt"]


@dataclass(frozen=True, slots=True)
class Cue:
    """A line of a transcript and when it is shown, in seconds of the input. ``index`` counts from 1; cues never overlap."""

    index: int
    start_s: float
    end_s: float
    text: str


@dataclass(slots=True)
class _Word:
    text: str
    start_s: float
    end_s: float


class CueSplitter:
    """Deltas in, cues out, each as soon as it is over. Keeps no more than the open cue.

    What comes out does not depend on when, or whether, :meth:`heard` is called.
    """

    def __init__(self) -> None:
        self._words: list[_Word] = []
        self._inside_word = False
        self._count = 0
        self._shown_until_s = 0.0

    @property
    def open_text(self) -> str:
        """The cue that may still grow."""
        return _joined(self._words)

    def add(self, delta: TranscriptDelta) -> list[Cue]:
        """The cues that the next text ends."""
        cues = self.heard(delta.start_s)
        for piece in re.findall(r"\s+|\S+", delta.text):
            if piece.isspace():
                self._inside_word = False
                continue
            if self._inside_word and self._words:
                word = self._words[-1]
                word.text, word.end_s = word.text + piece, delta.end_s
            else:
                self._words.append(_Word(piece, delta.start_s, delta.end_s))
                self._inside_word = True
            while self._is_too_much():
                cues.append(self._cut())
        return cues

    def heard(self, time_s: float) -> list[Cue]:
        """The cue, if any, that ends because no word began before ``time_s``."""
        if self._words and time_s - self._words[-1].end_s >= PAUSE_S - _ROUNDING_S:
            return self.finish()
        return []

    def finish(self) -> list[Cue]:
        """The rest, at a pause or at the end."""
        words, self._words = self._words, []
        self._inside_word = False
        return [self._cue(words, words[-1].end_s + PAUSE_S)] if words else []

    def _is_too_much(self) -> bool:
        if not self._words:
            return False
        duration_s = self._words[-1].end_s - self._words[0].start_s
        too_long = duration_s > MAX_DURATION_S + _ROUNDING_S and len(self._words) > 1
        return too_long or len(_joined(self._words)) > MAX_CHARACTERS

    def _cut(self) -> Cue:
        """A cue off the words, which are too many by their last one; or off a word that is too long by itself."""
        words = self._words
        if len(words) == 1:
            word = words[0]
            words.insert(0, _Word(word.text[:MAX_CHARACTERS], word.start_s, word.end_s))
            self._words[1] = _Word(word.text[MAX_CHARACTERS:], word.end_s, word.end_s)
        count = _best_cut(words)
        cut, self._words = words[:count], words[count:]
        return self._cue(cut, self._words[0].start_s)

    def _cue(self, words: list[_Word], most_s: float) -> Cue:
        """``most_s``: until when it may be shown."""
        start_s = max(words[0].start_s, self._shown_until_s)
        shown_s = min(start_s + _SHOWN_S, most_s)
        end_s = max(words[-1].end_s, shown_s, start_s + _LEAST_S)
        self._count += 1
        self._shown_until_s = end_s
        return Cue(self._count, start_s, end_s, _joined(words))


def _joined(words: list[_Word]) -> str:
    return " ".join(word.text for word in words)


def _best_cut(words: list[_Word]) -> int:
    """How many of the words make the cue, at least one and not all."""
    for sign in (_SENTENCE_END, _CLAUSE_END):
        for count in range(len(words) - 1, 0, -1):
            if len(_joined(words[:count])) < MAX_CHARACTERS / 2:
                break
            if sign.search(words[count - 1].text):
                return count
    return len(words) - 1


def as_srt(cue: Cue) -> str:
    """A cue of an SRT file with the blank line behind it."""
    times = f"{_clock(cue.start_s, ',')} --> {_clock(cue.end_s, ',')}"
    return f"{cue.index}\n{times}\n{_in_lines(cue.text)}\n\n"


def as_vtt(cue: Cue) -> str:
    """A cue of a WebVTT file with the blank line behind it."""
    text = _in_lines(cue.text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"{_clock(cue.start_s, '.')} --> {_clock(cue.end_s, '.')}\n{text}\n\n"


#: What stands at the beginning of the file, and each cue.
SUBTITLE_FORMS: dict[SubtitleForm, tuple[str, Callable[[Cue], str]]] = {
    "srt": ("", as_srt),
    "vtt": ("WEBVTT\n\n", as_vtt),
}


def _clock(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    whole, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{point}{milliseconds:03}"


def _in_lines(text: str) -> str:
    """In two lines of about equal length, where one would be too long."""
    spaces = [match.start() for match in re.finditer(" ", text)]
    if len(text) <= _LINE_CHARACTERS or not spaces:
        return text
    middle = min(spaces, key=lambda space: abs(2 * space + 1 - len(text)))
    return f"{text[:middle]}\n{text[middle + 1 :]}"


class SubtitleFile:
    """Cues in a file, each written out at once, so that what an interrupt leaves is valid. A context manager.

    Raises ConfigError where the file cannot be written.
    """

    def __init__(self, path: Path, form: SubtitleForm) -> None:
        self._path = path
        head, self._text_of = SUBTITLE_FORMS[form]
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise self._error(error) from None
        try:
            self._write(head)
        except ConfigError:
            self._file.close()
            raise

    def write(self, cue: Cue) -> None:
        """Append a cue."""
        self._write(self._text_of(cue))

    def _write(self, text: str) -> None:
        data = memoryview(text.encode())
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self._path} cannot be written: {error.strerror}")

    def __enter__(self) -> SubtitleFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
