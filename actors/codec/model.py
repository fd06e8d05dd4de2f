"""The codec: 22.05 kHz waveform to 31 codes a frame and back, at once or frame by frame."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.codec.cache import StreamCache
from vcpipe.actors.codec.config import CodecConfig
from vcpipe.actors.codec.decoder import AudioDecoder
from vcpipe.actors.codec.encoder import AudioEncoder
from vcpipe.actors.codec.quantizer import ResidualQuantizer
from vcpipe.actors.codec.stft import inverse_stft

#: Code frames a full decode computes at once: at 11B sizes a frame needs several MB of activations.
SEGMENT_FRAMES = 64


class Codec(nn.Module):
    """Attribute names are those of the checkpoint. No state: a stream's belongs to its caller."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = AudioEncoder(config)
        self.decoder = AudioDecoder(config)
        self.prvq = ResidualQuantizer(config)

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
        past: list[mx.array] = []
        for start in range(0, codes.shape[-1], segment_frames):
            latents = self.prvq.decode(codes[..., start : start + segment_frames])
            spectrum = list(self.decoder(latents, cache))
            if past:
                spectrum = [mx.concatenate([old, new], axis=1) for old, new in zip(past, spectrum, strict=True)]
            # Samples are complete up to the hop of the newest frame; the recording's own edges lie half a window outside.
            begin = hop * past[0].shape[1] if past else edge
            end = hop * spectrum[0].shape[1]
            if start + segment_frames >= codes.shape[-1]:
                end += edge
            pieces.append(inverse_stft(spectrum[0], spectrum[1], config.n_fft, hop)[:, begin:end])
            past = [part[:, -overlapping:] for part in spectrum]
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
        real, imag = self.decoder(self.prvq.decode(codes), cache, flush=flush)
        real = cache.update(real, "istft_real", 2 * half, flush=flush)
        imag = cache.update(imag, "istft_imag", 2 * half, flush=flush)
        if flush:
            tail = [(0, 0), (0, half), (0, 0)]
            real, imag = mx.pad(real, tail), mx.pad(imag, tail)
        waveform = inverse_stft(real, imag, config.n_fft, config.hop_length)
        cut = config.edge_samples + half * config.hop_length
        return waveform[:, None, cut:-cut], cache.entries

    def drop_encoder(self) -> None:
        """Free the encoder's weights; ``encode`` cannot be called any more."""
        self.pop("encoder")
