"""Speech turns in one process: the networks of tts and codec, stepped where the caller calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from vcpipe.actors.checkpoint import load_tokenizer, read_config
from vcpipe.actors.codec import actor as codec_actor
from vcpipe.actors.codec.actor import CodecStage
from vcpipe.actors.codec.windowed import WindowedDecoder
from vcpipe.actors.runtime import set_up
from vcpipe.actors.speech.frames import TextFrames
from vcpipe.actors.speech.pacing import Pacing
from vcpipe.actors.speech.turns import SpeechTurns
from vcpipe.actors.stage import Progress, StageConfig
from vcpipe.actors.tts import actor as tts_actor
from vcpipe.actors.tts.actor import TtsSession, TtsStage
from vcpipe.schemas.messages import OpenSession
from vcpipe.schemas.speech import SpeechChunk, SpeechOptions


def load_speech(
    checkpoint: Path,
    options: SpeechOptions | None = None,
    *,
    device: str | None = None,
    progress: Progress = lambda step, fraction: None,
) -> SpeechTurns:
    """Load tts and codec of a checkpoint folder into this process, for the calling thread.

    ``device``: "cpu", "gpu" or None for MLX's default. Raises ConfigError and WeightsError as the actors do.
    """
    config = StageConfig("tts", checkpoint, device)
    set_up(config)
    tts = tts_actor.load(config, progress)
    codec = codec_actor.load(StageConfig("codec", checkpoint, device), progress)
    tts.warm_up()
    codec.warm_up()
    return open_speech(tts, codec, checkpoint, options)


def open_speech(
    tts: TtsStage, codec: CodecStage, checkpoint: Path, options: SpeechOptions | None = None
) -> SpeechTurns:
    """Speech turns on stages that are loaded; ``checkpoint``: the folder they come from."""
    options = SpeechOptions() if options is None else options
    ids, pacing = tts.ids, Pacing.from_config(read_config(checkpoint))
    text = TextFrames(load_tokenizer(checkpoint), pacing, ids.pad, ids.eos, options)
    return SpeechTurns(LocalEngine(tts, codec, options), text, options)


class LocalEngine:
    """Makes frames in the thread that asks for them. See :class:`vcpipe.actors.speech.turns.SpeechEngine`."""

    def __init__(self, tts: TtsStage, codec: CodecStage, options: SpeechOptions) -> None:
        self._tts = tts
        self._codec = codec
        self._options = options
        self._ids: deque[int] = deque()
        self._made: deque[SpeechChunk] = deque()
        self._speech: TtsSession | None = None
        self._decoder: _StatefulDecoder | WindowedDecoder | None = None
        self._codes: deque[np.ndarray] = deque()
        self._frames = 0
        self._finished = False
        self._stopped = True

    @property
    def ahead(self) -> int:
        return self._options.chunk_frames if self._options.overlap_frames else 1

    def start(self, seed: int) -> None:
        request = OpenSession(
            seed=seed, prompt_positions=1, prompt_codes=self._codec.prompt_codes, route=("tts", "codec"), task="speech"
        )
        self._speech, _ = self._tts.open(request)
        self._speech.prefill()
        chunk, overlap = self._options.chunk_frames, self._options.overlap_frames
        self._decoder = WindowedDecoder(self._codec.codec, chunk, overlap) if overlap else _StatefulDecoder(self._codec)
        for waiting in (self._ids, self._made, self._codes):
            waiting.clear()
        self._frames = 0
        self._stopped = self._finished = False

    def queue(self, ids: Sequence[int]) -> None:
        self._ids.extend(ids)

    def take(self) -> list[SpeechChunk]:
        while self._ids and not self._stopped:
            self._step()
        made = list(self._made)
        self._made.clear()
        return made

    def wait(self) -> SpeechChunk | None:
        while not (self._made or self._stopped):
            if self._ids:
                self._step()
            else:
                assert self._finished and self._codes, "as many frames as `ahead` are queued, or none follow"
                self._deliver(self._decoding.flush())
        return None if self._stopped else self._made.popleft()

    def finish(self) -> None:
        self._finished = True

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self.stop()
        self._speech = self._decoder = None

    @property
    def _decoding(self) -> _StatefulDecoder | WindowedDecoder:
        assert self._decoder is not None, "start() comes first"
        return self._decoder

    def _step(self) -> None:
        """One text id through both networks."""
        assert self._speech is not None, "start() comes first"
        codes = self._tts.advance(self._speech.state, self._ids.popleft())
        codes = self._codec.replace_control_codes(codes, self._frames + len(self._codes))
        self._codes.append(codes)
        self._deliver(self._decoding.push(codes))

    def _deliver(self, frames: list[np.ndarray]) -> None:
        for samples in frames:
            self._made.append(SpeechChunk(self._frames, samples, self._codes.popleft()[None]))
            self._frames += 1


class _StatefulDecoder:
    """Frame by frame with the whole past, as a streaming session decodes."""

    def __init__(self, codec: CodecStage) -> None:
        self._codec = codec
        self._entries: dict[str, mx.array] = codec.codec.empty_entries()

    def push(self, codes: np.ndarray) -> list[np.ndarray]:
        """(Q,) codes -> the frame's samples."""
        samples, self._entries = self._codec.decode_frame(codes, self._entries)
        return [samples]

    def flush(self) -> list[np.ndarray]:
        """Nothing waits."""
        return []
