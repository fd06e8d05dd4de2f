"""The coordinator's thread: owns the sockets, the processes' ends and the :class:`Coordinator`, and nobody else touches them.

Other threads hand it calls with :meth:`PipelineRuntime.submit`; what comes back goes through each session's ``deliver``.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from vcpipe.actors.entry import EXIT_FAILED
from vcpipe.actors.wire import Sender, bind, new_context, receive
from vcpipe.pipeline.coordinator import Coordinator, Outgoing
from vcpipe.pipeline.process import ActorProcess, describe_exit
from vcpipe.schemas.control import Shutdown
from vcpipe.schemas.envelope import NO_FRAME, PROTOCOL
from vcpipe.schemas.errors import (
    ActorDiedError,
    ActorStartupError,
    ConfigError,
    PipelineClosedError,
    StageTimeoutError,
    VcpipeError,
)
from vcpipe.schemas.reports import REPORTS, Beat, Failed, Loading, Ready, Stopped

_MAX_WAIT_MS = 200
#: How long a process that closed its output may take to end. It is busy with nothing but that.
_EXIT_S = 5.0
#: How long the report of one that says so by its exit code may be under way, and what any other one said last.
_FAILED_S = 5.0
_LAST_WORDS_S = 0.2
#: How long the thread may take to end: longer than it waits for any of these.
_JOIN_S = 20.0

#: "data" or "control", and the stage it leads to.
Pipe = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ParentEndpoints:
    """``reports`` is bound here; each stage's ``data`` and ``control`` are connected to when first used."""

    reports: str
    data: dict[str, str]
    control: dict[str, str]


class PipelineRuntime:
    """Runs one pipeline's coordinator until it is stopped or a stage is lost."""

    def __init__(
        self,
        endpoints: ParentEndpoints,
        coordinator: Coordinator,
        step_timeout_s: float,
        on_progress: Callable[[Loading], None],
    ) -> None:
        self._endpoints = endpoints
        self._coordinator = coordinator
        self._step_timeout_s = step_timeout_s
        self._on_progress = on_progress
        self.context = new_context()
        self._reports = self.context.socket(zmq.PULL)
        try:
            bind(self._reports, endpoints.reports, "the pipeline")
        except ConfigError:
            self.context.destroy()
            raise
        self._senders: dict[Pipe, Sender] = {}
        self._pending: dict[Pipe, deque[Outgoing]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        #: No call comes after that of the shutdown. Reentrant: Ctrl-C's handler may submit in the middle of a submit.
        self._submitting = threading.RLock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._poller = zmq.Poller()
        self._poller.register(self._reports, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._processes: dict[int, ActorProcess] = {}
        self._stopping = False
        self._finished = False
        self.ready: dict[str, Ready] = {}
        self.beats: dict[str, Beat] = {}
        self.failure: VcpipeError | None = None
        self.ready_queue: queue.SimpleQueue[Ready | VcpipeError] = queue.SimpleQueue()
        self._failures: dict[str, Failed] = {}
        self._thread = threading.Thread(target=self._run, name="vcpipe-coordinator", daemon=True)

    # -- called by other threads

    def start(self, processes: list[ActorProcess]) -> None:
        """Watch the processes and begin."""
        for process in processes:
            self._processes[process.output_fd] = process
            self._poller.register(process.output_fd, zmq.POLLIN)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the coordinator's thread, in order. Raises what ended the pipeline, if it has ended."""
        with self._submitting:
            if self.failure is not None:
                raise self.failure
            if self._stopping:
                raise PipelineClosedError("the pipeline is closed; start another one")
            self._calls.append(call)
            self._wake()

    def request_shutdown(self) -> None:
        """Ask every stage to leave; from here on their ends are expected, and nobody waits for them to be ready."""
        self.ready_queue.put(PipelineClosedError("the pipeline was closed"))
        with self._submitting:
            self._stopping = True
            self._calls.append(self._send_shutdown)
            self._wake()

    def finish(self) -> None:
        """End the thread and close everything it owned. The processes must have ended."""
        self._finished = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self.context.destroy(linger=0)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._finished:
                self._turn()
            self._run_calls()  # the shutdown's, where the processes were quicker to end than this thread
        except Exception as error:
            self._lose(VcpipeError(f"the coordinator failed: {type(error).__name__}: {error}"))
            raise

    def _turn(self) -> None:
        wake_ns = self._coordinator.pump(time.monotonic_ns())
        self._flush_outgoing()
        for source, _ in self._poller.poll(self._wait_ms(wake_ns)):
            if source == self._wake_read:
                self._run_calls()
            elif source in self._processes:
                self._read_process(self._processes[source])
            else:
                self._take_report()

    def _wait_ms(self, wake_ns: int | None) -> int:
        if any(self._pending.values()):
            return 1
        if wake_ns is None:
            return _MAX_WAIT_MS
        # Rounded up, so that a wake in less than a millisecond is not a busy loop.
        return min(_MAX_WAIT_MS, max(0, -(-(wake_ns - time.monotonic_ns()) // 1_000_000)))

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._calls:
            self._calls.popleft()()

    def _take_report(self) -> None:
        header, report = receive(self._reports, REPORTS)
        if isinstance(report, Loading):
            self._on_progress(report)
        elif isinstance(report, Ready):
            self._stage_ready(report)
        elif isinstance(report, Beat):
            self._take_beat(report, header.sent_ns)
        elif isinstance(report, Failed):
            self._failures[report.stage] = report
        elif not isinstance(report, Stopped):
            self._coordinator.handle(header, report, time.monotonic_ns())

    def _stage_ready(self, report: Ready) -> None:
        if report.protocol != PROTOCOL:
            self._lose(ActorStartupError(f"{report.stage} speaks protocol {report.protocol}, this side {PROTOCOL}"))
            return
        self.ready[report.stage] = report
        self.ready_queue.put(report)

    # -- sending

    def _flush_outgoing(self) -> None:
        while self._coordinator.outgoing:
            outgoing = self._coordinator.outgoing.popleft()
            self._queue(outgoing)
        for pipe, pending in self._pending.items():
            while pending and self._try_send(pipe, pending[0]):
                pending.popleft()

    def _queue(self, outgoing: Outgoing) -> None:
        for stage in outgoing.stages:
            self._pending.setdefault((outgoing.pipe, stage), deque()).append(outgoing)

    def _try_send(self, pipe: Pipe, outgoing: Outgoing) -> bool:
        if pipe not in self._senders:
            name, stage = pipe
            endpoints = self._endpoints.data if name == "data" else self._endpoints.control
            self._senders[pipe] = Sender(self.context, endpoints[stage])
        message, session = outgoing.message, outgoing.session
        return self._senders[pipe].try_send(message, session, outgoing.epoch, outgoing.frame_index)

    def _send_shutdown(self) -> None:
        self._coordinator.fail_all(PipelineClosedError("the pipeline was closed"))
        stages = tuple(process.stage for process in self._processes.values())
        self._queue(Outgoing("control", stages, "", 0, NO_FRAME, Shutdown()))

    # -- watching

    def _read_process(self, process: ActorProcess) -> None:
        if process.read_output():
            return
        self._poller.unregister(process.output_fd)
        del self._processes[process.output_fd]
        if not self._stopping:
            self._lose_stage(process)

    def _lose_stage(self, process: ActorProcess) -> None:
        code = process.wait(_EXIT_S)
        self._drain_last_words(process.stage, _FAILED_S if code == EXIT_FAILED else _LAST_WORDS_S)
        failed = self._failures.get(process.stage)
        kind = ActorDiedError if process.stage in self.ready else ActorStartupError
        if failed is not None and failed.expected:
            self._lose(ConfigError(f"{process.stage}: {failed.error}"))
            return
        when = "while it was needed" if process.stage in self.ready else "while it was starting"
        message = f"{process.stage} ended {when} ({describe_exit(code)})"
        if failed is not None:
            message += f": {failed.error}\n{failed.traceback.strip()}"
        elif process.output_tail:
            message += f"; its last words:\n{process.output_tail}"
        self._lose(kind(message))

    def _drain_last_words(self, stage: str, timeout_s: float) -> None:
        """What is there is taken also where the time was over before anybody looked."""
        deadline = time.monotonic() + timeout_s
        while stage not in self._failures:
            if not self._reports.poll(max(int((deadline - time.monotonic()) * 1e3), 0)):
                return
            self._take_report()

    def _take_beat(self, beat: Beat, sent_ns: int) -> None:
        self.beats[beat.stage] = beat
        # By the time at which the stage said so: the step may have ended since.
        if beat.busy_since_ns and sent_ns - beat.busy_since_ns > self._step_timeout_s * 1e9 and not self._stopping:
            text = f"{beat.stage} has been in one step for more than {self._step_timeout_s:g} s"
            self._lose(StageTimeoutError(text))

    def _lose(self, error: VcpipeError) -> None:
        if self.failure is None:
            self.failure = error
            self._pending.clear()
            self.ready_queue.put(error)
            self._coordinator.fail_all(error)
