"""Writes the help texts into docs/cli.md.

    python docs/generate_cli.py [--check]

Every ``<!-- help: COMMAND -->`` line there is followed by a fenced block, which this script fills. ``--check`` writes nothing
and fails where a block is not what the command says.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import CodeType

from typer.models import CommandInfo
from typer.testing import CliRunner

from vcpipe.bench.__main__ import app as bench_app
from vcpipe.launch.cli import app as vcpipe_app

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 90

#: The longer name first: it begins with the shorter.
_PROGRAMS = {"vcpipe bench": bench_app, "vcpipe": vcpipe_app}
_BLOCK = re.compile(r"(<!-- help: (.+?) -->\n```text\n)(.*?)(```\n)", re.DOTALL)

#: What versions of typer write each in their own way: arguments as NAME or {NAME}, with or without a type, and escapes.
_SPELLINGS = ((r"\{(\w+)\}", r"\1"), (r" <\w+>", ""), (r"\\\[", "["))


def help_text(command: str) -> str:
    """What ``COMMAND --help`` prints on a terminal of WIDTH columns, for "vcpipe", "vcpipe run" and so on."""
    program = next(name for name in _PROGRAMS if command == name or command.startswith(name + " "))
    arguments = command.removeprefix(program).split()
    done = CliRunner().invoke(
        _PROGRAMS[program], [*arguments, "--help"], prog_name=program, terminal_width=WIDTH, max_content_width=WIDTH
    )
    if done.exit_code:
        raise SystemExit(f"{command} --help: {done.output}")
    return "\n".join(line.rstrip() for line in done.output.strip().splitlines()) + "\n"


def comparable(text: str) -> str:
    """A help text without what depends on the version of typer: line breaks, the spelling of placeholders."""
    for old, new in _SPELLINGS:
        text = re.sub(old, new, text)
    return " ".join(text.split())


def outdated(page: str) -> list[str]:
    """Commands whose block on the page is not what they say."""
    blocks = [(command, text) for _, command, text, _ in _BLOCK.findall(page)]
    return [command for command, text in blocks if comparable(text) != comparable(help_text(command))]


def commands() -> list[str]:
    """Every command there is, the programs themselves among them; of commands that share their options the first."""
    found = []
    for program, app in reversed(_PROGRAMS.items()):
        by_options: dict[CodeType, CommandInfo] = {}
        for command in app.registered_commands:
            by_options.setdefault(command.callback.__code__, command)
        names = [command.name or command.callback.__name__ for command in by_options.values()]
        found += [name for name in (program, *(f"{program} {name}" for name in names)) if name not in found]
    return found


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        if stale := outdated(page):
            raise SystemExit(f"{PAGE.name} is not current for: {', '.join(stale)}; run python docs/generate_cli.py")
        return
    PAGE.write_text(_BLOCK.sub(lambda block: block[1] + help_text(block[2]) + block[4], page), encoding="utf-8")


if __name__ == "__main__":
    main()
