"""Speech on its way to the loudspeaker: a ring over frames from which a device takes as much as it likes, whenever it likes.

The network delivers frames of 80 ms with jitter; a device asks for blocks of its own size and cannot wait. Between them stands
a cushion: playing begins when so many frames wait, and begins anew so after an underrun. One that was late for good
(a network that stood still, clocks that drift apart) is caught up with by leaving out frames in which nothing is said.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from vcpipe.launch.talk.resample import Resampler

#: Samples below this (-50 dB) are silence: nobody hears them as speech, and no microphone picks them up from a loudspeaker.
SILENCE = 0.00316

#: Frames beyond the cushion from which on silent ones are left out.
_SPARE_FRAMES = 5

#: How long after the last audible sample the room and the device may still sound, in seconds.
_ECHO_S = 0.3

#: Most speech that may wait, in seconds. A server that keeps time never comes near.
_CAPACITY_S = 60


class Playback:
    """One writer and one device's callback, each on its own thread.

    ``rate``: of the speech, ``device_rate``: of the device, both in Hz; ``frame_samples``: of one frame at ``rate``;
    ``cushion_frames``: frames that wait before playing begins. ``on_drained``: called when all was played after
    :meth:`finish`, on either thread.

    ``underruns`` counts the times the device got silence because no speech was there, ``left_out`` the frames left out.
    """

    def __init__(
        self,
        rate: int,
        device_rate: float,
        frame_samples: int,
        cushion_frames: int = 3,
        on_drained: Callable[[], None] = lambda: None,
    ) -> None:
        self.underruns = 0
        self.left_out = 0
        self._on_drained = on_drained
        frame = round(frame_samples * device_rate / rate)
        self._frame = frame
        self._resampler = Resampler(rate, device_rate)
        self._cushion = max(1, cushion_frames * frame)
        self._spare = (cushion_frames + _SPARE_FRAMES) * frame
        self._echo = round(_ECHO_S * device_rate)
        self._ring = np.zeros(round(_CAPACITY_S * device_rate), np.float32)
        self._lock = threading.Lock()
        self._read = self._waiting = 0
        self._playing = self._finished = False
        self._since_audible = self._echo

    @property
    def waiting(self) -> int:
        """Samples that wait, at the device's rate."""
        return self._waiting

    @property
    def speaking(self) -> bool:
        """True while speech is heard, and until its echo has faded."""
        return self._since_audible < self._echo

    # -- the writer's side

    def write(self, samples: np.ndarray) -> None:
        """Append a frame of speech, (n,) float32."""
        late = self._waiting > self._spare
        full = self._waiting + 2 * self._frame > len(self._ring)
        if full or (late and np.abs(samples).max(initial=0.0) < SILENCE):
            self.left_out += 1
        else:
            self._append(self._resampler.push(samples))

    def finish(self) -> None:
        """Nothing more comes: what waits is played to its end, then ``on_drained`` is called."""
        self._append(self._resampler.finish())
        with self._lock:
            self._finished = True
            if not self._waiting:
                self._on_drained()

    def clear(self) -> None:
        """Drop what waits: the next block is silence."""
        with self._lock:
            self._resampler.clear()
            self._waiting = 0
            self._playing = False
            if self._finished:
                self._on_drained()

    def _append(self, samples: np.ndarray) -> None:
        size = len(self._ring)
        with self._lock:
            places = (self._read + self._waiting + np.arange(len(samples))) % size
            self._ring[places] = samples
            self._waiting += len(samples)

    # -- the device's side

    def fill(self, block: np.ndarray) -> None:
        """Write the next samples into ``block`` (n, channels), the same into every channel; silence where there are none."""
        with self._lock:
            samples = self._next(len(block))
        block[: len(samples)] = samples[:, np.newaxis]
        block[len(samples) :] = 0.0
        audible = np.flatnonzero(np.abs(samples) >= SILENCE)
        if len(audible):
            self._since_audible = len(block) - 1 - int(audible[-1])
        else:
            self._since_audible = min(self._since_audible + len(block), self._echo)

    def _next(self, wanted: int) -> np.ndarray:
        if not self._playing:
            self._playing = self._waiting >= self._cushion or (self._finished and self._waiting > 0)
            if not self._playing:
                return self._ring[:0]
        count = min(wanted, self._waiting)
        samples = self._ring[(self._read + np.arange(count)) % len(self._ring)]
        self._read = (self._read + count) % len(self._ring)
        self._waiting -= count
        if self._finished and not self._waiting:
            self._playing = False
            self._on_drained()
        elif count < wanted:
            self._playing = False
            self.underruns += 1
        return samples
