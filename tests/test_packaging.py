"""What an installed vcpipe holds, and what a clone must not."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import vcpipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
FOLDERS = ("actors", "bench", "launch", "pipeline", "schemas")

#: Paths of somebody's machine, and words that belong to the making and not to the made.
PATHS = re.compile(r"(?<![\w.$-])/(work|root|home|Users|opt|mnt)/\w")
WORDS = re.compile(r"\bTODO\b|\bFIXME\b|\bspec \d\d\b|\bissue #?\d|\bas an AI\b|\bCEO\b")
BINARY = {".wav", ".flac", ".npz", ".safetensors", ".png"}


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def packages_of_the_tree() -> set[str]:
    found = {"vcpipe"}
    for folder in FOLDERS:
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add("vcpipe." + ".".join(init.parent.relative_to(ROOT).parts))
    return found - {"vcpipe.launch._root"}


def test_the_list_of_packages_is_the_tree(pyproject: dict[str, Any]) -> None:
    """An editable install hides a package that is missing from the list: it maps whole folders."""
    packages = pyproject["tool"]["setuptools"]["packages"]
    assert packages == sorted(packages, key=lambda name: name.split("."))
    assert set(packages) == packages_of_the_tree()
    mapped = pyproject["tool"]["setuptools"]["package-dir"]
    assert mapped == {"vcpipe": "launch/_root", **{f"vcpipe.{folder}": folder for folder in FOLDERS}}


def test_every_module_is_in_a_package() -> None:
    for folder in FOLDERS:
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), module.relative_to(ROOT)


def test_the_type_checkers_links_reach_every_folder() -> None:
    links = ROOT / "tests" / "typing" / "vcpipe"
    if not links.is_dir():
        pytest.skip("a source archive does without them")
    assert {path.name for path in links.iterdir()} == {*FOLDERS, "__init__.py"}
    for link in links.iterdir():
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        source = ROOT / "launch" / "_root" / link.name if link.suffix else ROOT / link.name
        assert link.resolve() == source.resolve()


def test_versions_agree(pyproject: dict[str, Any]) -> None:
    version = pyproject["project"]["version"]
    assert vcpipe.__version__ == version
    assert metadata.version("vcpipe") == version
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == version


def test_dependencies_are_those_imported(pyproject: dict[str, Any]) -> None:
    """The extra ``serve`` among them; what ``mic`` names is imported by its name, where a microphone is asked for.

    bench/mini is left out: it makes a checkpoint, and its ``requirements.txt`` names what only that needs.
    """
    lines = [*pyproject["project"]["dependencies"], *pyproject["project"]["optional-dependencies"]["serve"]]
    names = {re.split(r"[\[<>=; ]", line)[0] for line in lines}
    modules = {"huggingface-hub": "huggingface_hub", "python-multipart": "python_multipart", "pyzmq": "zmq"}
    imported = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if (ROOT / "bench" / "mini") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).split(".")[0])
    third_party = imported - sys.stdlib_module_names - {"vcpipe"}
    assert third_party == {modules.get(name, name) for name in names}


def test_wheel(tmp_path: Path) -> None:
    """Built from a copy: a build leaves folders behind."""
    source = tmp_path / "source"
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=leave_out)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    pytest.importorskip("setuptools", minversion="77")
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(source / done.stdout.splitlines()[-1]) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        entry_points = wheel.read(next(name for name in wheel.namelist() if name.endswith("entry_points.txt")))
    expected = {f"vcpipe/{path.name}" for path in (ROOT / "launch" / "_root").iterdir() if path.is_file()}
    for folder in FOLDERS:
        modules = [path for path in (ROOT / folder).rglob("*.py") if path.parent.name != "_root"]
        kernels = (ROOT / folder).rglob("*.cuh")
        expected |= {f"vcpipe/{path.relative_to(ROOT).as_posix()}" for path in (*modules, *kernels)}
    for folder in ("embedded", "page"):
        expected |= {f"vcpipe/launch/{folder}/{path.name}" for path in (ROOT / "launch" / folder).iterdir()}
    assert files == expected
    assert {"vcpipe/py.typed", "vcpipe/launch/embedded/model.safetensors"} <= files
    assert b"vcpipe = vcpipe.launch.cli:main" in entry_points


# ------------------------------------------------------------------------------------------------ what git keeps
@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """Files git knows or would add; none of those it ignores."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git clone")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_paths_of_a_machine_and_no_words_about_the_work(tracked: list[Path]) -> None:
    found = []
    for path in tracked:
        if path.suffix in BINARY or path.name == "tokenizer.json" or path.is_symlink():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if match := PATHS.search(line) or WORDS.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


def test_nothing_large_is_kept(tracked: list[Path]) -> None:
    large = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked if path.stat().st_size > 4_000_000}
    assert large.keys() == {"launch/embedded/model.safetensors"}
