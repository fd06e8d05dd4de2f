"""Training windows for the speech decoder, put together on the device from tables made once.

Every reply is encoded by the codec with several offsets of its sound inside the first frame, and again for every frame in which
it may be cut off. The codec's encoder sees less than two frames back, so the latents of a session are those of its replies, a
few frames of fading memory after each, and silence. A session then is a matter of numbers of frames in one long table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vcpipe.bench.mini.nets.codec import Codec
from vcpipe.bench.mini.nets.tts import code_sum
from vcpipe.bench.mini.shape import EOS, PAD, SPEECH_DELAY
from vcpipe.bench.mini.sound import Bank, Clip
from vcpipe.bench.mini.timeline import REPLY_FRAME, REPLY_RATE, Reply, Word
from vcpipe.bench.mini.tokens import TextTokens

#: Frames that the codec's encoder sees back and, therefore, frames in which a sound that has ended is still felt.
_MEMORY = 3

#: Samples over which an interrupted reply fades.
_FADE = 220

#: Waveforms encoded at once, in frames.
_CHUNK = 4096


# ------------------------------------------------------------------------------------------------ frames
@dataclass(frozen=True)
class Frames:
    """N frames: frame 0 is silence.

    ``latents`` (N, Z); ``known`` (N, K, Z): sums of the codebooks known before each pass; ``sums`` (N, Z): of all codebooks.
    ``own`` (N, Z): what the speech decoder last made of each frame, at first the same.
    """

    latents: Tensor
    known: Tensor
    sums: Tensor
    own: Tensor
    silence: Tensor

    @classmethod
    def of(cls, latents: Tensor, codec: Codec, books: Tensor, known: Sequence[int]) -> Frames:
        """Quantise ``latents`` (N, Z); sums are of ``books`` (Q, K, Z), the codec's as they are stored."""
        codes = torch.cat([codec.quantise(part[None])[0][0] for part in latents.split(16 * _CHUNK)])  # (N, Q)
        sums = code_sum(books, codes)
        parts = [code_sum(books[:count], codes[:, :count]) for count in known]
        return cls(latents, torch.stack(parts, dim=1), sums, sums.clone(), codes[0])


@dataclass(frozen=True)
class Replies:
    """V renderings of replies: every clip with every offset of its sound.

    ``text`` (V, L): ids from the frame of the first word on, EOS and then PAD at the end. ``sound_frames`` (V,): frames that
    the sound touches. ``first`` (V,): row of the first of them in the table of frames, where ``_MEMORY`` frames of silence
    follow. ``first_cut`` (V,): row of the first frame faded out for a cut in frame 1, with those after it; the next cut's
    follow; -1 where nothing is cut.
    ``ends`` (V,): frame of the EOS. ``clips`` (V,): number of the clip.
    """

    text: Tensor
    ends: Tensor
    sound_frames: Tensor
    first: Tensor
    first_cut: Tensor
    clips: Tensor


class Renderer:
    """Lays replies on the frame clock and encodes them.

    ``spelling``: share of the words that are spelled in single bytes, in all renderings but the first of a clip.
    """

    def __init__(self, bank: Bank, tokens: TextTokens, codec: Codec, rng: np.random.Generator, spelling: float) -> None:
        self._bank, self._codec, self._rng = bank, codec, rng
        self._tokens, self._spelling = _Spelling(tokens, rng), spelling
        self._device = codec.books.device
        self._latents: list[Tensor] = [self._silence()]
        self._rows = 1

    def latents(self) -> Tensor:
        """(N, Z) of all that was rendered, silence first."""
        return torch.cat(self._latents)

    def render(self, clips: Sequence[Clip], offsets: Sequence[int], cuts: int) -> Replies:
        """All ``clips`` with all ``offsets`` (samples); the first ``cuts`` offsets also with every cut."""
        replies, waves = [], []
        for clip in clips:
            sound = self._bank.cut(clip)
            for offset in offsets:
                self._tokens.share = self._spelling if offset != offsets[0] else 0.0
                words: list[Word] = [(w, s + offset / REPLY_RATE, e + offset / REPLY_RATE) for w, s, e in clip.words]
                replies.append(Reply.lay(words, len(sound) + offset, self._tokens, 0))
                waves.append(np.pad(sound, (offset, -(offset + len(sound)) % REPLY_FRAME)))
        counts = [len(wave) // REPLY_FRAME for wave in waves]
        first = self._add(waves, [count + _MEMORY for count in counts])
        # What a cut leaves: the frames before it, the frame that fades out, and silence.
        is_cut = [i % len(offsets) < cuts for i in range(len(waves))]
        pieces = [piece for wave, wanted in zip(waves, is_cut, strict=True) if wanted for piece in _cut_pieces(wave)]
        rows = iter(self._add(pieces, [2 * _MEMORY] * len(pieces), skip=_MEMORY))
        starts = []
        for count, wanted in zip(counts, is_cut, strict=True):
            of_reply = [next(rows) for _ in range(count - 1)] if wanted else []
            starts.append(of_reply[0] if of_reply else -1)
        text = np.full((len(replies), max(reply.end for reply in replies) + 1), PAD)
        for row, reply in zip(text, replies, strict=True):
            for frame, token in (*reply.tokens, (reply.end, EOS)):
                row[frame] = token
        numbers = [i for i in range(len(clips)) for _ in offsets]
        columns = (text, [reply.end for reply in replies], counts, first, starts, numbers)
        return Replies(*(torch.as_tensor(np.array(column), device=self._device) for column in columns))

    def _silence(self) -> Tensor:
        with torch.no_grad():
            return self._codec.encode(torch.zeros(1, 2 * _MEMORY * REPLY_FRAME, device=self._device))[0, -1:]

    def _add(self, waves: Sequence[np.ndarray], frames: Sequence[int], skip: int = 0) -> list[int]:
        """Encode ``waves``, made as long as so many ``frames``; -> the rows of their first frames after ``skip``."""
        order = sorted(range(len(waves)), key=lambda i: frames[i])
        rows = [0] * len(waves)
        while order:
            longest = frames[order[min(len(order), _CHUNK // frames[order[0]]) - 1]]
            now, order = order[: max(1, _CHUNK // longest)], order[max(1, _CHUNK // longest) :]
            longest = frames[now[-1]]
            padded = np.zeros((len(now), (_MEMORY + longest) * REPLY_FRAME), np.float32)
            for row, i in zip(padded, now, strict=True):
                row[_MEMORY * REPLY_FRAME : _MEMORY * REPLY_FRAME + len(waves[i])] = waves[i]
            with torch.no_grad():
                latents = self._codec.encode(torch.from_numpy(padded).to(self._device))[:, _MEMORY + skip :]
            for row, i in zip(latents, now, strict=True):
                rows[i] = self._rows
                self._latents.append(row[: frames[i] - skip])
                self._rows += frames[i] - skip
        return rows


class _Spelling(TextTokens):
    """The tokenizer, with a ``share`` of the words spelled in single bytes."""

    def __init__(self, tokens: TextTokens, rng: np.random.Generator) -> None:
        self.tokenizer, self.size = tokens.tokenizer, tokens.size
        self.share, self._rng = 0.0, rng
        self._id_of = tokens.tokenizer.get_vocab(with_added_tokens=True)

    def word(self, word: str) -> list[int]:
        whole, *signs = super().word(word)
        if self._rng.random() >= self.share:
            return [whole, *signs]
        return [*(self._id_of[letter] for letter in str(self.tokenizer.id_to_token(whole))), *signs]


def _cut_pieces(wave: np.ndarray) -> list[np.ndarray]:
    """For a cut in every frame of a reply but the first: ``_MEMORY`` frames before it and the frame that fades out."""
    before = np.pad(wave, (_MEMORY * REPLY_FRAME, 0))
    fade = np.zeros(REPLY_FRAME, np.float32)
    fade[:_FADE] = np.linspace(1, 0, _FADE)
    pieces = []
    for start in range(REPLY_FRAME, len(wave), REPLY_FRAME):
        piece = before[start : start + (_MEMORY + 1) * REPLY_FRAME].copy()
        piece[-REPLY_FRAME:] *= fade
        pieces.append(piece)
    return pieces


# ------------------------------------------------------------------------------------------------ windows
@dataclass(frozen=True)
class Window:
    """B sessions of T frames: text ids and numbers of frames, (B, T) each."""

    text: Tensor
    frames: Tensor


class Windows:
    """Draws sessions: silence, a reply, silence and so on; some replies are interrupted.

    ``weights`` (V,): how often a rendering is drawn.
    """

    def __init__(self, replies: Replies, weights: Tensor, length: int, *, interrupted: float, turns: int = 3) -> None:
        self._replies, self._up_to = replies, weights.float().cumsum(0)
        self._length, self._interrupted, self._turns = length, interrupted, turns

    def draw(self, batch: int) -> Window:
        """A batch of sessions."""
        device, shape = self._up_to.device, (batch, self._turns)
        drawn = torch.rand(shape, device=device) * self._up_to[-1]
        chosen = torch.searchsorted(self._up_to, drawn, right=True).clamp(max=len(self._up_to) - 1)
        gaps = (torch.rand(shape, device=device).square() * 40).long() + 4
        gaps[:, 0] = (torch.rand(batch, device=device) * 41).long()
        sound_frames = self._replies.sound_frames[chosen]
        can_cut = (self._replies.first_cut[chosen] >= 0) & (sound_frames > 1)
        cut = 1 + (torch.rand(shape, device=device) * (sound_frames - 1)).long().clamp(min=0)
        is_cut = can_cut & (torch.rand(shape, device=device) < self._interrupted)
        return self.lay(chosen, gaps, torch.where(is_cut, cut, -1))

    def lay(self, chosen: Tensor, gaps: Tensor, cuts: Tensor) -> Window:
        """Renderings (B, S), silent frames before each, and the sound frame in which each is cut, or -1."""
        replies = self._replies
        width = replies.text.shape[1]
        ends = torch.where(cuts >= 0, cuts + SPEECH_DELAY, replies.ends[chosen])
        lengths = gaps + ends + 1
        starts = lengths.cumsum(dim=1) - lengths + gaps  # (B, S)
        times = torch.arange(self._length, device=chosen.device)
        text = torch.full((len(chosen), self._length), PAD, device=chosen.device)
        frames = torch.zeros_like(text)
        for turn in range(chosen.shape[1]):
            which, start, end, cut = (column[:, turn, None] for column in (chosen, starts, ends, cuts))
            local = times - start  # (B, T)
            spoken = replies.text[which, local.clamp(0, width - 1)]
            spoken = torch.where(local == end, EOS, spoken)
            text = torch.where((local >= 0) & (local <= end), spoken, text)
            frames = torch.where(local >= SPEECH_DELAY, self._rows(which, local - SPEECH_DELAY, cut, frames), frames)
        return Window(text, frames)

    def _rows(self, which: Tensor, sound: Tensor, cut: Tensor, others: Tensor) -> Tensor:
        """Numbers of the frames ``sound`` of renderings, counted from the first with sound; ``others`` elsewhere."""
        replies = self._replies
        is_whole = (sound < replies.sound_frames[which] + _MEMORY) & ((cut < 0) | (sound < cut))
        after_cut = sound - cut
        is_cut = (cut >= 0) & (after_cut >= 0) & (after_cut < _MEMORY)
        faded = replies.first_cut[which] + _MEMORY * (cut - 1) + after_cut
        silent = torch.zeros_like(sound)
        rows = torch.where(is_whole, replies.first[which] + sound, torch.where(is_cut, faded, silent))
        return torch.where(sound >= 0, rows, others)
