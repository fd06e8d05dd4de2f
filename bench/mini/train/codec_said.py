"""Replies as the speech decoder says them: latents that the codec's decoder meets in use, beside the recordings.

Vocoders sound best when trained on what the acoustic model predicts while it is fed the truth (Tacotron 2, Shen et al. 2018).
Here too: what is drawn for a frame lies on the recording's own clock, so the recording stays the target. Its phases may differ
from those drawn; losses look at magnitudes, and discriminators at what sounds real.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vcpipe.bench.mini.nets.codec import Codec
from vcpipe.bench.mini.nets.tts import SpeechDecoder
from vcpipe.bench.mini.shape import SPEECH_DELAY
from vcpipe.bench.mini.sound import Bank, Clip
from vcpipe.bench.mini.tokens import TextTokens
from vcpipe.bench.mini.train.codec_crops import sound_at
from vcpipe.bench.mini.train.tts_data import Frames, Renderer, Window, Windows
from vcpipe.bench.mini.training import load_weights

#: Frames of silence in front of a reply: at least so many, and so many more at most.
_GAP, _MORE = 4, 20

#: Frames kept after the last text of the longest reply: longer than the codec's encoder remembers.
_AFTER = 6

#: Replies spoken at once.
_TOGETHER = 256


def load_speaker(run: Path, start: Path, codec: Codec) -> SpeechDecoder:
    """The speech decoder that training left in ``run``, ready to be asked. ValueError: it speaks in other codebooks."""
    config = json.loads((start / "config.json").read_text())["tts_config"]
    speaker = SpeechDecoder(config, TextTokens(start))
    load_weights(speaker, run)
    speaker.to(codec.books.device).eval().requires_grad_(False)
    if not torch.equal(speaker.tts_model.rvq_embs, codec.books.bfloat16().float()):
        raise ValueError(f"{run} was trained with other codebooks than those of the codec to be trained")
    silence = torch.zeros(1, 8 * codec.frame_samples, device=codec.books.device)
    speaker.set_codebooks(codec.books, codec.quantise(codec.encode(silence))[0][0, -1])
    return speaker


class SaidReplies:
    """Recordings, and what the speech decoder draws for each of their frames.

    All is drawn at the start: every clip with each of ``offsets`` (samples) of its sound in the first frame, ``times`` over.
    ``sound``: that of ``bank`` on the codec's device, int16.
    """

    def __init__(
        self,
        bank: Bank,
        sound: Tensor,
        clips: Sequence[Clip],
        codec: Codec,
        speaker: SpeechDecoder,
        tokens: TextTokens,
        *,
        offsets: Sequence[int],
        times: int,
    ) -> None:
        place = sound.device
        self._sound, self._frame = sound, codec.frame_samples
        renderer = Renderer(bank, tokens, codec, np.random.default_rng(0), spelling=0.0)
        self._replies = renderer.render(clips, offsets, cuts=0)
        self._length = self._replies.text.shape[1] + _AFTER
        sums = Frames.of(renderer.latents(), codec, codec.books, [0]).sums
        self._draws = torch.stack([self._drawn(speaker, sums) for _ in range(times)])  # (times, N, Z)
        everything = torch.arange(len(self._replies.clips), device=place)
        # (V, L): numbers of the frames from the first with sound on, silence after them.
        self._rows = self._sessions(everything, torch.zeros_like(everything)).frames[:, SPEECH_DELAY:]
        # Of every rendering: where its clip lies in the sound, how long it is, where it begins in its first frame.
        self._begins = torch.tensor([clip.offset for clip in clips for _ in offsets], device=place)
        self._samples = torch.tensor([clip.samples for clip in clips for _ in offsets], device=place)
        self._offsets = torch.tensor(list(offsets), device=place).repeat(len(clips))

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, size: int, frames: int) -> tuple[Tensor, Tensor]:
        """Random pieces of so many ``frames``, some of them partly silent: see :meth:`pieces`."""
        lengths = self._replies.sound_frames
        chosen = torch.multinomial(lengths + 0.2 * frames, size, replacement=True)
        chance = torch.rand(2, size, device=lengths.device)
        first = (-0.3 * frames + chance[0] * (lengths[chosen] - 0.2 * frames)).floor().long()
        return self.pieces(chosen, first, frames, (chance[1] * len(self._draws)).long())

    def pieces(self, chosen: Tensor, first: Tensor, frames: int, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Of renderings ``chosen`` (B,), so many ``frames`` from frame ``first`` (B,) of their sound on, and what was drawn.

        ``draw`` (B,): the number of the draw. -> recordings (B, frames * 1764) float32, latents (B, frames, Z).
        """
        counts = torch.arange(frames * self._frame, device=first.device)
        local = first[:, None] + counts[:frames]  # (B, frames)
        known = (local >= 0) & (local < self._rows.shape[1])
        rows = torch.where(known, self._rows[chosen[:, None], torch.where(known, local, 0)], 0)
        index = (first * self._frame - self._offsets[chosen])[:, None] + counts  # (B, samples)
        sound = sound_at(self._sound, self._begins[chosen], self._samples[chosen], index)
        return sound, self._draws[draw[:, None], rows]

    @torch.no_grad()
    def _drawn(self, speaker: SpeechDecoder, sums: Tensor) -> Tensor:
        """Code sums (N, Z) of all frames -> the speaker's, fed the true past: guided and drawn as in use."""
        drawn, model = sums.clone(), speaker.tts_model
        for chosen in torch.arange(len(self._replies.clips), device=sums.device).split(_TOGETHER):
            window = self._sessions(chosen, torch.randint(_GAP, _GAP + _MORE + 1, chosen.shape, device=sums.device))
            without_text = torch.arange(2 * len(chosen), device=sums.device) >= len(chosen)
            hidden = speaker(sums[window.frames].repeat(2, 1, 1), window.text.repeat(2, 1), without_text)
            heard = window.frames > 0
            guided, unconditional = (half[heard] for half in hidden.chunk(2))
            drawn[window.frames[heard]] = model.refine(guided, unconditional, model.draws(len(guided)))[1]
        return drawn

    def _sessions(self, chosen: Tensor, gaps: Tensor) -> Window:
        """Renderings (B,), each in a session of its own after so many frames of silence (B,)."""
        windows = Windows(self._replies, self._replies.clips.float(), self._length + int(gaps.max()), interrupted=0.0)
        return windows.lay(chosen[:, None], gaps[:, None], torch.full_like(chosen[:, None], -1))
