"""A running pipeline: starts the actors on a checkpoint, opens sessions, stops everything."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np

from vcpipe.actors.checkpoint import geometry, load_tokenizer, read_config
from vcpipe.actors.entry import ActorConfig
from vcpipe.actors.speech.frames import TextFrames
from vcpipe.actors.speech.pacing import Pacing
from vcpipe.actors.speech.turns import SpeechTurns
from vcpipe.actors.wire import StageEndpoints
from vcpipe.pipeline.clock import make_clock
from vcpipe.pipeline.coordinator import Coordinator
from vcpipe.pipeline.environment import actor_environment
from vcpipe.pipeline.process import ActorProcess, stop_all
from vcpipe.pipeline.runtime import ParentEndpoints, PipelineRuntime
from vcpipe.pipeline.session import SessionCommands, VoiceChatSession
from vcpipe.pipeline.speech import WINDOWED_REASON, PipeEngine, SpeechTrack
from vcpipe.pipeline.tap import TapPublisher
from vcpipe.pipeline.tracks import Deliver, Delivery, FrameTrack, OfflineResult, OfflineTrack
from vcpipe.pipeline.transcription import LiveTranscription, TranscriptionTrack
from vcpipe.pipeline.turn import T, Turn
from vcpipe.schemas.config import GenerateOptions, PipelineConfig, SessionOptions
from vcpipe.schemas.errors import ActorStartupError, ConfigError, PipelineClosedError, StageTimeoutError, VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.messages import OpenSession
from vcpipe.schemas.reports import Beat, Loading, Ready
from vcpipe.schemas.speech import SpeechOptions
from vcpipe.schemas.streaming import check_streaming_options

#: Longest path of a Unix socket on macOS; Linux allows four more.
_MAX_IPC_PATH = 103
#: Samples of one message of an offline run (1 s).
_OFFLINE_CHUNK = 16000

_log = logging.getLogger(__name__)

Listener = Callable[[str, Delivery], None]


class Pipeline:
    """The actors of one checkpoint. A context manager; leaving it stops every process, also after an exception.

    ``on_progress`` is called from another thread while the stages load. ``listener(session, delivery)`` sees everything
    that goes to any session, on the coordinator's thread (a trace, for instance). ``on_start`` is given the pipeline before its
    stages load, so that another thread can close it meanwhile.
    Raises ConfigError or ActorStartupError; then nothing was left running.
    """

    def __init__(
        self,
        config: PipelineConfig,
        on_progress: Callable[[Loading], None] = lambda loading: None,
        listener: Listener | None = None,
        modules: dict[str, str] | None = None,
        on_start: Callable[[Pipeline], None] = lambda pipeline: None,
    ) -> None:
        self.config = config
        self.checkpoint_config = read_config(config.checkpoint)
        self.geometry = geometry(self.checkpoint_config)
        self._listeners: list[Listener] = [] if listener is None else [listener]
        self._folder = tempfile.mkdtemp(prefix="vcpipe-")
        self._processes: list[ActorProcess] = []
        self._runtime: PipelineRuntime | None = None
        #: Held while processes are started and while they are stopped, so that another thread's close misses none.
        #: Reentrant: Ctrl-C's handler may close what this thread is closing.
        self._changing = threading.RLock()
        self._closed = False
        atexit.register(self.close)
        on_start(self)
        try:
            with self._changing:
                if self._closed:
                    raise PipelineClosedError("the pipeline was closed before it was started")
                self._start(on_progress, modules or {})
            self._wait_ready()
        except BaseException:
            self.close(graceful_s=0.0)
            raise

    # -- start

    def _start(self, on_progress: Callable[[Loading], None], modules: dict[str, str]) -> None:
        stages = self.config.stages
        endpoints = {name: self._endpoint(name) for name in self.config.pipe_names}
        data, control = ({stage: endpoints[f"{stage}.{pipe}"] for stage in stages} for pipe in ("in", "control"))
        self._coordinator = Coordinator()
        parent = ParentEndpoints(endpoints["reports"], data, control)
        self._runtime = PipelineRuntime(parent, self._coordinator, self.config.step_timeout_s, on_progress)
        if self.config.tap is not None:
            self._listeners.append(TapPublisher(self._runtime.context, self.config.tap).publish)
        environment = actor_environment()
        for stage, following in zip(stages, (*stages[1:], None), strict=True):
            data_out = None if following is None else endpoints[f"{following}.in"]
            stage_endpoints = StageEndpoints(
                endpoints[f"{stage}.in"], endpoints[f"{stage}.control"], endpoints["reports"], data_out
            )
            module = modules.get(stage, f"vcpipe.actors.{stage}.actor")
            actor = ActorConfig(
                stage=stage,
                module=module,
                checkpoint=str(self.config.checkpoint.resolve()),
                device=self.config.device,
                tts_history_frames=self.config.tts_history_frames if stage == "tts" else None,
                endpoints=stage_endpoints,
                ipc_folder=self._folder,
            )
            self._processes.append(ActorProcess(actor, environment, self._folder))
        self._runtime.start(self._processes)

    def _endpoint(self, name: str) -> str:
        """The user's endpoint for a pipe, else a socket file in the private folder."""
        if name in self.config.endpoints:
            return self.config.endpoints[name]
        path = f"{self._folder}/{name}"
        if len(path.encode()) > _MAX_IPC_PATH:
            raise ConfigError(
                f"the socket path {path} is longer than {_MAX_IPC_PATH} bytes; set TMPDIR to a shorter folder"
            )
        return f"ipc://{path}"

    def _wait_ready(self) -> None:
        assert self._runtime is not None
        deadline = time.monotonic() + self.config.startup_timeout_s
        while len(self._runtime.ready) < len(self.config.stages):
            try:
                said = self._runtime.ready_queue.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                missing = [stage for stage in self.config.stages if stage not in self._runtime.ready]
                raise ActorStartupError(
                    f"{', '.join(missing)} not ready after {self.config.startup_timeout_s:g} s"
                ) from None
            if isinstance(said, VcpipeError):
                raise said

    # -- facts

    @property
    def ready(self) -> dict[str, Ready]:
        """What each stage said when it was ready."""
        assert self._runtime is not None
        return dict(self._runtime.ready)

    @property
    def beats(self) -> dict[str, Beat]:
        """The latest heartbeat of each stage: memory, open sessions."""
        assert self._runtime is not None
        return dict(self._runtime.beats)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by stage."""
        return {process.stage: process.pid for process in self._processes}

    @property
    def failure(self) -> VcpipeError | None:
        """What ended the pipeline, None while it is whole."""
        return None if self._runtime is None else self._runtime.failure

    @property
    def dead_stages(self) -> list[str]:
        """Stages whose process has ended."""
        return [process.stage for process in self._processes if process.wait(0.0) is not None]

    @property
    def warnings(self) -> list[str]:
        """What the stages found odd about the checkpoint; each line names its stage."""
        return [line for ready in self.ready.values() for line in ready.warnings]

    # -- sessions

    def open_session(self, options: SessionOptions | None = None, **fields: Any) -> VoiceChatSession:
        """Open a streaming session; give a SessionOptions or its fields.

        Returns once every stage holds it, system prompt included.
        """
        options = SessionOptions(**fields) if options is None else options
        session_id = _new_id()
        deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        deliver = self._deliverer(session_id, deliveries)
        clock = make_clock(options.clock, self.geometry.frame_ns)
        track = FrameTrack(session_id, self.geometry, self.config.stages, self.config.window, clock, deliver)
        request = OpenSession(
            system_prompt=options.system_prompt,
            seed=options.seed,
            use_language_cache=options.use_language_cache,
            use_perception_cache=options.use_perception_cache,
            prompt_codes=self._prompt_codes(),
            route=self.config.stages,
        )
        self._submit(lambda: self._coordinator.open(session_id, request, track, deliver))
        commands = SessionCommands(self._submit, self._coordinator)
        session = VoiceChatSession(
            session_id, options, self.geometry, clock, track, deliveries, commands, self.config.step_timeout_s
        )
        try:
            session.wait_opened(self.config.startup_timeout_s)
        except BaseException:
            # Also after Ctrl-C or a timeout: nobody would ever close it.
            with contextlib.suppress(VcpipeError):
                commands.cancel(session_id)
            raise
        return session

    def open_transcription(
        self,
        *,
        temperature: float = 0.0,
        language: str | None = None,
        transcription_delay_ms: int | None = None,
        tail_s: float = 0.0,
    ) -> LiveTranscription:
        """Open a live transcription. Of the stages, perception alone hears of it; returns once that holds it.

        ``tail_s``: seconds of silence that are heard after what was fed (see ``TAIL_SILENCE_S``); none where nothing was.
        ValueError for options the model lacks (see :func:`check_streaming_options`), ConfigError for a pipeline without
        perception, VcpipeError where the checkpoint cannot transcribe.
        """
        check_streaming_options(temperature, language, transcription_delay_ms)
        request = OpenSession(task="transcription", route=self._route("transcription", "perception"))
        clock = make_clock("file", self.geometry.frame_ns)
        first_chunk = self.checkpoint_config["audio_config"]["preprocessor"]["n_fft"] // 2

        def make_track(session_id: str, deliver: Deliver) -> TranscriptionTrack:
            return TranscriptionTrack(session_id, self.geometry, request.route, self.config.window, clock, deliver)

        return LiveTranscription(
            lambda: self._open_turn(request, make_track),
            SessionCommands(self._submit, self._coordinator),
            self.geometry,
            first_chunk,
            self.config.step_timeout_s,
            tail_s,
        )

    def open_speech(self, options: SpeechOptions | None = None, **fields: Any) -> SpeechTurns:
        """Open speech turns; give a SpeechOptions or its fields. Of the stages, tts and codec alone hear of them.

        Raises ValueError for options the model lacks, with the reason; ConfigError for a pipeline without these stages, for a
        checkpoint's odd pacing and for a tokenizer that cannot encode text piece by piece.
        """
        options = SpeechOptions.of(**fields) if options is None else options
        if options.overlap_frames:
            raise ValueError(WINDOWED_REASON)
        route = self._route("speech", "tts", "codec")
        pacing = Pacing.from_config(self.checkpoint_config)
        pad, eos = self.checkpoint_config["pad_token_id"], self.checkpoint_config["eos_token_id"]
        text = TextFrames(self._speech_tokenizer, pacing, pad, eos, options)
        clock = make_clock("file", self.geometry.frame_ns)

        def make_track(session_id: str, deliver: Deliver) -> SpeechTrack:
            return SpeechTrack(session_id, self.geometry, route, self.config.window, clock, deliver)

        def open_turn(seed: int) -> Turn[SpeechTrack]:
            codes = self._prompt_codes()
            request = OpenSession(seed=seed, prompt_positions=1, prompt_codes=codes, route=route, task="speech")
            return self._open_turn(request, make_track)

        commands = SessionCommands(self._submit, self._coordinator)
        engine = PipeEngine(open_turn, commands, self.config.window, self.config.step_timeout_s)
        return SpeechTurns(engine, text, options)

    @cached_property
    def _speech_tokenizer(self) -> Any:
        """Loaded once: a large one takes as long as the first words."""
        return load_tokenizer(self.config.checkpoint)

    def _route(self, task: str, *stages: str) -> tuple[str, ...]:
        """The stages of a session for ``task``. ConfigError where the pipeline was started without one of them."""
        if missing := [stage for stage in stages if stage not in self.config.stages]:
            running = ", ".join(self.config.stages)
            raise ConfigError(f"{task} needs the stage {missing[0]}; this pipeline was started with {running}")
        return stages

    def _open_turn(self, request: OpenSession, make_track: Callable[[str, Deliver], T]) -> Turn[T]:
        """A session that every stage of its route holds."""
        session_id = _new_id()
        deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        deliver = self._deliverer(session_id, deliveries)
        turn = Turn(session_id, make_track(session_id, deliver), deliveries)
        self._submit(lambda: self._coordinator.open(session_id, request, turn.track, deliver))
        try:
            turn.wait_opened(self.config.startup_timeout_s)
        except BaseException:
            # Also after Ctrl-C or a timeout: nobody would ever close it.
            with contextlib.suppress(VcpipeError):
                self._submit(lambda: self._coordinator.cancel(session_id))
            raise
        return turn

    def generate(
        self,
        samples: Any,
        options: GenerateOptions | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> OfflineResult:
        """Run the model over a whole 16 kHz mono waveform, (n,) float32 in [-1, 1], n >= 172.

        Perception sees the whole waveform at once, the codec decodes all frames at once. ``on_event`` gets the text events
        as they come. Raises ValueError for a waveform of
        another rank, VcpipeError where a stage refuses it.
        """
        options = GenerateOptions() if options is None else options
        pcm = np.asarray(samples, np.float32).squeeze()
        if pcm.ndim != 1 or not np.isfinite(pcm).all():
            raise ValueError(f"the waveform must be mono and finite, got shape {np.shape(samples)}")
        silence = round(options.extra_decoding_seconds * self.geometry.input_sample_rate)
        pcm = np.concatenate([pcm, np.zeros(silence, np.float32)])
        session_id = _new_id()
        deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        deliver = self._deliverer(session_id, deliveries)
        track = OfflineTrack(self.geometry, deliver)
        request = OpenSession(
            offline=True,
            system_prompt=options.system_prompt,
            seed=options.seed,
            use_language_cache=options.use_language_cache,
            max_frames=options.max_frames,
            prompt_codes=self._prompt_codes(),
            route=self.config.stages,
        )
        chunks = [pcm[start : start + _OFFLINE_CHUNK] for start in range(0, len(pcm), _OFFLINE_CHUNK)]
        self._submit(lambda: self._coordinator.open(session_id, request, track, deliver))
        self._submit(lambda: self._coordinator.feed(session_id, chunks))
        self._submit(lambda: self._coordinator.finish(session_id))
        try:
            return self._offline_result(deliveries, track, on_event)
        except BaseException:
            with contextlib.suppress(VcpipeError):
                self._submit(lambda: self._coordinator.cancel(session_id))
            raise

    def _offline_result(
        self, deliveries: queue.SimpleQueue[Delivery], track: OfflineTrack, on_event: Callable[[Event], None]
    ) -> OfflineResult:
        """Wait as long as the stages make progress."""
        result: Delivery | None = None
        progress = -1
        while True:
            try:
                delivery = deliveries.get(timeout=self.config.step_timeout_s)
            except queue.Empty:
                if track.progress == progress:
                    raise StageTimeoutError(f"no progress within {self.config.step_timeout_s:g} s") from None
                progress = track.progress
                continue
            if isinstance(delivery, VcpipeError):
                raise delivery
            if isinstance(delivery, Event):
                on_event(delivery)
            if isinstance(delivery, OfflineResult):
                result = delivery
            if delivery == "ended" and isinstance(result, OfflineResult):
                return result

    def _prompt_codes(self) -> np.ndarray | None:
        assert self._runtime is not None
        codec = self._runtime.ready.get("codec")
        return None if codec is None else codec.prompt_codes

    def _deliverer(self, session: str, deliveries: queue.SimpleQueue[Delivery]) -> Callable[[Delivery], None]:
        def deliver(delivery: Delivery) -> None:
            deliveries.put(delivery)
            for listener in list(self._listeners):
                self._tell(listener, session, delivery)

        return deliver

    def _tell(self, listener: Listener, session: str, delivery: Delivery) -> None:
        """A listener that fails (a trace on a full disk) is left out from then on; the sessions go on."""
        try:
            listener(session, delivery)
        except Exception as error:
            self._listeners.remove(listener)
            _log.warning("a listener failed and is dropped: %s: %s", type(error).__name__, error)

    def _submit(self, call: Callable[[], None]) -> None:
        assert self._runtime is not None
        self._runtime.submit(call)

    # -- stop

    def close(self, graceful_s: float = 5.0) -> None:
        """Stop every process (asked first, then SIGTERM, then SIGKILL, each bounded) and remove the sockets. Idempotent."""
        with self._changing:
            if not self._closed:
                self._closed = True
                self._stop(graceful_s)

    def _stop(self, graceful_s: float) -> None:
        atexit.unregister(self.close)
        if self._runtime is not None:
            self._runtime.request_shutdown()
        stop_all(self._processes, graceful_s)
        if self._runtime is not None:
            self._runtime.finish()
        for process in self._processes:
            process.release()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception, Ctrl-C among them, nobody waits for a stage to finish a long step.
        self.close(graceful_s=5.0 if error is None else 2.0)


def _new_id() -> str:
    return f"sess_{uuid.uuid4().hex[:16]}"
