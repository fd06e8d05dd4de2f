"""``vcpipe doctor``: what this machine has, and what would be slow and why."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import psutil
from rich.table import Table

import vcpipe
from vcpipe.launch.console import stderr, warn
from vcpipe.pipeline.environment import actor_environment, find_openblas

_PROBE_TIMEOUT_S = 120
#: Below this a CPU's matrix products are those of a reference BLAS.
_SLOW_CPU_GFLOPS = 10.0
#: Weights of the 11B checkpoint with a 4-bit language model, the smallest of its forms.
_MODEL_BYTES = 9.2e9
_SOCKET_PATH_BYTES = 103


def examine() -> dict[str, Any]:
    """All facts and the list ``slow`` of what would be slow or fail, each with its reason."""
    folder = tempfile.gettempdir()
    memory = psutil.virtual_memory()
    facts: dict[str, Any] = {
        "vcpipe": vcpipe.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "openblas": find_openblas(),
        "socket_folder": folder,
        "socket_folder_free_bytes": shutil.disk_usage(folder).free,
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        **_probe(),
    }
    return {**facts, "slow": _findings(facts)}


def _probe() -> dict[str, Any]:
    """What MLX says in an actor's environment."""
    command = [sys.executable, "-m", "vcpipe.actors.probe"]
    try:
        done = subprocess.run(
            command, env=actor_environment(), capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True
        )
        return dict(json.loads(done.stdout))
    except subprocess.CalledProcessError as error:
        return {
            "mlx": None,
            "mlx_error": error.stderr.strip().splitlines()[-1] if error.stderr.strip() else "no output",
        }
    except subprocess.TimeoutExpired:
        return {"mlx": None, "mlx_error": f"no answer within {_PROBE_TIMEOUT_S} s"}


def _findings(facts: dict[str, Any]) -> list[str]:
    found = []
    if facts["mlx"] is None:
        found.append(f"MLX does not work: {facts['mlx_error']}; nothing will run")
    elif facts["device"] == "cpu":
        found.append("no GPU that MLX can use: the 11B checkpoint will be far from real time, small ones are fine")
        if facts["openblas"] is None and facts["matmul_gflops"] < _SLOW_CPU_GFLOPS:
            found.append(
                f"matrix products reach {facts['matmul_gflops']} GFLOP/s with MLX's own BLAS: install OpenBLAS (Debian: "
                "libopenblas0-pthread), it is found and preloaded by itself, about 12 times faster"
            )
    if facts["mlx"] is not None and not facts["compile"]:
        found.append("mx.compile does not work here (on a CPU it needs a C++ compiler such as g++)")
    if len([name for name in facts.get("backends", ()) if name != "mlx-metal"]) > 1:
        found.append(
            f"several MLX backends are installed ({', '.join(facts['backends'])}) and overwrite each other: uninstall "
            "all of them, then install the one you want"
        )
    if facts["memory_bytes"] < _MODEL_BYTES:
        found.append(f"{facts['memory_bytes'] / 1e9:.1f} GB of memory: the 4-bit 11B checkpoint alone takes 9.2 GB")
    if facts["cpus"] < 4:
        found.append(f"{facts['cpus']} CPU cores for five processes: stages share them, so they overlap less")
    if len(facts["socket_folder"].encode()) > _SOCKET_PATH_BYTES - 40:
        found.append(f"the path {facts['socket_folder']} is too long for sockets: set TMPDIR to a shorter folder")
    if facts["socket_folder_free_bytes"] < 1 << 20:
        found.append(f"no free space in {facts['socket_folder']} for sockets")
    return found


def show(facts: dict[str, Any], as_json: bool) -> None:
    """Print the facts, the findings last."""
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(show_header=False)
    for name, value in facts.items():
        if name != "slow":
            table.add_row(name.replace("_", " ").removesuffix(" bytes"), _shown(name, value))
    stderr.print(table)
    for line in facts["slow"]:
        warn(line)
    if not facts["slow"]:
        stderr.print("nothing here would be slow")


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 1e9:.1f} GB"
    return ", ".join(value) if isinstance(value, list) else str(value)
