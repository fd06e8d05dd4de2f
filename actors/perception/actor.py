"""The perception stage: PCM in; projected encoder frames to the language stage, transcript to the coordinator."""

from __future__ import annotations

from collections import deque

import mlx.core as mx
import numpy as np

from vcpipe.actors.checkpoint import read_config
from vcpipe.actors.perception.cache import EncoderStream, encode_whole
from vcpipe.actors.perception.config import PerceptionConfig
from vcpipe.actors.perception.mel import LogMel, MelStream
from vcpipe.actors.perception.networks import KERNELS, NAMES, PerceptionNetworks
from vcpipe.actors.perception.rnnt import GreedyDecoder, Recogniser
from vcpipe.actors.perception.transcript import PieceTable
from vcpipe.actors.stage import Emitter, Progress, StageConfig, StageSession
from vcpipe.actors.weights import WeightLoader, load_stage
from vcpipe.schemas.errors import ConfigError, FrameContractError
from vcpipe.schemas.messages import OpenSession, PcmFrame, Projected
from vcpipe.schemas.reports import Transcript

#: Until the window of the subsampling is full, every frame has shapes of its own: mel frames 1, 9, 17, then 25 for ever.
_WARM_UP_FRAMES = 5


class PerceptionStage:
    """The perception networks with their weights; see :func:`load`."""

    name = "perception"

    def __init__(self, config: PerceptionConfig, networks: PerceptionNetworks, warnings: list[str]) -> None:
        self.config = config
        self.networks = networks
        self.warnings = warnings
        self.log_mel = LogMel(config.mel)
        self.pieces = PieceTable(config.rnnt.pieces)
        self._positions = networks.perception.encoder.project_positions(1)
        mx.eval(self._positions)

    @property
    def prompt_codes(self) -> None:
        """None: only the codec has them."""
        return None

    def warm_up(self) -> None:
        """Step a throw-away session over quiet noise until every shape was seen."""
        noise = np.random.default_rng(0).normal(0, 1e-3, self.config.frame_samples).astype(np.float32)
        perceive, decoder = CachedPerception(self), self.open_decoder()
        for _ in range(_WARM_UP_FRAMES):
            _, encoded = perceive(noise)
            decoder.step(encoded)

    def open(self, request: OpenSession) -> tuple[StageSession, OpenSession]:
        """A session that works frame by frame or, offline, on everything at its end. ConfigError for ``max_frames`` < 2."""
        if request.offline:
            return OfflineSession(self, request.max_frames), request
        perceive = CachedPerception(self) if request.use_perception_cache else WindowPerception(self)
        return StreamingSession(self, perceive), request

    def open_mel(self, *, lookahead_samples: int | None = None) -> MelStream:
        """Log-mel state of a new stream."""
        return MelStream(self.log_mel, lookahead_samples=lookahead_samples)

    def open_encoder(self) -> EncoderStream:
        """Encoder state of a new stream, one frame at a time."""
        return EncoderStream(self.networks.perception.encoder, positions=self._positions)

    def open_decoder(self) -> GreedyDecoder:
        """RNN-T state of a new stream."""
        return GreedyDecoder(self.networks.rnnt_decoder, self.networks.rnnt_joint, self.config.rnnt)

    def open_recogniser(self) -> Recogniser | None:
        """Transcript of a new stream; None where the checkpoint does not say what the pieces spell."""
        return Recogniser(self.open_decoder(), self.pieces) if self.config.rnnt.pieces else None

    def perceive_whole(self, samples: np.ndarray) -> tuple[mx.array, mx.array]:
        """(n,) float32 -> projected (1, T, output_dim) and encoded (1, T, d_model), to be evaluated.

        AudioInputError for a waveform that is too short.
        """
        encoded = encode_whole(self.networks.perception.encoder, self.log_mel.whole(samples))
        return self.networks.perception.proj(encoded), encoded


class CachedPerception:
    """Frames of a session from the state of those before; constant work.

    A frame is heard one frame late: its centre is the beginning of the samples just pushed, which only then are its future.
    """

    def __init__(self, stage: PerceptionStage) -> None:
        self._proj = stage.networks.perception.proj
        self._mel = stage.open_mel(lookahead_samples=stage.config.frame_samples)
        self._encoder = stage.open_encoder()

    def __call__(self, samples: np.ndarray) -> tuple[mx.array, mx.array]:
        """One frame of samples -> projected (1, 1, output_dim) and encoded (1, 1, d_model), evaluated."""
        mel = self._mel.push(samples)  # (1, 1, features), later (1, 8, features)
        encoded = self._encoder.push(mel, emit_partial=True)
        projected = self._proj(encoded)
        mx.eval(projected, encoded, self._encoder.state)
        return projected, encoded

    @property
    def state_bytes(self) -> int:
        """What the session holds."""
        return self._encoder.nbytes + 4 * self._mel.buffered_samples


class WindowPerception:
    """Frames of a session from the last frames' samples alone, all recomputed for every frame: diagnostic, slow.

    Not equal to the cached way once the window is full: there the past reaches further, layer by layer.
    """

    def __init__(self, stage: PerceptionStage) -> None:
        self._stage = stage
        self._frames: deque[np.ndarray] = deque(maxlen=max(2, stage.config.encoder.left_context + 1))

    def __call__(self, samples: np.ndarray) -> tuple[mx.array, mx.array]:
        """As :meth:`CachedPerception.__call__`."""
        self._frames.append(samples.copy())  # a received array is a view of its message
        projected, encoded = self._stage.perceive_whole(np.concatenate(self._frames))
        # The last frame is centred on the end of the samples, so half of what it hears is a mirror image.
        projected, encoded = projected[:, -2:-1], encoded[:, -2:-1]
        mx.eval(projected, encoded)
        return projected, encoded


class StreamingSession:
    """One encoder frame for every frame of samples."""

    def __init__(self, stage: PerceptionStage, perceive: CachedPerception | WindowPerception) -> None:
        self._frame_samples = stage.config.frame_samples
        self._perceive = perceive
        self._recogniser = stage.open_recogniser()
        self._frames = 0

    def prefill(self) -> None:
        """Nothing comes before the first frame."""

    def step(self, message: PcmFrame, emit: Emitter) -> None:
        """Send the frame on, then recognise it. FrameContractError for another number of samples or encoder frames."""
        seen = message.samples.size
        if seen != self._frame_samples:
            raise FrameContractError(
                f"perception got {seen} samples for frame {self._frames}, expected {self._frame_samples}"
            )
        with emit.span("perception"):
            projected, encoded = self._perceive(message.samples)
        if encoded.shape[1] != 1:
            raise FrameContractError(
                f"perception encoded frame {self._frames} to {encoded.shape[1]} frames, expected exactly 1"
            )
        emit.send(Projected(np.array(projected)))
        self._frames += 1
        if self._recogniser is None:
            return
        with emit.span("rnnt"):
            delta = self._recogniser.step(encoded)
        if delta is not None:
            emit.report(Transcript(delta))

    def end(self, emit: Emitter) -> None:
        """Nothing is due: every frame of samples had its encoder frame."""


class OfflineSession:
    """Collects samples; at the end all encoder frames at once, one more than there are whole frames of samples."""

    def __init__(self, stage: PerceptionStage, max_frames: int | None) -> None:
        if max_frames is not None and max_frames < 2:
            raise ConfigError(f"max_frames must be at least 2, not {max_frames}")
        self._stage = stage
        self._max_frames = max_frames
        self._chunks: list[np.ndarray] = []

    def prefill(self) -> None:
        """Nothing comes before the first frame."""

    def step(self, message: PcmFrame, emit: Emitter) -> None:
        """Keep samples, any number."""
        self._chunks.append(message.samples.copy())  # a received array is a view of its message

    def end(self, emit: Emitter) -> None:
        """Send every frame, then report the transcript of all of them. AudioInputError for too few samples."""
        with emit.span("perception"):
            samples = np.concatenate([np.zeros(0, dtype=np.float32), *self._chunks])
            projected, encoded = self._stage.perceive_whole(samples)
            projected, encoded = projected[:, : self._max_frames], encoded[:, : self._max_frames]
            mx.eval(projected, encoded)
        for index, frame in enumerate(np.array(projected[0])):
            emit.send(Projected(frame[None, None]), frame_index=index)
        recogniser = self._stage.open_recogniser()
        if recogniser is None:
            return
        frames = encoded.shape[1]
        with emit.span("rnnt"):
            deltas = [recogniser.step(encoded[:, index : index + 1]) or "" for index in range(frames)]
        emit.report(Transcript("".join(deltas)), frame_index=frames - 1)


def load(config: StageConfig, progress: Progress, load_weights: WeightLoader = load_stage) -> PerceptionStage:
    """Read the encoder, the projection and the RNN-T of a checkpoint.

    ConfigError where the checkpoint's networks are of a kind that cannot stream; WeightsError where tensors do not fit.
    """
    perception_config = PerceptionConfig.from_dict(read_config(config.checkpoint))
    networks = PerceptionNetworks(perception_config)
    report = load_weights(
        networks,
        config.checkpoint,
        stage="perception",
        root="stt_model.",
        names=NAMES,
        kernels=KERNELS,
        progress=progress,
    )
    progress("preparing weights", 1.0)
    networks.prepare()
    return PerceptionStage(perception_config, networks, report.warnings)
