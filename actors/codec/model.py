"""The codec: 22.05 kHz waveform to 31 codes a frame and back, at once or frame by frame."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.codec.cache import StreamCache
from vcpipe.actors.codec.config import CodecConfig
from vcpipe.actors.codec.convnext import CausalConvNeXtBlock, DepthwiseConv
from vcpipe.actors.codec.decoder import AudioDecoder
from vcpipe.actors.codec.encoder import AudioEncoder
from vcpipe.actors.codec.frames import FrameLinear
from vcpipe.actors.codec.quantizer import ResidualQuantizer
from vcpipe.actors.codec.stft import InverseStft, polar_spectrum

#: Code frames a full decode computes at once: at 11B sizes a frame needs several MB of activations.
SEGMENT_FRAMES = 64


#: Key of the cache entry of the overlap-add: the last frames of the waveform, windowed.
_FRAMES = "frames"


class Codec(nn.Module):
    """Attribute names are those of the checkpoint. No state: a stream's belongs to its caller."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = AudioEncoder(config)
        self.decoder = AudioDecoder(config)
        self.prvq = ResidualQuantizer(config)
        self._inverse_stft = InverseStft(config.n_fft, config.hop_length)

    def prepare(self) -> None:
        """Bring the loaded weights into the form they run in. To be called once, before anything runs."""
        self.prvq.prepare()
        for module in self.modules():
            if isinstance(module, (FrameLinear, DepthwiseConv)):
                module.prepare()

    def empty_entries(self) -> dict[str, mx.array]:
        """Cache entries of a stream without codes so far, the same as none at all, but of the shapes they will have."""
        config, dtype = self.config, self.prvq.mus_list[0].dtype
        entries = {_FRAMES: mx.zeros((1, 2 * config.edge_frames, config.n_fft))}
        for block in self.decoder.layers:
            if isinstance(block, CausalConvNeXtBlock):
                entries[block.key] = mx.zeros((1, block.past_frames, block.channels), dtype)
        return entries

    def encode(self, waveform: mx.array) -> mx.array:
        """(B, samples) or (B, 1, samples) float32 -> codes (B, Q, samples // frame_samples)."""
        return self.prvq.encode(self.encoder(waveform))

    def decode(self, codes: mx.array, segment_frames: int = SEGMENT_FRAMES) -> mx.array:
        """Codes (B, Q, T) of a whole recording -> (B, 1, frame_samples * T) float32, evaluated.

        It is computed in segments, each with the exact past of its first frame, so memory does not grow with T beyond
        the waveform, and the result does not depend on ``segment_frames``.
        """
        config = self.config
        hop, edge = config.hop_length, config.edge_samples
        overlapping = config.n_fft // hop - 1
        if not codes.shape[-1]:
            raise ValueError("there are no codes to decode")
        cache = StreamCache()
        pieces: list[mx.array] = []
        past: list[mx.array] = []  # the spectrum frames before a segment's own that still overlap with it
        for start in range(0, codes.shape[-1], segment_frames):
            spectrum = self._spectrum(codes[..., start : start + segment_frames], cache)
            spectrum = mx.concatenate([*past, spectrum], axis=1)
            # Samples are complete up to the hop of the newest frame; the recording's own edges lie half a window outside.
            begin = hop * past[0].shape[1] if past else edge
            end = hop * spectrum.shape[1]
            if start + segment_frames >= codes.shape[-1]:
                end += edge
            pieces.append(self._inverse_stft(spectrum)[:, begin:end])
            past = [spectrum[:, -overlapping:]]
            mx.eval(pieces[-1], past, cache.entries)
        return mx.concatenate(pieces, axis=1)[:, None]

    def decode_step(
        self, codes: mx.array, entries: Mapping[str, mx.array], *, flush: bool = False
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """The next codes (B, Q, T) of a stream -> its next (B, 1, frame_samples * T) samples and its new cache entries.

        Pure: ``entries`` are those of the call before ({} at the start), and are left as they are. The stream is the full
        decode, 8 samples late, as a sample is complete only with the frame two hops after it. ``flush`` ends the
        stream: the call returns these 8 samples too, and no entries.
        """
        config = self.config
        half = config.edge_frames
        cache = StreamCache(entries)
        frames = self._inverse_stft.frames(self._spectrum(codes, cache, flush=flush))
        frames = cache.update(frames, _FRAMES, 2 * half, flush=flush)
        if flush:
            frames = mx.pad(frames, [(0, 0), (0, half), (0, 0)])
        waveform = self._inverse_stft.inner(frames)
        cut = half * config.hop_length - config.edge_samples
        return waveform[:, None, cut : waveform.shape[1] - cut], cache.entries

    def _spectrum(self, codes: mx.array, cache: StreamCache, *, flush: bool = False) -> mx.array:
        """(B, Q, T) -> (B, 441 T, 2 * bins): real parts, then imaginary parts."""
        return polar_spectrum(self.decoder(self.prvq.decode(codes), cache, flush=flush))

    def drop_encoder(self) -> None:
        """Free the encoder's weights; ``encode`` cannot be called any more."""
        self.pop("encoder")
