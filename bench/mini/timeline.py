"""Where things lie on the frame clock: a question, the words of its reply, the reply's sound, the end of the turn.

Language model and speech decoder are trained on the same layout. A frame is 80 ms: 1280 samples of the user's sound at 16 kHz,
1764 of the assistant's at 22.05 kHz. Encoder frame j is centred on sample 1280 j, so in frame j the network has heard little
more than what came before frame j began.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vcpipe.bench.mini.shape import EOS, PAD, SPEECH_DELAY
from vcpipe.bench.mini.tokens import TextTokens

FRAME_SECONDS = 0.08
USER_RATE, USER_FRAME = 16000, 1280
REPLY_RATE, REPLY_FRAME = 22050, 1764

#: Frames between a question's last sample and its reply's first text. It is always the same, so that the moment is learnt
#: sharply: a moment spread over many frames has no most likely frame, and greedy decoding would never begin.
REPLY_GAP = 4

#: Frames from the one in which a user begins to speak into a reply to the one that ends the reply.
CUT_DELAY = 3

#: A word as written in a reply, with start and end in seconds of the clip.
Word = tuple[str, float, float]


def first_frame(question_end: int) -> int:
    """Frame of a reply's first text, after a question whose last sample is followed by sample ``question_end`` (16 kHz)."""
    return -(-question_end // USER_FRAME) + REPLY_GAP


def reply_frames(samples: int) -> int:
    """Frames that a reply's sound of so many samples (22.05 kHz) touches."""
    return -(-samples // REPLY_FRAME)


def reply_tokens(words: Iterable[Word], tokens: TextTokens, first: int) -> list[tuple[int, int]]:
    """(frame, id) of a reply whose text begins in frame ``first``, frames rising.

    A word's first token stands in the frame in which the word starts, the others (signs, spelling) in the frames after it.
    Where a frame is taken, the next free one serves.
    """
    placed, free = [], first
    for word, start, _ in words:
        free = max(free, first + int(start / FRAME_SECONDS))
        for token in tokens.word(word):
            placed.append((free, token))
            free += 1
    return placed


@dataclass(frozen=True)
class Reply:
    """One reply on the clock.

    ``first``: the frame from which its words are placed; ``tokens``: (frame, id); ``end``: the frame of its EOS, the first
    after its sound; ``samples``: how much of the clip is heard before that; ``cut``: somebody interrupted it. Sound begins with
    frame ``sound``.
    """

    first: int
    tokens: tuple[tuple[int, int], ...]
    samples: int
    end: int
    cut: bool = False

    @classmethod
    def lay(cls, words: Iterable[Word], samples: int, tokens: TextTokens, first: int) -> Reply:
        """A whole reply; ``samples``: the clip's length at 22.05 kHz. A text longer than its sound puts EOS off."""
        placed = tuple(reply_tokens(words, tokens, first))
        end = first + SPEECH_DELAY + reply_frames(samples)
        return cls(first, placed, samples, max(end, placed[-1][0] + 1) if placed else end)

    @property
    def sound(self) -> int:
        return self.first + SPEECH_DELAY

    def moved(self, frames: int) -> Reply:
        """The same, ``frames`` later."""
        tokens = tuple((frame + frames, token) for frame, token in self.tokens)
        return replace(self, first=self.first + frames, tokens=tokens, end=self.end + frames)

    def interrupted(self, onset: int) -> Reply:
        """The same when a user begins to speak at sample ``onset`` (16 kHz) of the session."""
        end = onset // USER_FRAME + CUT_DELAY
        if end >= self.end:
            return self
        tokens = tuple((frame, token) for frame, token in self.tokens if frame < end)
        samples = min(self.samples, max(0, end - self.sound) * REPLY_FRAME)
        return replace(self, tokens=tokens, samples=samples, end=end, cut=True)


def text_frames(replies: Sequence[Reply], frames: int) -> np.ndarray:
    """The text channel of a session: (frames,) int64, PAD where nothing is said. Frames past the end are left out."""
    text = np.full(frames, PAD, np.int64)
    for reply in replies:
        for frame, token in (*reply.tokens, (reply.end, EOS)):
            if frame < frames:
                text[frame] = token
    return text
