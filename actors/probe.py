"""``python -m vcpipe.actors.probe``: what MLX has here, as one JSON object. A process of its own, so no parent loads MLX."""

from __future__ import annotations

import json
import time
from importlib import metadata

import mlx.core as mx

#: Side of the matrices that are multiplied, and how often.
_SIZE, _ROUNDS = 1024, 3


def matmul_gflops() -> float:
    """Speed of a float32 matrix product on the default device, the best of a few."""
    a = mx.random.normal((_SIZE, _SIZE))
    mx.eval(a, a @ a)
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        mx.eval(a @ a)
        best = min(best, time.perf_counter() - start)
    return 2 * _SIZE**3 / best / 1e9


def can_compile() -> bool:
    """Whether mx.compile has what it needs at run time (a C++ compiler on a CPU)."""
    try:
        mx.eval(mx.compile(lambda x: mx.exp(x) * 2 + 1)(mx.ones((3,))))
    except RuntimeError:
        return False
    return True


def main() -> None:
    """Print the facts."""
    gpu = mx.default_device().type == mx.gpu
    backends = [name for name in ("mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13") if _installed(name)]
    facts = {
        "mlx": metadata.version("mlx"),
        "device": "gpu" if gpu else "cpu",
        "device_name": mx.device_info().get("device_name", "") if gpu else "",
        "backends": backends,
        "matmul_gflops": round(matmul_gflops(), 1),
        "compile": can_compile(),
    }
    print(json.dumps(facts))


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
