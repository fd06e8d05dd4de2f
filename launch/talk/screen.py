"""What a person sees of a conversation: who says what, line by line, and what happens now; or JSON lines for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console, Group
from rich.text import Text

from vcpipe.launch.console import live
from vcpipe.launch.talk.connection import Message, plain

Who = Literal["you", "answer"]

#: Frames without a word after which a speaker's line ends (2 s).
_PAUSE_FRAMES = 25

#: What a decoder shows for bytes that are not a character yet.
_INCOMPLETE = "\ufffd"

_TYPES: Mapping[str, tuple[Who, str]] = {
    "conversation.item.input_audio_transcription.delta": ("you", "transcript"),
    "response.text.delta": ("answer", "text"),
}
_STYLES: Mapping[Who, str] = {"you": "cyan", "answer": "green"}
_AUDIO = "response.audio.delta"

#: An answer whose text reaches into so many last frames was probably cut.
_CUT_FRAMES = 5


@dataclass
class Line:
    """One speaker's words between two pauses."""

    who: Who
    text: str
    last_frame: int


class Dialogue:
    """Sorts two growing texts, both of the whole session, into lines. Speakers may overlap: each goes on in the own line."""

    def __init__(self) -> None:
        self.texts: dict[Who, str] = {"you": "", "answer": ""}
        self.last_frame: dict[Who, int] = {"you": -1, "answer": -1}
        self._shown: dict[Who, int] = {"you": 0, "answer": 0}
        self._open: list[Line] = []

    @property
    def open_lines(self) -> list[Line]:
        """Lines that may still grow, in the order in which they began."""
        return self._open

    def add(self, who: Who, text: str, frame_index: int) -> None:
        """``text``: all that ``who`` has said so far; an incomplete character at its end waits until it is whole."""
        self.texts[who] = text
        self.last_frame[who] = frame_index
        self._extend(who, text.rstrip(_INCOMPLETE), frame_index)

    def finished(self, frame_index: int) -> list[Line]:
        """Lines that nobody has gone on with for a while, oldest first; they are given once."""
        count = 0
        while count < len(self._open) and frame_index - self._open[count].last_frame >= _PAUSE_FRAMES:
            count += 1
        done, self._open = self._open[:count], self._open[count:]
        return done

    def rest(self) -> list[Line]:
        """All that is left; a character that stayed incomplete is shown as it is."""
        for who, text in self.texts.items():
            self._extend(who, text, self.last_frame[who])
        done, self._open = self._open, []
        return done

    def _extend(self, who: Who, text: str, frame_index: int) -> None:
        new, self._shown[who] = text[self._shown[who] :], max(self._shown[who], len(text))
        own = [line for line in self._open if line.who == who]
        if own and frame_index - own[-1].last_frame < _PAUSE_FRAMES:
            own[-1].text += new
            own[-1].last_frame = frame_index
        elif new.strip():
            self._open.append(Line(who, new.lstrip(), frame_index))


class Screen:
    """A listener that shows the conversation: live on a terminal, in whole lines elsewhere, or as JSON lines.

    ``status``: asked for what to show under the conversation on a terminal.
    """

    def __init__(self, as_json: bool, status: Callable[[], str] = lambda: "") -> None:
        self.frames = 0
        self.dialogue = Dialogue()
        self._as_json = as_json
        self._status = status
        self._console = Console(highlight=False)

    @property
    def cut(self) -> bool:
        """True where words came until the end, so that more would have followed."""
        return self.dialogue.last_frame["answer"] >= max(0, self.frames - _CUT_FRAMES)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the conversation inside the block."""
        with nullcontext() if self._as_json else live(self._console, self._render):
            yield
        if not self._as_json:
            self._print(self.dialogue.rest())

    def take(self, message: Message) -> None:
        """See ``Listener``."""
        kind = message["type"]
        if self._as_json:
            shown = {name: value for name, value in message.items() if kind != _AUDIO or name != "delta"}
            print(json.dumps(shown, ensure_ascii=False), flush=True)
        self.frames += kind == _AUDIO
        frame_index = message.get("frame_index")
        if not isinstance(frame_index, int):
            return
        if kind in _TYPES:
            who, field = _TYPES[kind]
            self.dialogue.add(who, str(message.get(field, "")), frame_index)
        if not self._as_json:
            self._print(self.dialogue.finished(frame_index))

    def summarize(self, extra: Mapping[str, Any]) -> None:
        """The last JSON line."""
        texts = {"transcript": self.dialogue.texts["you"], "text": self.dialogue.texts["answer"]}
        print(json.dumps({"type": "summary", "frames": self.frames, **texts, **extra}, ensure_ascii=False), flush=True)

    def _print(self, lines: list[Line]) -> None:
        for line in lines:
            self._console.print(_styled(line), soft_wrap=True)

    def _render(self) -> Group:
        return Group(*map(_styled, self.dialogue.open_lines), Text(self._status(), style="dim"))


def _styled(line: Line) -> Text:
    return Text.assemble((f"{line.who:>6}: ", f"bold {_STYLES[line.who]}"), plain(line.text).rstrip())
