"""MLX in an actor's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_PROGRAM = """
import json, os
if {chosen}:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

from pathlib import Path
from vcpipe.actors import runtime
from vcpipe.actors.stage import StageConfig

def policies():
    return {int(thread): os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}

before = policies()
runtime.set_up(StageConfig("codec", Path("."), "cpu", None))
after = policies()
print(json.dumps([[after[thread] for thread in before], [after[thread] for thread in after.keys() - before.keys()]]))
"""


def policies(*, chosen: bool) -> tuple[set[int], set[int]]:
    """Of the threads there were and those that MLX started; ``chosen``: the process has a policy of its user's."""
    program = _PROGRAM.replace("{chosen}", str(chosen))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    had, started = json.loads(done.stdout)
    return set(had), set(started)


@pytest.mark.skipif(sys.platform != "linux", reason="a policy of Linux")
def test_the_thread_that_computes_waits_for_the_one_that_hands_on_work() -> None:
    assert policies(chosen=False) == ({os.SCHED_OTHER}, {os.SCHED_BATCH})
    assert policies(chosen=True) == ({os.SCHED_IDLE}, {os.SCHED_IDLE})
