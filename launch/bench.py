"""Hands a command over to the measurements. They look at everything and nothing imports them, hence a process of its own."""

from __future__ import annotations

import subprocess
import sys

#: As ``python -m vcpipe.bench``, but its help and its errors name the command that was typed.
_CODE = "from vcpipe.bench.__main__ import main; main('vcpipe bench')"
_STOP_S = 30.0


def run_bench(arguments: list[str]) -> int:
    """Run the measurements with these arguments; returns their exit code."""
    with subprocess.Popen([sys.executable, "-c", _CODE, *arguments]) as process:
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C or a signal: its actors must be stopped before this process ends
            process.terminate()
            process.wait(_STOP_S)
            raise
    return code if code >= 0 else 128 - code
