"""The codec stage: codes of a frame in, 1764 samples of speech out. Last stage, so nothing is passed on."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vcpipe.actors.checkpoint import geometry, read_config
from vcpipe.actors.codec.config import CodecConfig
from vcpipe.actors.codec.frames import on_gpu
from vcpipe.actors.codec.model import Codec
from vcpipe.actors.compiled import compiled
from vcpipe.actors.stage import Emitter, Progress, StageConfig
from vcpipe.actors.weights import WeightLoader, load_stage
from vcpipe.schemas.errors import FrameContractError
from vcpipe.schemas.geometry import FrameGeometry
from vcpipe.schemas.messages import Codes, OpenSession
from vcpipe.schemas.reports import AudioFrame

#: Frames of encoded silence that the speech decoder's prompt is made of: one more than the voice prompt has.
PROMPT_FRAMES = 38

#: Frames whose samples travel in one report of an offline run.
REPORT_FRAMES = 25

_NO_SAMPLES = np.zeros(0, dtype=np.float32)
_NO_CODES = np.zeros(0, dtype=np.int32)


class CodecWeights(nn.Module):
    """The stage's share of a checkpoint.

    ``control_codes``: values that stand for no sound. ``codec_silence_tokens``: (Q,) the codes that replace them.
    """

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.audio_codec = Codec(config)
        self.control_codes = mx.zeros((3,), dtype=mx.int32)
        self.codec_silence_tokens = mx.zeros((config.num_quantizers,), dtype=mx.int32)


class CodecStage:
    """The codec with its weights; see :func:`load`."""

    name = "codec"

    def __init__(self, weights: CodecWeights, frame_geometry: FrameGeometry, warnings: list[str]) -> None:
        self.codec: Codec = weights.audio_codec
        self.geometry = frame_geometry
        self.warnings = warnings
        self._control_codes = np.array(weights.control_codes, dtype=np.int32)
        self._silence_codes = np.array(weights.codec_silence_tokens, dtype=np.int32)
        self.codec.prepare()
        self._prompt_codes = _encode_silence(self.codec)
        self.codec.drop_encoder()
        # Not on a CPU: there MLX's own kernels are faster than the fused ones, which take a compiler half a minute.
        self._decode_step = compiled(self.codec.decode_step) if on_gpu() else self.codec.decode_step

    @property
    def prompt_codes(self) -> np.ndarray:
        """(38, Q) int32 codes of silence."""
        return self._prompt_codes

    def warm_up(self) -> None:
        """Decode one frame: no frame of any session has other shapes."""
        self.decode_frame(self._silence_codes, self.codec.empty_entries())

    def open(self, request: OpenSession) -> tuple[StreamingSession | OfflineSession, OpenSession]:
        """A session that decodes frame by frame or, offline, everything at its end."""
        return (OfflineSession(self) if request.offline else StreamingSession(self)), request

    def replace_control_codes(self, codes: np.ndarray, frame: int) -> np.ndarray:
        """(Q,) int32 codes as generated -> codes that can be decoded: control codes become silence.

        FrameContractError for another number of codes and for codes outside the codebooks.
        """
        if codes.shape != self._silence_codes.shape:
            raise FrameContractError(
                f"codec got {codes.size} codes for frame {frame}, expected {self._silence_codes.size}"
            )
        replaced = np.where(np.isin(codes, self._control_codes), self._silence_codes, codes)
        size = self.codec.config.codebook_size
        outside = np.flatnonzero((replaced < 0) | (replaced >= size))
        if outside.size:
            raise FrameContractError(
                f"codec got code {replaced[outside[0]]} in codebook {outside[0]} of frame {frame}, expected 0 to {size - 1}"
            )
        return replaced

    def decode_frame(self, codes: np.ndarray, entries: dict[str, mx.array]) -> tuple[np.ndarray, dict[str, mx.array]]:
        """One streaming step, evaluated: (Q,) codes and the cache entries before -> samples and the entries after."""
        samples, entries = self._decode_step(mx.array(codes[None, :, None]), entries)
        mx.eval(samples, entries)
        return np.array(samples[0, 0]), entries


class StreamingSession:
    """Speech of each frame as its codes arrive."""

    def __init__(self, stage: CodecStage) -> None:
        self._stage = stage
        self._entries = stage.codec.empty_entries()
        self._frames = 0

    def prefill(self) -> None:
        """Nothing comes before the first frame."""

    def step(self, message: Codes, emit: Emitter) -> None:
        """Decode one frame and report it. FrameContractError unless exactly one frame of samples comes out."""
        codes = self._stage.replace_control_codes(message.codes, self._frames)
        with emit.span("codec"):
            samples, self._entries = self._stage.decode_frame(codes, self._entries)
        expected = self._stage.geometry.output_samples
        if samples.shape != (expected,):
            raise FrameContractError(
                f"codec returned {samples.size} samples for frame {self._frames}, expected {expected}"
            )
        emit.report(AudioFrame(samples, codes))
        self._frames += 1

    def end(self, emit: Emitter) -> None:
        """Nothing is due: the codec's last 8 samples complete no frame and are not part of a stream."""


class OfflineSession:
    """Collects codes; at the end one decode of all frames, whose samples are exact also at both ends."""

    def __init__(self, stage: CodecStage) -> None:
        self._stage = stage
        self._codes: list[np.ndarray] = []

    def prefill(self) -> None:
        """Nothing comes before the first frame."""

    def step(self, message: Codes, emit: Emitter) -> None:
        """Keep the codes of a frame, report them without samples."""
        codes = self._stage.replace_control_codes(message.codes, len(self._codes))
        self._codes.append(codes)
        emit.report(AudioFrame(_NO_SAMPLES, codes))

    def end(self, emit: Emitter) -> None:
        """Report the waveform in pieces of whole frames, each under the index of its first frame."""
        if not self._codes:
            return
        frames = len(self._codes)
        with emit.span("codec"):
            codes = mx.array(np.stack(self._codes, axis=-1))[None]  # (1, Q, frames)
            samples = np.array(self._stage.codec.decode(codes)[0, 0])
        expected = frames * self._stage.geometry.output_samples
        if samples.shape != (expected,):
            raise FrameContractError(f"codec returned {samples.size} samples for {frames} frames, expected {expected}")
        for first in range(0, frames, REPORT_FRAMES):
            piece = samples.reshape(frames, -1)[first : first + REPORT_FRAMES].reshape(-1)
            emit.report(AudioFrame(piece, _NO_CODES), frame_index=first)


def load(config: StageConfig, progress: Progress, load_weights: WeightLoader = load_stage) -> CodecStage:
    """Read the codec of a checkpoint and encode the silent prompt with it.

    ConfigError for a config that is incomplete or whose codec is off the frame clock; WeightsError for tensors that do not fit.
    """
    checkpoint_config = read_config(config.checkpoint)
    codec_config = CodecConfig.from_dict(checkpoint_config["codec_config"])
    weights = CodecWeights(codec_config)
    report = load_weights(
        weights,
        config.checkpoint,
        stage="codec",
        root="tts_model.",
        names=("audio_codec.", "control_codes", "codec_silence_tokens"),
        kernels=_kernels(codec_config),
        progress=progress,
    )
    progress("encoding silence", 1.0)
    return CodecStage(weights, geometry(checkpoint_config), report.warnings)


def _kernels(config: CodecConfig) -> dict[str, str]:
    """Parameter pattern -> kind, for the tensors that may come in PyTorch's layout."""
    upsamplings = range(0, len(config.downsample_rates) * (config.blocks_per_stage + 1), config.blocks_per_stage + 1)
    transposed = {f"audio_codec.decoder.layers.{index}.weight": "conv_transpose1d" for index in upsamplings}
    return {**transposed, "audio_codec.*.weight": "conv1d"}


def _encode_silence(codec: Codec) -> np.ndarray:
    silence = mx.zeros((1, PROMPT_FRAMES * codec.config.frame_samples))
    codes = codec.encode(silence)  # (1, Q, 38)
    if codes.shape != (1, codec.config.num_quantizers, PROMPT_FRAMES):
        raise FrameContractError(f"codec encoded {PROMPT_FRAMES} frames of silence to codes of shape {codes.shape}")
    return np.array(codes[0].T).astype(np.int32)
