"""What may be imported where."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib, pkgutil, sys
import vcpipe.pipeline, vcpipe.schemas
for package in (vcpipe.schemas, vcpipe.pipeline):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for name in ("base", "checkpoint", "entry", "stage", "wire"):
    importlib.import_module("vcpipe.actors." + name)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("mlx", "multiprocessing", "vcpipe.launch")))
"""


def test_the_parent_side_never_loads_mlx_and_never_forks() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
