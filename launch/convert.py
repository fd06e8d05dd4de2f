"""``vcpipe convert``: runs the conversion in a process of its own, since it needs MLX, and shows how far it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.progress import Progress

from vcpipe.launch.console import stderr
from vcpipe.schemas.errors import ConfigError, VcpipeError


def convert(source: Path, destination: Path, dtype: str, bits: int | None, tokenizer: Path | None) -> None:
    """Write ``source`` in the public layout to the new folder ``destination``; ConfigError names what will not do."""
    command = [sys.executable, "-m", "vcpipe.actors.convert", str(source), str(destination), "--dtype", dtype]
    command += ["--bits", str(bits)] if bits is not None else []
    command += ["--tokenizer", str(tokenizer)] if tokenizer is not None else []
    error = ""
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar,
    ):
        assert process.stdout is not None
        task = bar.add_task("", total=1.0)
        for line in process.stdout:
            said = json.loads(line)
            error = said.get("error", error)
            bar.update(task, description=said.get("step", ""), completed=said.get("fraction", 0.0))
    if error:
        raise ConfigError(error)
    if process.returncode:
        raise VcpipeError(f"the conversion ended with exit code {process.returncode}")
    stderr.print(f"wrote {destination}", markup=False, soft_wrap=True)
