"""Who may import whom: one way through the folders, and no MLX on the parent's side."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vcpipe

ROOT = Path(__file__).parents[1]
FOLDERS = ("schemas", "actors", "pipeline", "launch", "bench")
STAGES = ("perception", "language", "tts", "codec")

#: What the modules of a folder may import of vcpipe.
ALLOWED = {
    "schemas": {"schemas"},
    "actors": {"schemas", "actors"},
    "pipeline": {"schemas", "actors", "pipeline"},
    "launch": {"schemas", "actors", "pipeline", "launch", ""},
    "bench": {"schemas", "actors", "pipeline", "launch", "bench", ""},
}
#: Modules of actors that work without MLX, so that the parent may import them. Those it does are checked for it below.
MLX_FREE = {"base", "checkpoint", "defaults", "entry", "nemo", "shards", "speech", "stage", "wire"}
#: Modules of actors around the networks, which no network knows.
AROUND = {"base", "convert", "entry", "local_speech", "probe", "runtime", "speech", "wire"}

MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, inside functions too; ``from a import b`` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}, line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> Iterator[list[str]]:
    """Those of vcpipe, as parts after ``vcpipe.``; [""] for the package itself."""
    for name in imports(path):
        first, *rest = name.split(".")
        if first == "vcpipe":
            yield rest if rest and rest[0] in FOLDERS else [""]


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def test_every_folder_has_modules() -> None:
    assert {folder_of(path) for path in MODULES} == set(FOLDERS)
    assert {path.parent.name for path in MODULES if path.name == "actor.py"} == set(STAGES)


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_one_way(folder: str) -> None:
    wrong = {
        f"{path.relative_to(ROOT)} imports vcpipe.{'.'.join(target)}"
        for path in MODULES
        if folder_of(path) == folder and path.parent.name != "_root"
        for target in own_imports(path)
        if target[0] not in ALLOWED[folder]
    }
    assert wrong == set()


def test_schemas_import_numpy_and_msgpack_only() -> None:
    third_party = {
        name.split(".")[0]
        for path in MODULES
        if folder_of(path) == "schemas"
        for name in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names
    }
    assert third_party <= {"numpy", "msgpack", "vcpipe"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_network_imports_no_other_one_and_nothing_around_it(stage: str) -> None:
    wrong = {
        f"{path.relative_to(ROOT)} imports vcpipe.{'.'.join(target)}"
        for path in MODULES
        if path.parent == ROOT / "actors" / stage
        for target in own_imports(path)
        if target[0] == "actors" and target[1] in AROUND | {*STAGES} - {stage}
    }
    assert wrong == set()


def test_the_parents_side_names_no_mlx() -> None:
    wrong = set()
    for path in MODULES:
        if folder_of(path) in ("schemas", "pipeline", "launch") or (
            path.parent == ROOT / "actors" and path.stem in MLX_FREE or path.parent.name in MLX_FREE
        ):
            wrong |= {f"{path.relative_to(ROOT)} imports {name}" for name in imports(path) if name.startswith("mlx")}
            wrong |= {
                f"{path.relative_to(ROOT)} imports vcpipe.actors.{target[1]}"
                for target in own_imports(path)
                if target[0] == "actors" and target[1] not in MLX_FREE
            }
    assert wrong == set()


CODE = """
import sys
import vcpipe
import vcpipe.launch.cli, vcpipe.launch.run, vcpipe.launch.doctor, vcpipe.launch.tap, vcpipe.bench.__main__
for name in vcpipe.__all__:
    assert getattr(vcpipe, name) is not None, name
print(sorted(name for name in sys.modules if name.split(".")[0] in ("mlx", "multiprocessing", "transformers", "torch")))
"""


def test_every_public_name_loads_without_mlx() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_import_vcpipe_alone_loads_nothing_else() -> None:
    code = "import sys, vcpipe; print([n for n in sys.modules if n in ('numpy', 'zmq', 'typer', 'vcpipe.pipeline')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'vcpipe' has no attribute 'nothing'"):
        _ = vcpipe.nothing
