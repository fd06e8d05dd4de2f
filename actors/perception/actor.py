"""The perception stage: PCM in; projected encoder frames to the language stage, transcript to the coordinator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from vcpipe.actors.checkpoint import read_config
from vcpipe.actors.perception.cache import encode_whole
from vcpipe.actors.perception.config import PerceptionConfig
from vcpipe.actors.perception.live import CachedPerception, FrameStep, Perceiver, WindowPerception
from vcpipe.actors.perception.mel import LogMel
from vcpipe.actors.perception.networks import KERNELS, NAMES, PerceptionNetworks
from vcpipe.actors.perception.rnnt import Recogniser, Transducer
from vcpipe.actors.perception.transcript import PieceTable
from vcpipe.actors.perception.transcription import ActorTranscription, TranscriptionSession
from vcpipe.actors.stage import Emitter, Progress, StageConfig, StageSession
from vcpipe.actors.weights import WeightLoader, load_stage
from vcpipe.schemas.errors import ConfigError, FrameContractError
from vcpipe.schemas.messages import OpenSession, PcmFrame, Projected
from vcpipe.schemas.reports import Transcript
from vcpipe.schemas.streaming import check_streaming_options


class PerceptionStage:
    """The perception networks with their weights; see :func:`load`."""

    name = "perception"

    def __init__(self, config: PerceptionConfig, networks: PerceptionNetworks, warnings: list[str]) -> None:
        self.config = config
        self.warnings = warnings
        self.perception = networks.perception
        self.transducer = Transducer(networks.rnnt_decoder, networks.rnnt_joint, config.rnnt)
        self.log_mel = LogMel(config.mel)
        self.pieces = PieceTable(config.rnnt.pieces)
        self._step = FrameStep(config, self.log_mel, self.perception, self.transducer)

    @property
    def prompt_codes(self) -> None:
        """None: only the codec has them."""
        return None

    def warm_up(self) -> None:
        """Hear one frame and take one piece: no frame of any session has other shapes."""
        frame = np.zeros(self.config.frame_samples, np.float32)
        states, from_prediction = self.transducer.start
        from_frame, best = self.open_cached()(frame, from_prediction).scored
        mx.eval(self.transducer.advance(best, states, from_frame))

    def open(self, request: OpenSession) -> tuple[StageSession, OpenSession]:
        """A session that works frame by frame or, offline, on everything at its end, or a transcription.

        ConfigError for ``max_frames`` < 2, another task, and where :meth:`create_streaming_session` raises it.
        """
        if request.task == "transcription":
            config, session = self.config, self.create_streaming_session()
            return ActorTranscription(session, config.frame_samples, config.rnnt.max_symbols), request
        if request.task != "voice_chat":
            raise ConfigError(f"perception has no sessions for {request.task!r}; accepted: voice_chat, transcription")
        if request.offline:
            return OfflineSession(self, request.max_frames), request
        return StreamingSession(
            self, self.open_cached() if request.use_perception_cache else self.open_window()
        ), request

    def create_streaming_session(
        self, *, temperature: float = 0.0, language: str | None = None, transcription_delay_ms: int | None = None
    ) -> TranscriptionSession:
        """A live transcription of its own. ValueError for options the model lacks, see :func:`check_streaming_options`.

        ConfigError where the checkpoint does not say what the RNN-T's pieces spell.
        """
        check_streaming_options(temperature, language, transcription_delay_ms)
        if not self.transducer.config.pieces:
            raise ConfigError("the checkpoint has no rnnt_vocabulary: it cannot transcribe")
        return TranscriptionSession(self._step, self.transducer, self.pieces)

    def open_cached(self) -> CachedPerception:
        """Hearing of a new stream."""
        return CachedPerception(self._step)

    def open_window(self) -> WindowPerception:
        """Hearing of a new stream without a state but its last samples."""
        return WindowPerception(self.config, self.perceive_whole, self.transducer)

    def perceive_whole(self, samples: np.ndarray) -> tuple[mx.array, mx.array]:
        """(n,) float32 -> projected (1, T, output_dim) and encoded (1, T, d_model), to be evaluated.

        AudioInputError for a waveform that is too short.
        """
        encoded = encode_whole(self.perception.encoder, self.log_mel.whole(samples))
        return self.perception.proj(encoded), encoded


class StreamingSession:
    """One encoder frame for every frame of samples."""

    def __init__(self, stage: PerceptionStage, perceive: Perceiver) -> None:
        self._frame_samples = stage.config.frame_samples
        self._perceive = perceive
        self._recogniser = Recogniser(stage.transducer, stage.pieces)
        self._frames = 0

    def prefill(self) -> None:
        """Nothing comes before the first frame."""

    def step(self, message: PcmFrame, emit: Emitter) -> None:
        """Send the frame on, then recognise it. FrameContractError for another number of samples."""
        seen = message.samples.size
        if seen != self._frame_samples:
            raise FrameContractError(
                f"perception got {seen} samples for frame {self._frames}, expected {self._frame_samples}"
            )
        with emit.span("perception"):
            heard = self._perceive(message.samples, self._recogniser.from_prediction)
        emit.send(Projected(np.array(heard.projected)))
        self._frames += 1
        if not self._recogniser.knows_pieces:
            return
        with emit.span("rnnt"):
            delta = self._recogniser.step(heard.scored)
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
        recogniser = Recogniser(self._stage.transducer, self._stage.pieces)
        if not recogniser.knows_pieces:
            return
        with emit.span("rnnt"):
            deltas = [recogniser.recognise(frame[None]) or "" for frame in encoded[0]]
        emit.report(Transcript("".join(deltas)), frame_index=len(deltas) - 1)


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
