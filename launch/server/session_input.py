"""A session's input as its client sends it: what was taken, what the pipeline was given, where the limit lies."""

from __future__ import annotations

import numpy as np

from vcpipe.launch.server.pcm_buffer import PcmBuffer
from vcpipe.launch.server.protocol import ClientError, Commit
from vcpipe.pipeline.session import VoiceChatSession

#: Frames handed to the pipeline ahead of what came out; the rest waits here, where it can still be cleared.
_AHEAD_FRAMES = 32
#: Most seconds of PCM that wait.
MAX_WAITING_S = 600.0


class SessionInput:
    """Cuts a client's PCM into whole frames and hands them to the session. Never waits."""

    def __init__(self, session: VoiceChatSession) -> None:
        self._session = session
        self._frame_samples = session.geometry.frame_samples
        max_frames = session.options.max_frames(session.geometry.frame_duration_s)
        assert max_frames is not None
        self.max_frames = max_frames
        self._buffer = PcmBuffer()
        self._accepted = 0
        self._ended = False
        #: The client's commit, once it came.
        self.commit: Commit | None = None

    @property
    def frames_accepted(self) -> int:
        """Whole frames taken so far, given to the pipeline or not."""
        return self._accepted // self._frame_samples

    def is_worked_on(self, frames_out: int) -> bool:
        """Whether something is still to come out."""
        return self.commit is not None or self._session.frames_fed > frames_out

    def append(self, pcm: np.ndarray) -> bool:
        """Take (n,) samples; False: the frame that would pass the session's limit was refused, and what follows it.

        Raises ClientError where too much would wait; nothing was taken then.
        """
        if len(self._buffer) + len(pcm) > MAX_WAITING_S * self._session.geometry.input_sample_rate:
            text = f"more than {MAX_WAITING_S:g} s of audio would wait; nothing of this append was taken"
            raise ClientError("inference_error", text, param="audio")
        whole = self.max_frames * self._frame_samples
        if (self._accepted + len(pcm)) // self._frame_samples <= self.max_frames:
            self._buffer.put(pcm)
            self._accepted += len(pcm)
            return True
        self._buffer.put(pcm[: max(whole - self._accepted, 0)])
        # Samples that never made a frame are lost, as those beyond the limit are.
        self._buffer.drop_tail(max(self._accepted - whole, 0))
        self._accepted = whole
        return False

    def clear(self) -> None:
        """Forget what the pipeline was not given."""
        self._accepted -= self._buffer.clear()

    def feed(self, frames_out: int) -> bool:
        """Hand over whole frames while few are under way; after a commit the rest, and the end.

        False: the rest would have passed the session's limit and was dropped. Raises VcpipeError where the session has ended.
        """
        while True:
            room = _AHEAD_FRAMES - (self._session.frames_fed - frames_out)
            frames = min(room, len(self._buffer) // self._frame_samples)
            if frames <= 0:
                break
            self._session.feed(self._buffer.take(frames * self._frame_samples))
        if self.commit is None or self._ended or len(self._buffer) >= self._frame_samples:
            return True
        self._ended = True
        rest = self._buffer.take(self._frame_samples)
        fits = not self.commit.pad_partial or not len(rest) or self._session.frames_fed < self.max_frames
        if fits:
            self._session.feed(rest)
        self._session.end(self.commit.pad_partial)
        return fits

    def limit_error(self, event_id: str | None = None) -> ClientError:
        """What is told of audio beyond the limit."""
        seconds = self._session.options.max_streaming_seconds
        text = f"the session is limited to {seconds:g} s ({self.max_frames} frames); commit or cancel it"
        return ClientError("inference_error", text, event_id=event_id)
