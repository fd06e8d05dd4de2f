"""Text of one turn -> the ids of its frames: segmenter, bridge and pacer, one after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vcpipe.actors.speech.pacing import ControlIds, Pacer, Pacing
from vcpipe.actors.speech.text import Segmenter, TextBridge, prepare_tokenizer
from vcpipe.schemas.speech import SpeechOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer


#: Characters that the segmenter is given at once.
_PIECE = 500


class FrameText:
    """The text side of one turn. Constant memory, whatever was said."""

    def __init__(self, tokenizer: Tokenizer, pacing: Pacing, control: ControlIds, options: SpeechOptions) -> None:
        self._vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
        self._segmenter = Segmenter(options.min_segment_characters, options.max_segment_characters)
        self._bridge = TextBridge(tokenizer, options.hold_back)
        #: The bridge lets text go at the end of a word, but for what it holds back.
        self._whole_words = not options.hold_back
        self._pacer = Pacer(pacing, tokenizer, control)
        #: What is put before the first text.
        self._lead: str | None = " " if pacing.leading_space else ""

    def copy(self) -> FrameText:
        """The same state, to go on from separately."""
        twin = copy.copy(self)
        # Their attributes are replaced, never changed.
        twin._segmenter = copy.copy(self._segmenter)
        twin._bridge = copy.copy(self._bridge)
        twin._pacer = copy.copy(self._pacer)
        return twin

    def push_text(self, text: str) -> list[int]:
        """Ids of the frames that ``text`` settles. TypeError for what is no str, ValueError for lone surrogates."""
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("text must be valid Unicode; it holds a lone surrogate") from None
        # Piece by piece, so that the work per character does not depend on how long the text is.
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        return [token for piece in pieces for token in self._say(self._segmenter.push(piece))]

    def push_ids(self, ids: Iterable[int], paced: bool) -> list[int]:
        """Ids of the frames that these ids settle: by the rule, or one a frame. ValueError for an id outside the vocabulary.

        They come after all text pushed before.
        """
        ids = list(ids)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocabulary:
                raise ValueError(f"text ids must be integers from 0 to {self._vocabulary - 1}, not {token!r}")
        pushed = self._flush_text()
        return pushed + (self._pacer.push(ids) if paced else self._pacer.lay(ids))

    def rest(self) -> list[int]:
        """Ids of the frames of all complete words, and of their sound to its end."""
        return self._say(self._segmenter.settle()) + self._pacer.rest()

    def end(self) -> list[int]:
        """Ids of all frames that are left, the turn's end included."""
        return self._flush_text() + self._pacer.end()

    def _flush_text(self) -> list[int]:
        return self._say(self._segmenter.flush()) + self._pacer.push(self._bridge.flush())

    def _say(self, segments: list[str]) -> list[int]:
        laid: list[int] = []
        for segment in segments:
            if self._lead is not None:
                segment, self._lead = self._lead + segment, None
            if ids := self._bridge.push(segment):
                laid += self._pacer.push(ids, complete=self._whole_words)
        return laid


class TextFrames:
    """Makes the text side of each turn. ``tokenizer`` is speech's own from here on, see :func:`prepare_tokenizer`."""

    def __init__(self, tokenizer: Tokenizer, pacing: Pacing, pad: int, eos: int, options: SpeechOptions) -> None:
        prepare_tokenizer(tokenizer)
        self.pacing = pacing
        self.pad = pad
        special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._arguments = (tokenizer, pacing, ControlIds(pad, eos, frozenset(special | {pad, eos})), options)

    def __call__(self) -> FrameText:
        return FrameText(*self._arguments)
