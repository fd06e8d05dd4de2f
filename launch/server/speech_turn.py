"""One turn of speech as a client writes it: text in pieces, its end, perhaps a cancel. The voice takes it on its own thread."""

from __future__ import annotations

import secrets
import threading
from collections import deque

#: Most characters that are taken at once; between two pieces the voice looks at its frames.
_PIECE = 100


class SpokenTurn:
    """The client's side appends, ends and cancels and never waits; the voice's side takes."""

    def __init__(self, seed: int) -> None:
        self.id = f"turn_{secrets.token_hex(8)}"
        self.seed = seed
        #: Pieces that were appended.
        self.appends = 0
        #: Frames of sound that the client was given.
        self.frames = 0
        #: Whether the voice has nothing to do until text comes.
        self.resting = False
        self._pieces: deque[str] = deque()
        self._characters = 0
        self._ended = False
        self._cancelled = False
        self._changed = threading.Condition()

    @property
    def characters_waiting(self) -> int:
        """Characters that the voice has not taken yet."""
        return self._characters

    @property
    def ended(self) -> bool:
        """Whether no more text may be appended."""
        return self._ended

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants to hear the rest."""
        return self._cancelled

    def append(self, text: str) -> None:
        """More text, of any length."""
        with self._changed:
            self._pieces.extend(text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
            self._characters += len(text)
            self.appends += 1
            self._changed.notify()

    def end(self) -> None:
        """No more text."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def cancel(self) -> None:
        """Forget the text."""
        with self._changed:
            self._cancelled = True
            self._pieces.clear()
            self._characters = 0
            self._changed.notify()

    def take(self, timeout_s: float | None = 0.0) -> str | None:
        """A piece of text; "" where none came in time (None: wait for ever); None where none will come any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._ended or self._cancelled, timeout_s)
            if self._pieces:
                piece = self._pieces.popleft()
                self._characters -= len(piece)
                return piece
            return None if self._ended or self._cancelled else ""
