"""One session's frames on their way: what may be sent, what the stages said of it, what is delivered.

:class:`FrameTrack` is the frame clock of a streaming session, :class:`OfflineTrack` collects a run over a whole waveform.
Both check the frame contract and raise FrameContractError where a stage breaks it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from vcpipe.pipeline.clock import FrameClock
from vcpipe.schemas.envelope import Message
from vcpipe.schemas.errors import FrameContractError, VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry
from vcpipe.schemas.messages import PcmFrame, TextStep
from vcpipe.schemas.reports import AudioFrame, StageEnded, StageTiming, Tokens, Transcript

#: Frames whose events the reader has not taken before no further frames are sent (30 s).
MAX_UNREAD_FRAMES = 375
#: How often a reader that does not read is looked at.
_SLOW_READER_NS = 50_000_000


@dataclass(slots=True)
class FrameTiming:
    """One frame's way: when it was due, sent and released (monotonic ns), and each stage's StageTiming."""

    session: str
    frame_index: int
    due_ns: int
    sent_ns: int
    released_ns: int = 0
    stages: dict[str, StageTiming] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """Everything a run over a whole waveform gives; F frames.

    ``audio`` (F*1764,) float32 at ``sample_rate``; ``audio_codes`` (F, Q) int32; ``text_tokens`` and ``function_tokens`` F
    ids each; ``user_transcript`` is None where the checkpoint has no RNN-T vocabulary.
    """

    text: str
    audio: np.ndarray
    sample_rate: int
    text_tokens: list[int]
    audio_codes: np.ndarray
    function_tokens: list[int]
    user_transcript: str | None


#: What a session's reader receives. "opened": every stage has the session; "ended": every stage has freed it.
Delivery = Event | FrameTiming | OfflineResult | Literal["opened", "ended"] | VcpipeError
Deliver = Callable[[Delivery], None]


class Track(Protocol):
    """What the coordinator asks of a session's frames."""

    def feed(self, chunks: list[Any]) -> None:
        """Queue input: PCM, whole frames where streaming."""

    def next_message(self, now_ns: int) -> tuple[int, Message] | None:
        """Index and message of what may be sent to the first stage now; ``wake_ns`` tells when to ask again."""

    @property
    def wake_ns(self) -> int | None:
        """Time from which the next queued chunk may leave; None: not before something else happens."""

    @property
    def backlog(self) -> int:
        """Chunks queued."""

    def collect(self, frame_index: int, report: Any, now_ns: int) -> None:
        """Take a stage's report about a frame."""

    def check_ended(self, report: StageEnded) -> None:
        """A stage reached the end of the stream."""

    def finish(self) -> None:
        """Every stage reached the end of the stream: deliver the last word."""

    @property
    def frames_done(self) -> int:
        """Frames delivered."""


class FrameTrack:
    """Credit, clock and collector of a streaming session."""

    #: What a queued input leaves in.
    message: type[PcmFrame] | type[TextStep] = PcmFrame

    def __init__(
        self,
        session: str,
        geometry: FrameGeometry,
        stages: tuple[str, ...],
        window: int,
        clock: FrameClock,
        deliver: Deliver,
    ) -> None:
        self._session = session
        self._geometry = geometry
        self._window = window
        self._clock = clock
        self._deliver = deliver
        self._backlog: deque[Any] = deque()
        self._frames: dict[int, _Frame] = {}
        self._sent = 0
        self._reported = dict.fromkeys(stages, 0)
        self._texts = CumulativeTexts()
        self.frames_done = 0
        #: Frames whose events the reader has taken; written by the reader's thread alone.
        self.frames_taken = 0
        self.wake_ns: int | None = None

    @property
    def backlog(self) -> int:
        return len(self._backlog)

    def describe_wait(self) -> str:
        """What the oldest frame in flight waits for, in words. Any thread may ask."""
        if self._sent == self.frames_done:
            return "no frame is in flight"
        behind = [stage for stage, reported in self._reported.items() if reported <= self.frames_done]
        return f"frame {self.frames_done} waits for {', '.join(behind)}"

    def feed(self, chunks: list[np.ndarray]) -> None:
        self._backlog.extend(chunks)

    def next_message(self, now_ns: int) -> tuple[int, Message] | None:
        self.wake_ns = None
        if not self._backlog or self._sent - self.frames_done >= self._window:
            return None
        if self.frames_done - self.frames_taken >= MAX_UNREAD_FRAMES:
            self.wake_ns = now_ns + _SLOW_READER_NS
            return None
        due_ns = self._clock.due_ns(self._sent, now_ns)
        if due_ns is None or due_ns > now_ns:
            self.wake_ns = due_ns
            return None
        index = self._sent
        self._sent += 1
        self._frames[index] = _Frame(FrameTiming(self._session, index, due_ns, now_ns))
        return index, self.message(self._backlog.popleft())

    def collect(self, frame_index: int, report: Any, now_ns: int) -> None:
        frame = self._frames.get(frame_index)
        if frame is None:
            stage = report.stage if isinstance(report, StageTiming) else _RESULTS[type(report)][0]
            raise FrameContractError(f"{stage} sent {report.KIND} for frame {frame_index}, which is not in flight")
        if isinstance(report, StageTiming):
            self._stage_done(frame_index, frame, report)
            self._release(now_ns)
            return
        if isinstance(report, AudioFrame):
            self._check_audio(frame_index, report)
        stage, name = _RESULTS[type(report)]
        if getattr(frame, name) is not None:
            raise FrameContractError(f"{stage} returned {report.KIND} of frame {frame_index} twice")
        setattr(frame, name, report)

    def _check_audio(self, index: int, audio: AudioFrame) -> None:
        for what, seen, expected in (
            ("samples", len(audio.samples), self._geometry.output_samples),
            ("codes", len(audio.codes), self._geometry.codebooks),
        ):
            if seen != expected:
                raise FrameContractError(f"codec returned {seen} {what} for frame {index}, expected {expected}")

    def _stage_done(self, index: int, frame: _Frame, timing: StageTiming) -> None:
        expected = self._reported[timing.stage]
        if index != expected:
            raise FrameContractError(f"{timing.stage} reported frame {index}, expected frame {expected}")
        if timing.stage == "language" and frame.tokens is None:
            raise FrameContractError(f"language returned no ids for frame {index}, expected 2")
        if timing.stage == "codec" and frame.audio is None:
            expected = self._geometry.output_samples
            raise FrameContractError(f"codec returned no samples for frame {index}, expected {expected}")
        self._reported[timing.stage] = index + 1
        frame.timing.stages[timing.stage] = timing

    def _release(self, now_ns: int) -> None:
        """Deliver every frame that is complete and next in order."""
        while (frame := self._frames.get(self.frames_done)) is not None:
            if len(frame.timing.stages) < len(self._reported):
                return
            del self._frames[self.frames_done]
            self.frames_done += 1
            frame.timing.released_ns = now_ns
            for event in self._events(frame):
                self._deliver(event)
            self._deliver(frame.timing)

    def _events(self, frame: _Frame) -> list[Event]:
        index = frame.timing.frame_index
        events = []
        if frame.transcript is not None:
            events.append(self._texts.transcript_event(index, frame.transcript))
        if frame.tokens is not None:
            events += self._texts.token_events(index, frame.tokens)
        if frame.audio is not None:
            # Copies: the report's arrays are views of a received message.
            samples, codes = frame.audio.samples.copy(), frame.audio.codes.copy()
            rate = self._geometry.output_sample_rate
            events.append(Event("audio", index, samples=samples, sample_rate=rate, audio_codes=codes))
        return events

    def check_ended(self, report: StageEnded) -> None:
        if report.frames != self._sent:
            raise FrameContractError(f"{report.stage} stepped {report.frames} frames, expected {self._sent}")

    def finish(self) -> None:
        if self.frames_done != self._sent:
            raise FrameContractError(f"{self.frames_done} frames came out, expected {self._sent}")
        self._deliver(Event("done", self.frames_done))


@dataclass(slots=True)
class _Frame:
    """What is known of a frame in flight."""

    timing: FrameTiming
    transcript: Transcript | None = None
    tokens: Tokens | None = None
    audio: AudioFrame | None = None


#: Who sends a frame's results, and where they are kept in a :class:`_Frame`.
_RESULTS = {Transcript: ("perception", "transcript"), Tokens: ("language", "tokens"), AudioFrame: ("codec", "audio")}


class CumulativeTexts:
    """The texts so far, brought up to date by the stages' edits."""

    def __init__(self) -> None:
        self.transcript = ""
        self.text = ""
        self.function = ""

    def transcript_event(self, index: int, report: Transcript) -> Event:
        """Event of newly recognised words."""
        self.transcript += report.delta
        return Event("user_transcript_delta", index, delta=report.delta, text=self.transcript)

    def token_events(self, index: int, tokens: Tokens) -> list[Event]:
        """Events of the channels whose id is not a special one."""
        events = []
        if tokens.text_delta is not None:
            self.text = _edited(self.text, tokens.text_erase, tokens.text_append)
            events.append(Event("assistant_text_delta", index, tokens.text_id, tokens.text_delta, self.text))
        if tokens.function_delta is not None:
            self.function = _edited(self.function, tokens.function_erase, tokens.function_append)
            events.append(Event("function_delta", index, tokens.function_id, tokens.function_delta, self.function))
        return events


def _edited(text: str, erase: int, append: str) -> str:
    return (text[:-erase] if erase else text) + append


class OfflineTrack:
    """Collects a run over a whole waveform. It holds all of it: that is what the caller asked for.

    Text events are delivered as they come, the result at the end.
    """

    def __init__(self, geometry: FrameGeometry, deliver: Deliver) -> None:
        self._geometry = geometry
        self._deliver = deliver
        #: Rises with every report, so that a waiting caller can tell slow from stuck.
        self.progress = 0
        self._backlog: deque[np.ndarray] = deque()
        self._sent = 0
        self._texts = CumulativeTexts()
        self._has_transcript = False
        self._tokens: list[Tokens] = []
        self._codes: list[np.ndarray] = []
        self._audio: list[np.ndarray] = []
        self.wake_ns: int | None = None

    @property
    def backlog(self) -> int:
        return len(self._backlog)

    @property
    def frames_done(self) -> int:
        return len(self._codes)

    def feed(self, chunks: list[np.ndarray]) -> None:
        self._backlog.extend(chunks)

    def next_message(self, now_ns: int) -> tuple[int, Message] | None:
        if not self._backlog:
            return None
        self._sent += 1
        return self._sent - 1, PcmFrame(self._backlog.popleft())

    def collect(self, frame_index: int, report: Any, now_ns: int) -> None:
        self.progress += 1
        if isinstance(report, Transcript):
            self._has_transcript = True
            self._deliver(self._texts.transcript_event(frame_index, report))
        elif isinstance(report, Tokens):
            self._in_order("language", frame_index, len(self._tokens))
            self._tokens.append(report)
            for event in self._texts.token_events(frame_index, report):
                self._deliver(event)
        elif isinstance(report, AudioFrame) and len(report.codes):
            self._in_order("codec", frame_index, len(self._codes))
            self._codes.append(report.codes.copy())
        elif isinstance(report, AudioFrame):
            self._audio.append(report.samples.copy())

    def _in_order(self, stage: str, index: int, expected: int) -> None:
        if index != expected:
            raise FrameContractError(f"{stage} reported frame {index}, expected frame {expected}")

    def check_ended(self, report: StageEnded) -> None:
        """Nothing to compare yet: perception counts chunks, the others frames."""

    def finish(self) -> None:
        frames = len(self._tokens)
        audio = np.concatenate(self._audio) if self._audio else np.zeros(0, np.float32)
        if len(self._codes) != frames or len(audio) != frames * self._geometry.output_samples:
            raise FrameContractError(
                f"codec returned {len(self._codes)} frames of codes and {len(audio)} samples for {frames} frames, "
                f"expected {frames * self._geometry.output_samples} samples"
            )
        self._deliver(
            OfflineResult(
                text=self._texts.text,
                audio=audio,
                sample_rate=self._geometry.output_sample_rate,
                text_tokens=[t.text_id for t in self._tokens],
                audio_codes=np.stack(self._codes) if frames else np.zeros((0, self._geometry.codebooks), np.int32),
                function_tokens=[t.function_id for t in self._tokens],
                user_transcript=self._texts.transcript if self._has_transcript else None,
            )
        )
