"""The environment an actor is born with: a fast BLAS and one BLAS thread each."""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Mapping
from functools import cache


@cache
def find_openblas() -> str | None:
    """Name of an OpenBLAS that the loader can preload, or None.

    MLX's Linux wheels carry a reference BLAS; with OpenBLAS in front of it matrix products on a CPU are about 12 times
    faster. Elsewhere MLX brings its own fast one.
    """
    return ctypes.util.find_library("openblas") if sys.platform == "linux" else None


def actor_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` (default: this process's environment) with OpenBLAS preloaded and BLAS threads pinned to one."""
    environment = dict(os.environ if base is None else base)
    if (openblas := find_openblas()) is not None:
        preloaded = environment.get("LD_PRELOAD", "")
        if "openblas" not in preloaded:
            environment["LD_PRELOAD"] = f"{preloaded}:{openblas}".strip(":")
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        environment.setdefault(name, "1")
    return environment
