"""The documentation: links lead somewhere, snippets run, generated blocks are current, tables are complete."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import re
import subprocess
import sys
import textwrap
import threading
import types
import typing
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import zmq

import vcpipe
from vcpipe.actors.defaults import DEFAULTS
from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.tap import TapPublisher, TapSubscriber
from vcpipe.schemas import errors
from vcpipe.schemas.config import GenerateOptions, PipelineConfig, SessionOptions
from vcpipe.schemas.events import Event, EventKind
from vcpipe.schemas.geometry import STAGES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
QUESTION_WAV = DOCS / "question.wav"

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def snippets(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def anchors(page: Path) -> set[str]:
    """Of every heading, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), f"{page.name}: {target}"
        assert linked.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {target.partition("#")[0] for target in LINK.findall(text_of("README.md"))}
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_compile(page: Path) -> None:
    for code in snippets(page, "python"):
        compile(code, page.name, "exec")


def test_the_picture_is_an_image_of_its_own() -> None:
    root = ET.parse(DOCS / "flow.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.find("{*}title") is not None
    used = set(re.findall(r'class="([^"]+)"', text_of("docs/flow.svg")))
    names = {name for value in used for name in value.split()}
    assert names <= set(re.findall(r"\.([a-z]+)", root.findtext("{*}style") or ""))
    assert {stage for stage in STAGES if stage in names} == set(STAGES)


# ------------------------------------------------------------------------------------------------ commands
def test_the_readmes_two_commands() -> None:
    readme = text_of("README.md")
    assert "python3 -m pip install '.[cpu]' && vcpipe run --audio docs/question.wav --output-audio answer.wav" in readme
    marked = re.findall(r"^<!-- test command -->\n```sh\n(.*?)```$", readme, re.MULTILINE | re.DOTALL)
    assert marked == ["python3 -m pip install -e '.[cpu,test]' && python3 -m pytest\n"]


def test_what_ci_takes_from_the_readme() -> None:
    """The lines with sed in .ci/run give the test command and nothing else."""
    line = next(line for line in text_of(".ci/run").splitlines() if line.startswith("test_command=$("))
    command = line.removeprefix("test_command=$(").removesuffix(")")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "python3 -m pip install -e '.[cpu,test]' && python3 -m pytest\n"


def generator() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("generate_cli", DOCS / "generate_cli.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_help_texts_are_current() -> None:
    page, cli = text_of("docs/cli.md"), generator()
    assert re.findall(r"<!-- help: (.+) -->", page) == cli.commands()
    assert cli.outdated(page) == []
    assert cli.outdated(page.replace("Print the version.", "Print it.")) == ["vcpipe"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_snippets_use_options_that_exist(page: Path) -> None:
    cli = generator()
    for line in "\n".join(snippets(page, "sh")).splitlines():
        for command, arguments in re.findall(r"\b(vcpipe \w+)([^|&#]*)", line):
            assert command in cli.commands(), line
            for option in re.findall(r"(?<=\s)--[\w-]+", arguments):
                assert option in cli.help_text(command), line


# ------------------------------------------------------------------------------------------------ completeness
def leaves(config: dict[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        yield key
        if isinstance(value, dict):
            yield from leaves(value)


def test_checkpoint_md_names_every_config_key() -> None:
    page = text_of("docs/checkpoint.md")
    assert [key for key in leaves(DEFAULTS) if f"`{key}`" not in page] == []


def test_session_md_names_every_option_event_and_error() -> None:
    page = text_of("docs/session.md")
    options = (PipelineConfig, SessionOptions, GenerateOptions)
    wanted = [field.name for option in options for field in dataclasses.fields(option)]
    wanted += [field.name for field in dataclasses.fields(vcpipe.OfflineResult)]
    wanted += typing.get_args(EventKind)
    wanted += [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.VcpipeError)
    ]
    assert [name for name in wanted if not re.search(rf"`{name}\b", page)] == []


def test_tap_md_names_every_topic() -> None:
    page = text_of("docs/tap.md")
    topics = [f"event.{kind}" for kind in typing.get_args(EventKind)] + ["timing", "session"]
    assert [topic for topic in topics if f"`{topic}`" not in page] == []


# ------------------------------------------------------------------------------------------------ snippets at work
def test_tap_snippet(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = snippets(DOCS / "tap.md", "python")
    assert len(code.splitlines()) <= 12
    endpoint = f"ipc://{tmp_path}/tap"
    code = code.replace("tcp://127.0.0.1:5599", endpoint).replace("timeout_s=10.0", "timeout_s=60.0")
    stop, context = threading.Event(), zmq.Context()
    publisher = TapPublisher(context, endpoint)
    listen = TapSubscriber.messages

    def a_dozen(tap: TapSubscriber, timeout_s: float) -> Iterator[Any]:
        return itertools.islice(listen(tap, timeout_s), 12)

    def publish() -> None:
        """Again and again until a subscriber has come and heard a dozen."""
        codes = np.zeros(31, np.int32)
        for index in itertools.count():
            if stop.is_set():
                return
            publisher.publish("sess_1", Event("assistant_text_delta", index, 5, " word", "a word"))
            samples = np.zeros(1764, np.float32)
            publisher.publish("sess_1", Event("audio", index, samples=samples, sample_rate=22050, audio_codes=codes))
            publisher.publish("sess_1", errors.ConfigError("no such thing"))
            stop.wait(0.02)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(TapSubscriber, "messages", a_dozen)
            exec(compile(code, "tap.md", "exec"), {})
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)
    said = capsys.readouterr().out
    assert re.search(r"^sess_1 \d+ a word$", said, re.MULTILINE)
    assert re.search(r"^sess_1 \d+ 1764 samples$", said, re.MULTILINE)
    assert "sess_1 failed no such thing" in said


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    """One start of the actors for all snippets."""
    with vcpipe.start_pipeline(device="cpu") as running:
        yield running


class Lent:
    """A running pipeline that leaving a ``with`` block does not close."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __enter__(self) -> Pipeline:
        return self._pipeline

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.process
def test_readme_snippet(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vcpipe, "start_pipeline", lambda: Lent(pipeline), raising=False)
    (code,) = snippets(ROOT / "README.md", "python")
    samples, rate = soundfile.read(QUESTION_WAV, dtype="float32")
    assert rate == 16000
    played: list[np.ndarray] = []
    asked = np.concatenate([samples, np.zeros(16000 * 3 + 100, np.float32)])
    exec(compile(code, "README.md", "exec"), {"chunks": np.array_split(asked, 7), "play": played.append})
    assert len(played) == len(asked) // 1280 + 1  # the last one padded
    assert {samples.shape for samples in played} == {(1764,)}
    assert capsys.readouterr().out.splitlines()[-1].strip() == "The capital of France is Paris."


@pytest.mark.process
def test_session_snippets(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vcpipe, "start_pipeline", lambda: Lent(pipeline), raising=False)
    push, whole = snippets(DOCS / "session.md", "python")
    names: dict[str, Any] = {}
    exec(compile(push, "session.md", "exec"), names)
    assert sum(event.kind == "audio" for event in names["events"]) == 3
    assert "'done']" in capsys.readouterr().out
    exec(compile(whole, "session.md", "exec"), names)
    assert names["result"].audio_codes.shape == (14, 31)


@pytest.mark.process
def test_transcription_snippet(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(stages: tuple[str, ...]) -> Lent:
        assert stages == ("perception",)
        return Lent(pipeline)

    monkeypatch.setattr(vcpipe, "start_pipeline", start, raising=False)
    (code,) = snippets(DOCS / "transcription.md", "python")
    exec(compile(code, "transcription.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "14 frames"


@pytest.mark.process
def test_module_docstring_snippet(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example in ``help(vcpipe)``."""
    monkeypatch.setattr(vcpipe, "start_pipeline", lambda: Lent(pipeline), raising=False)
    doc = vcpipe.__doc__ or ""
    code = textwrap.dedent(doc[doc.index("    import vcpipe") : doc.index("Names are loaded")])
    exec(compile(code, "vcpipe", "exec"), {"samples": np.zeros(2000, np.float32)})


def test_a_snippet_of_the_readme_needs_no_main_guard() -> None:
    """The whole way, as a script of its own that starts the actors itself."""
    (code,) = snippets(ROOT / "README.md", "python")
    script = (
        f"import numpy\nchunks = [numpy.zeros(1280, 'float32')] * 2\nplay = lambda samples: None\n{code}\nprint('end')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", "end")
