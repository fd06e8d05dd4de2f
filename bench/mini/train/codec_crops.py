"""Pieces of recordings that the codec is trained on."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from vcpipe.bench.mini.sound import Clip

#: Code frames of a crop. The first few lack the past that encoder and decoder would see: no loss is taken of them.
FRAMES, CONTEXT = 16, 2


def is_dev(clip: Clip) -> bool:
    """About 3 % of the clips, by a hash of their names."""
    return hashlib.sha1(clip.id.encode()).digest()[0] < 8


class Crops:
    """Random crops of clips amid digital silence, all on the device.

    Half of them lie on the clip's own frame grid, as replies do. Some clips are cut off as an interruption does it, and some
    crops are silent throughout. Loudness varies by 3 dB either way.
    """

    _SILENT, _CUT, _FADE = 0.03, 0.05, 220

    def __init__(self, sound: Tensor, clips: list[Clip], frame: int) -> None:
        self._sound, self._frame = sound, frame
        self._offsets = torch.tensor([clip.offset for clip in clips], device=sound.device)
        self._lengths = torch.tensor([clip.samples for clip in clips], device=sound.device)
        self._weights = self._lengths + 0.2 * FRAMES * frame

    def batch(self, size: int) -> Tensor:
        """(size, FRAMES * frame) float32."""
        place, crop = self._sound.device, FRAMES * self._frame
        clip = torch.multinomial(self._weights, size, replacement=True)
        length, offset = self._lengths[clip], self._offsets[clip]
        chance = torch.rand(6, size, device=place)
        start = (-0.3 * crop + chance[0] * (length - 0.2 * crop)).long()
        start = torch.where(chance[1] < 0.5, start // self._frame * self._frame, start)
        index = start[:, None] + torch.arange(crop, device=place)  # (size, crop), from the clip's first sample
        sound = sound_at(self._sound, offset, length, index)
        end = (chance[2] * FRAMES).long() * self._frame
        fade = ((end[:, None] - torch.arange(crop, device=place)) / self._FADE).clamp(0, 1)
        sound = torch.where((chance[3] < self._CUT)[:, None], sound * fade, sound)
        gain = 10 ** ((chance[4] * 6 - 3) / 20) * (chance[5] >= self._SILENT)
        return (sound * gain[:, None]).clamp(-1, 1)


def sound_at(sound: Tensor, offsets: Tensor, lengths: Tensor, index: Tensor) -> Tensor:
    """Samples ``index`` (B, n) of clips at ``offsets`` (B,) of ``sound`` (int16): (B, n) float32, 0 outside of the clips."""
    inside = (index >= 0) & (index < lengths[:, None])
    return sound[offsets[:, None] + torch.where(inside, index, 0)].float() / 32768 * inside


def silent_frames(waveform: Tensor, frame: int) -> tuple[Tensor, Tensor]:
    """(B, T * frame) -> two (B, T) masks: frames of zeros, and those of them with such frames in all the past that counts."""
    zero = (waveform.unflatten(1, (-1, frame)) == 0).all(-1)
    before = torch.cat([torch.ones_like(zero[:, :2]), zero], dim=1)
    return zero, zero & before[:, 1:-1] & before[:, :-2]
