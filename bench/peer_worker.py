"""The public MLX implementation (mlx-vlm) in a child process: ``python -m vcpipe.bench.peer_worker FACTS``.

It gets what an actor gets: the same weights, device, BLAS and number of BLAS threads. The tokenizer is the bare fast one,
without the layers transformers puts around it.
"""

from __future__ import annotations

import importlib
import time
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from vcpipe.actors import runtime
from vcpipe.actors.checkpoint import geometry, load_tokenizer, read_config
from vcpipe.bench.random_weights import fill
from vcpipe.bench.signals import noise_frames
from vcpipe.bench.worker import Handler, Reply, serve
from vcpipe.schemas.errors import ConfigError

_WARM_FRAMES = 5
_STAGES = ("perception", "rnnt", "language", "tts", "codec")


class BareTokenizer:
    """What a session of the peer asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class PeerDriver:
    """Opens streaming sessions one after the other and pushes noise, one frame a call."""

    def __init__(self, maker: Any, frame_samples: int) -> None:
        self._maker = maker
        self._frame_samples = frame_samples
        self._session: Any = None
        self._fed = 0

    def open(self, prompt: str = "", seed: int = 0, profile: bool = False) -> Reply:
        """A new session in place of the old one, prompt taken in; milliseconds it took."""
        self._session, self._fed = None, 0
        started = time.perf_counter()
        self._session = self._maker.create_streaming_session(system_prompt=prompt, seed=seed, profile=profile)
        mx.synchronize()
        return {"open_ms": (time.perf_counter() - started) * 1e3}

    def push(self, frames: int) -> Reply:
        """So many frames: milliseconds of each call, checksums of the codes, and (profiled) milliseconds of the stages."""
        pcm = noise_frames(self._fed + frames, self._frame_samples)[self._fed :]
        frame_ms, codes = [], []
        began = time.perf_counter()
        for frame in pcm:
            started = time.perf_counter()
            events = self._session.push_audio(frame)
            frame_ms.append((time.perf_counter() - started) * 1e3)
            codes += [event.audio_codes for event in events if event.kind == "audio"]
        wall_s = time.perf_counter() - began
        self._fed += frames
        timings = self._session.profile.frames[-frames:]
        return {
            "frame_ms": frame_ms,
            "wall_s": wall_s,
            "codes": [zlib.crc32(np.array(frame, np.int32).tobytes()) for frame in codes],
            "stage_ms": {stage: [getattr(timing, f"{stage}_ms") for timing in timings] for stage in _STAGES},
        }

    def memory(self) -> Reply:
        """Megabytes."""
        values = {"rss": runtime.rss_bytes(), "mlx": runtime.memory_bytes(), "mlx_peak": mx.get_peak_memory()}
        return {f"{name}_mb": round(value / 1e6, 1) for name, value in values.items()}


def _start(facts: dict[str, Any]) -> tuple[Reply, dict[str, Handler]]:
    folder = Path(facts["checkpoint"])
    if facts["device"] is not None:  # its buffer pool stays as it is: bounding it is our actors' habit
        mx.set_default_device(mx.cpu if facts["device"] == "cpu" else mx.gpu)
    config = read_config(folder)
    started = time.monotonic()
    try:
        model = _random_model(folder, config) if facts["random"] else _loaded_model(folder)
        version = metadata.version("mlx-vlm")
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise ConfigError(
            f"--peer needs mlx-vlm, which cannot be imported here ({error}); python3 -m pip install 'vcpipe[peer]'"
        ) from None
    driver = PeerDriver(model.create_session(BareTokenizer(load_tokenizer(folder))), geometry(config).frame_samples)
    driver.open(prompt="warm up")
    driver.push(_WARM_FRAMES)
    ready = {"mlx_vlm": version, "mlx": runtime.mlx_version(), "device": runtime.device_name()}
    return ready | {"load_s": time.monotonic() - started}, {
        "open": driver.open,
        "push": driver.push,
        "memory": driver.memory,
    }


def _loaded_model(folder: Path) -> Any:
    return importlib.import_module("mlx_vlm.utils").load_model(folder, lazy=False)


def _random_model(folder: Path, config: dict[str, Any]) -> Any:
    """The peer's own network with the weights that our stages get."""
    package = importlib.import_module("mlx_vlm.models.nemotron_voicechat")
    model = package.Model(package.ModelConfig.from_dict(config))
    fill(model, "", config, lambda step, fraction: None)
    return model


if __name__ == "__main__":
    serve(_start)
