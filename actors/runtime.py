"""MLX as a process sees it: device, buffer pool, memory. Imported in actors only."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import metadata

import mlx.core as mx
import psutil

from vcpipe.actors.stage import StageConfig
from vcpipe.schemas.errors import ConfigError

_PROCESS = psutil.Process()

#: Bound of MLX's pool of freed buffers. Attention over a growing history asks for a new size every frame, so an unbounded
#: pool grows with the session. On a CPU a buffer that is not pooled costs little; on a GPU allocation is what the pool saves.
_CPU_POOL_BYTES = 8 << 20
_GPU_POOL_BYTES = 1 << 30


def set_up(config: StageConfig) -> None:
    """Choose the device and bound the buffer pool. ConfigError where MLX has no such device."""
    if config.device is not None:
        device = mx.Device(mx.cpu if config.device == "cpu" else mx.gpu, 0)
        if not mx.is_available(device):
            raise ConfigError(f"device {config.device!r} is not available to MLX here; accepted: cpu")
        mx.set_default_device(device)
    mx.set_cache_limit(_GPU_POOL_BYTES if device_name() == "gpu" else _CPU_POOL_BYTES)
    if device_name() == "cpu":
        _start_worker()


def _start_worker() -> None:
    """Start the thread on which MLX computes so that it takes the CPU from no thread that wakes it, where Linux allows that.

    MLX hands a step on operation by operation. Where both threads share a CPU, the woken one would run after each of them:
    hundreds of switches a frame. A policy that was chosen for the whole process stays.
    """
    ordinary = sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER
    with contextlib.suppress(PermissionError):
        if ordinary:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread, and those that it starts
    mx.eval(mx.zeros(1) + 1)
    with contextlib.suppress(PermissionError):
        if ordinary:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def free_memory() -> None:
    """Give the pool's unused buffers back: after a session, never per frame."""
    mx.clear_cache()


def device_name() -> str:
    """The device that steps run on."""
    return "gpu" if mx.default_device().type == mx.gpu else "cpu"


def mlx_version() -> str:
    """Version of MLX."""
    return metadata.version("mlx")


def memory_bytes() -> int:
    """MLX memory in use."""
    return int(mx.get_active_memory())


def cache_bytes() -> int:
    """MLX memory kept for reuse."""
    return int(mx.get_cache_memory())


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(_PROCESS.memory_info().rss)
