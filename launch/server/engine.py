"""The one pipeline of a server: loads in the background, is watched, and starts anew for the next session when a stage died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from vcpipe.launch.server.metrics import Metrics
from vcpipe.launch.server.protocol import JsonObject, Timings
from vcpipe.pipeline.session import VoiceChatSession
from vcpipe.pipeline.tracks import Delivery, FrameTiming
from vcpipe.pipeline.transcription import LiveTranscription
from vcpipe.schemas.config import SessionOptions
from vcpipe.schemas.errors import PipelineClosedError, VcpipeError
from vcpipe.schemas.geometry import STAGES, FrameGeometry
from vcpipe.schemas.reports import Loading

_WATCH_INTERVAL_S = 0.2

_log = logging.getLogger(__name__)


class ServedPipeline(Protocol):
    """What a server asks of a pipeline; ``vcpipe.pipeline.pipeline.Pipeline`` is one."""

    geometry: FrameGeometry

    @property
    def failure(self) -> VcpipeError | None:
        """What ended it."""

    @property
    def dead_stages(self) -> list[str]:
        """Stages whose process has ended."""

    def open_session(self, options: SessionOptions) -> VoiceChatSession:
        """A session that every stage holds."""

    def open_transcription(self, *, tail_s: float) -> LiveTranscription:
        """A live transcription that perception holds, and hears so much silence after the end of each turn."""

    def close(self, graceful_s: float = ...) -> None:
        """Stop every process."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What an engine wants to hear of a pipeline that it starts; called on other threads."""

    on_progress: Callable[[Loading], None]
    listener: Callable[[str, Delivery], None]
    on_start: Callable[[Any], None]


Start = Callable[[Hooks], ServedPipeline]
State = Literal["loading", "ready", "failed", "closed"]


class Engine:
    """Owns the pipeline. For one event loop; ``start`` is called on a thread of its own and may take minutes.

    ``model``: the name under which the checkpoint is served. ``on_loaded`` is told of every end of a loading, with the error
    or None.
    """

    def __init__(
        self,
        start: Start,
        model: str,
        metrics: Metrics,
        on_progress: Callable[[Loading], None] = lambda loading: None,
        on_loaded: Callable[[VcpipeError | None], None] = lambda error: None,
    ) -> None:
        self.model = model
        self.state: State = "loading"
        self._start = start
        self._metrics = metrics
        self._on_progress = on_progress
        self._on_loaded = on_loaded
        self._progress: dict[str, Loading] = {}
        self._error: VcpipeError | None = None
        self._dead: list[str] = []
        self._pipeline: ServedPipeline | None = None
        self._starting: Any = None
        self._loaded = asyncio.Event()
        self._timings: dict[str, Callable[[FrameTiming], None]] = {}
        self._watcher: asyncio.Task[None] | None = None

    # -- life

    def load(self) -> None:
        """Begin to load; :meth:`pipeline` waits for the end."""
        self._loop = asyncio.get_running_loop()
        self.state, self._error, self._dead, self._progress = "loading", None, [], {}
        self._loaded = asyncio.Event()
        threading.Thread(target=self._load, name="vcpipe-loader", daemon=True).start()

    def _load(self) -> None:
        pipeline: ServedPipeline | None = None
        error: VcpipeError | None = None
        try:
            pipeline = self._start(Hooks(self._progressed, self._listen, self._started))
        except VcpipeError as caught:
            error = caught
        except Exception as caught:
            _log.exception("the pipeline could not be started")
            error = VcpipeError(f"the pipeline could not be started: {type(caught).__name__}: {caught}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._end_loading, pipeline, error)

    def _started(self, pipeline: Any) -> None:
        self._starting = pipeline
        if self.state == "closed":  # the close may have looked just before
            pipeline.close(0.0)

    def _progressed(self, loading: Loading) -> None:
        self._progress[loading.stage] = loading
        self._on_progress(loading)

    def _end_loading(self, pipeline: ServedPipeline | None, error: VcpipeError | None) -> None:
        if self.state == "closed":
            if pipeline is not None:
                pipeline.close()
            return
        self._pipeline, self._starting = pipeline, None
        if error is not None:
            self.state, self._error = "failed", error
        else:
            self.state = "ready"
            self._watcher = asyncio.ensure_future(self._watch())
        self._loaded.set()
        self._on_loaded(error)

    async def _watch(self) -> None:
        """Notice within a moment that a stage died; free what the others hold."""
        pipeline = self._pipeline
        assert pipeline is not None
        while pipeline.failure is None:
            await asyncio.sleep(_WATCH_INTERVAL_S)
        self._fail(pipeline)
        await asyncio.to_thread(pipeline.close)

    def _fail(self, pipeline: ServedPipeline) -> None:
        self.state, self._error, self._dead = "failed", pipeline.failure, pipeline.dead_stages
        self._pipeline = None
        _log.error("the pipeline failed: %s", self._error)

    async def pipeline(self) -> ServedPipeline:
        """The pipeline, once it is loaded; started anew if it was lost. Raises VcpipeError where it cannot be loaded."""
        if self._pipeline is not None and self._pipeline.failure is not None:
            await asyncio.sleep(2 * _WATCH_INTERVAL_S)  # the watcher is about to notice
        if self.state == "failed" and self._watcher is not None:
            if not self._watcher.done():
                await asyncio.wait([self._watcher])
            if self.state == "failed":
                self._metrics.restarted()
                self.load()
        await self._loaded.wait()
        if self._pipeline is None:
            raise self._error or PipelineClosedError("the server is being stopped")
        return self._pipeline

    async def close(self) -> None:
        """Stop every process, whatever they do."""
        loading, self.state = self.state == "loading", "closed"
        self._loaded.set()
        if self._watcher is not None:
            self._watcher.cancel()
        pipeline, self._pipeline = self._pipeline or self._starting, None
        if pipeline is not None:
            await asyncio.to_thread(pipeline.close, 0.0 if loading else 2.0)

    # -- what sessions get

    def watch_timings(self, session: str, take: Callable[[FrameTiming], None] | None) -> None:
        """Give ``take`` the timing of every frame of a session, on the event loop; None ends it."""
        if take is None:
            self._timings.pop(session, None)
        else:
            self._timings[session] = take

    def _listen(self, session: str, delivery: Delivery) -> None:
        if isinstance(delivery, FrameTiming):
            self._metrics.frame(Timings.of(delivery, FrameGeometry().frame_duration_s * 1e3))
            take = self._timings.get(session)
            if take is not None:
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(take, delivery)

    # -- what is told

    def health(self) -> JsonObject:
        """``status``: ready, loading, failed; and what each stage does."""
        stages: dict[str, JsonObject] = {}
        for stage in STAGES:
            loading = self._progress.get(stage)
            if self.state == "ready":
                stages[stage] = {"state": "ready"}
            elif stage in self._dead:
                stages[stage] = {"state": "dead"}
            elif self.state == "loading" and loading is not None:
                stages[stage] = {"state": "loading", "step": loading.step, "fraction": round(loading.fraction, 3)}
            else:
                stages[stage] = {"state": "loading" if self.state == "loading" else "stopped"}
        health: JsonObject = {"status": self.state, "model": self.model, "stages": stages}
        if self._error is not None:
            # The first line: what follows is a traceback, for the log.
            health["error"] = str(self._error).splitlines()[0]
            health["dead_stages"] = self._dead
        return health

    def stages_up(self) -> dict[str, bool]:
        """Stages that are ready."""
        return dict.fromkeys(STAGES, self.state == "ready")
