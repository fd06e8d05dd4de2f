"""However the parent goes, its actors go too, and no socket folder stays."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fakes_parent
import psutil
import pytest
from waiting import PATIENCE_S, is_alive, wait_until

pytestmark = pytest.mark.process


class Parent:
    """A running ``fakes_parent.py`` in the state it was asked for, leader of its own process group."""

    def __init__(self, way: str, folder: Path) -> None:
        self._folder = folder
        self.process = subprocess.Popen(
            [sys.executable, fakes_parent.__file__, way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder)},
            text=True,
        )
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], "not ready"
        self.said = self.process.stdout.readline()
        self.children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []

    def ended(self) -> int:
        """Exit code of the program, once nothing of it is left."""
        code = self.process.wait(PATIENCE_S)
        wait_until(lambda: not self.left(), "actors and folder to go")
        return code

    def left(self) -> list[object]:
        return [*filter(is_alive, self.children), *self._folder.glob("vcpipe-*")]

    @property
    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def release(self) -> None:
        for process in (self.process, *self.children):
            if process.is_running() if isinstance(process, psutil.Process) else process.poll() is None:
                process.kill()
        self.process.communicate()


@pytest.fixture
def parent(request: pytest.FixtureRequest, short_folder: Path) -> Iterator[Parent]:
    folder = short_folder / f"p{len(os.listdir(short_folder))}"
    folder.mkdir()
    parent = Parent(request.param, folder)
    yield parent
    parent.release()


@pytest.mark.parametrize("parent", ["loading", "idle", "session"], indirect=True)
def test_a_killed_parent_leaves_nothing(parent: Parent) -> None:
    assert len(parent.children) == 4
    parent.process.send_signal(signal.SIGKILL)
    assert parent.ended() == -signal.SIGKILL


@pytest.mark.parametrize("parent", ["session"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_to_the_parent_leave_nothing_either(parent: Parent, number: signal.Signals) -> None:
    """The terminal's window is closed, a service manager says stop."""
    parent.process.send_signal(number)
    assert parent.ended() == -number


@pytest.mark.parametrize("parent", ["loading", "session"], indirect=True)
def test_ctrl_c_reaches_the_parent_alone(parent: Parent) -> None:
    """It goes to the whole group; no child says a word."""
    assert len(parent.children) == 4
    os.killpg(parent.process.pid, signal.SIGINT)
    assert parent.ended() == 130
    assert parent.stderr == ""


@pytest.mark.parametrize("parent", ["leave"], indirect=True)
def test_a_program_that_closes_nothing_ends_quietly_and_never_loads_mlx(parent: Parent) -> None:
    assert parent.said == "ready False\n"
    assert parent.ended() == 0
    assert parent.stderr == ""


@pytest.mark.parametrize("parent", ["error"], indirect=True)
def test_a_program_that_fails_shows_its_own_error_only(parent: Parent) -> None:
    assert parent.ended() == 1
    stderr = parent.stderr
    assert stderr.count("Traceback") == 1
    assert stderr.endswith("ValueError: the program is wrong\n")
