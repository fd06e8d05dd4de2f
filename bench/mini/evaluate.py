"""How good a small checkpoint is, asked through the real pipeline and heard by judges from elsewhere.

    python -m vcpipe.bench.mini.evaluate --corpus FOLDER [--model FOLDER] [--styles FOLDER] [--json] [--limit N]

The corpus is what ``vcpipe.bench.mini.synthesis`` made. Judges and synthesisers are packages that requirements.txt lists;
what needs one that is not there is not measured, and says so. ``--limit`` asks so many questions of each kind: a trial, not a
result.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from vcpipe.bench.mini.assistant import FRAME_S, Assistant, Heard
from vcpipe.bench.mini.clips import resample
from vcpipe.bench.mini.judge import RATE, DistillMos, Whisper, scored_words
from vcpipe.bench.mini.progress import told
from vcpipe.bench.mini.questions import (
    Conversation,
    Question,
    barge_ins,
    dev_questions,
    follow_ups,
    held_out_questions,
    needs_corpus,
    quiet_minutes,
)
from vcpipe.bench.mini.recordings import recorded_questions
from vcpipe.bench.mini.scoring import word_errors
from vcpipe.bench.mini.sound import USER_RATE
from vcpipe.bench.pipeline import Plan
from vcpipe.bench.pipeline import measure as measure_pipeline
from vcpipe.bench.target import open_target
from vcpipe.launch.console import stderr
from vcpipe.launch.library import start_pipeline
from vcpipe.schemas.errors import ConfigError, VcpipeError

#: Seconds from the end of a question's speech in which its reply should begin to be heard.
START_S = (0.2, 0.8)

#: Questions of each kind, unless a limit says less; replies that are judged by ear.
_HELD_OUT, _CONVERSATIONS, _JUDGED = 160, 20, 150

#: What can be asked for by itself; "ears" judges the replies to the dev questions.
PARTS = ("dev", "quiet", "follow-ups", "interruptions", "recordings", "held-out", "ears", "speed")

#: Frames after an interruption in which the assistant may still finish what it was saying.
_STOP_FRAMES = 8


@dataclass(frozen=True)
class Goal:
    """``what`` is measured, and the least or most that is wanted of it; ``unit`` is "%", "x", or nothing."""

    what: str
    limit: float
    least: bool = True
    unit: str = "%"

    def shown(self, value: float) -> str:
        return f"{value:.1f} %" if self.unit == "%" else f"{value:.3g}{self.unit}"

    def met(self, value: float) -> bool:
        return value >= self.limit if self.least else value <= self.limit

    def __str__(self) -> str:
        limit = f"{self.limit:g} %" if self.unit == "%" else f"{self.limit:g}{self.unit}"
        return f"{'at least' if self.least else 'at most'} {limit}"


GOALS = {
    "transcript_errors": Goal("words of the transcript wrong, dev questions", 10, least=False),
    "dev_right": Goal("replies exactly right, dev questions", 90),
    "held_out_right": Goal("replies exactly right, held-out compositions", 80),
    "recordings_right": Goal("replies exactly right, recordings of a person", 70),
    "speech_errors": Goal("words of the spoken reply wrong, heard by Whisper tiny.en", 12, least=False),
    "speech_quality": Goal("DistillMOS of the spoken replies", 3.3, unit=""),
    "prompt_starts": Goal("replies heard 0.2 to 0.8 s after the question", 90),
    "quiet_kept": Goal("minutes of silence and noise without a word or sound", 100),
    "follow_ups_right": Goal("replies exactly right, three questions in one session", 80),
    "barge_ins_right": Goal("interrupted, silent in time, and the next reply right", 80),
    "realtime_factor": Goal("realtime factor on two cores", 0.35, least=False, unit=""),
    "ratio_to_mlx_vlm": Goal("frames per second against mlx-vlm", 4, unit="x"),
}


@dataclass
class Results:
    """Values by the names of :data:`GOALS`; None and a reason for what could not be measured. ``log``: every reply."""

    values: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, *names: str, by: Callable[[], Iterable[float]]) -> None:
        """Set the values that ``by`` gives; a ConfigError says what it needs, and nothing is set."""
        try:
            self.values |= dict(zip(names, by(), strict=True))
        except ConfigError as error:
            self.values |= dict.fromkeys(names)
            self.reasons |= dict.fromkeys(names, f"not measured: {error}")

    def to_json(self) -> dict[str, Any]:
        measures = []
        for name, goal in GOALS.items():
            value = self.values.get(name)
            shown = self.reasons.get(name, "not asked for") if value is None else goal.shown(value)
            measures.append(
                {
                    "name": name,
                    "what": goal.what,
                    "goal": str(goal),
                    "value": None if value is None else round(value, 4),
                    "shown": shown,
                    "met": None if value is None else goal.met(value),
                }
            )
        return {"measures": measures, "details": self.details}


def percent(parts: Iterable[bool]) -> float:
    """Share of what is true; ConfigError of nothing."""
    values = list(parts)
    if not values:
        raise ConfigError("there is nothing to count")
    return 100 * fmean(values)


# ------------------------------------------------------------------------------------------------ asking
class Examination:
    """Puts questions to an assistant and keeps what it replies."""

    def __init__(self, assistant: Assistant, results: Results) -> None:
        self._assistant, self._results = assistant, results

    def ask(self, questions: list[Question], what: str) -> list[tuple[Question, Heard]]:
        """A session for each."""
        replies = []
        for question in told(questions, what):
            heard = self._assistant.hear(question.samples)
            replies.append((question, heard))
            self._note(what, question, heard.text(), heard.transcript)
        by_kind = defaultdict(list)
        for question, heard in replies:
            by_kind[question.kind].append(heard.text() == question.answer)
        shares = {
            kind: {"asked": len(right), "right_percent": round(percent(right), 1)} for kind, right in by_kind.items()
        }
        self._results.details[what] = shares
        return replies

    def follow_ups(self, conversations: list[Conversation]) -> Iterator[bool]:
        """Whether each reply in a session was right."""
        for talk in told(conversations, "follow-up questions"):
            heard = self._assistant.hear(talk.samples)
            begins = [_frame(start) for start in talk.starts] + [None]
            for question, first, end in zip(talk.questions, begins, begins[1:], strict=False):
                text = heard.text(first or 0, end)
                self._note("follow-up questions", question, text, heard.transcript)
                yield text == question.answer

    def barge_ins(self, conversations: list[Conversation]) -> Iterator[bool]:
        """Whether the assistant fell silent when interrupted, and then replied to the interruption alone."""
        for talk in told(conversations, "interruptions"):
            heard = self._assistant.hear(talk.samples)
            stopped, asked = _frame(talk.starts[1]) + _STOP_FRAMES, _frame(talk.ends[1])
            silent = not heard.text(stopped, asked) and not heard.audible(min(stopped + 2, asked), asked)
            text = heard.text(asked)
            self._note(
                "interruptions" if silent else "interruptions, not silent", talk.questions[1], text, heard.transcript
            )
            yield silent and text == talk.questions[1].answer

    def quiet(self, minutes: dict[str, Any]) -> Iterator[bool]:
        """Whether nothing was said and nothing is heard."""
        for name in told(list(minutes), "minutes without a question"):
            heard = self._assistant.hear(minutes[name])
            quiet = not heard.text() and not heard.audible()
            self._results.details[f"a minute of {name}"] = {"text": heard.text()[:200], "quiet": quiet}
            yield quiet

    def _note(self, what: str, question: Question, text: str, transcript: str) -> None:
        line = {"kind": what, "question": question.text, "wanted": question.answer, "reply": text}
        self._results.log.append(line | {"right": text == question.answer, "transcript": transcript})


def _frame(sample: int) -> int:
    return int(sample / USER_RATE / FRAME_S)


def transcript_errors(replies: list[tuple[Question, Heard]]) -> float:
    """Percent of all words."""
    wanted = [question.transcript.split() for question, _ in replies]
    errors = sum(
        word_errors(words, heard.transcript.split()) for words, (_, heard) in zip(wanted, replies, strict=True)
    )
    return 100 * errors / max(1, sum(map(len, wanted)))


def started_in_time(question: Question, heard: Heard) -> bool:
    """Whether the reply begins to be heard within :data:`START_S`."""
    onset = heard.onset_s(int(question.end_s / FRAME_S))
    return onset is not None and START_S[0] <= onset - question.end_s <= START_S[1]


# ------------------------------------------------------------------------------------------------ judging
def speech_errors(replies: list[Heard], details: dict[str, Any]) -> float:
    """Percent of the words that Whisper does not hear as they are written."""
    whisper, errors, total, worst = Whisper(), 0, 0, []
    for heard in told(replies, "replies heard by Whisper"):
        wanted = scored_words(heard.text())
        said = whisper.hear(_spoken(heard), heard.text())
        wrong = word_errors(wanted, scored_words(said))
        errors, total = errors + wrong, total + len(wanted)
        worst.append((wrong / max(1, len(wanted)), heard.text(), said))
    details["worst heard"] = [{"text": text, "heard": said} for _, text, said in sorted(worst, reverse=True)[:10]]
    return 100 * errors / max(1, total)


def speech_quality(replies: list[Heard]) -> float:
    """Mean of DistillMOS."""
    judge = DistillMos()
    return fmean(judge.rate(_spoken(heard)) for heard in told(replies, "replies rated by DistillMOS"))


def _spoken(heard: Heard) -> Any:
    """The sound of the reply at the judges' rate, from shortly before its first word on."""
    first = max(0, heard.pieces[0][0] - 2)
    return resample(heard.sound(first), heard.rate, RATE)


def speed(model: str | None, frames: int) -> dict[str, Any]:
    """The benchmark's own figures, with mlx-vlm beside where it is installed; on the first two cores where that can be said."""
    import psutil

    process = psutil.Process()
    cores = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None
    try:
        if cores:
            process.cpu_affinity(cores[:2])
        with open_target(model, None, None, "cpu") as target:
            return measure_pipeline(target, Plan(frames, 20, 3, 0), peer=True).result
    finally:
        if cores:
            process.cpu_affinity(cores)


# ------------------------------------------------------------------------------------------------ all of it
def evaluate(options: argparse.Namespace) -> Results:
    """Everything, or the parts that were asked for; see the module."""
    needs_corpus(options.corpus)
    results = Results()
    asked = [part for part in options.only or PARTS if part not in ("ears", "speed")]
    dev: list[tuple[Question, Heard]] = []
    if asked:
        with start_pipeline(options.model) as pipeline:
            examination = Examination(Assistant(pipeline), results)
            for part in asked:
                dev += _examine(part, examination, results, options)
    if options.only is None or "ears" in options.only:
        _judge_by_ear(results, [heard for _, heard in dev if heard.pieces][: options.limit or _JUDGED])
    if options.only is None or "speed" in options.only:
        results.measure("realtime_factor", "ratio_to_mlx_vlm", by=lambda: _speed(results, options))
    return results


def _examine(
    part: str, examination: Examination, results: Results, options: argparse.Namespace
) -> list[tuple[Question, Heard]]:
    """One of the parts that ask; the replies to dev questions."""
    corpus, limit = options.corpus, options.limit
    talks = limit or _CONVERSATIONS
    if part == "dev":
        dev = examination.ask(dev_questions(corpus, limit), "dev questions")
        _judge_dev(results, dev)
        return dev
    if part == "quiet":
        minutes = quiet_minutes(60 if limit is None else 10)
        results.measure("quiet_kept", by=lambda: [percent(examination.quiet(minutes))])
    elif part == "follow-ups":
        results.measure("follow_ups_right", by=lambda: [percent(examination.follow_ups(follow_ups(corpus, talks)))])
    elif part == "interruptions":
        results.measure("barge_ins_right", by=lambda: [percent(examination.barge_ins(barge_ins(corpus, talks)))])
    elif part == "recordings":
        recorded = "recordings"
        results.measure(
            "recordings_right", by=lambda: [_right(examination.ask(recorded_questions(limit=limit), recorded))]
        )
    elif part == "held-out":
        results.measure("held_out_right", by=lambda: [_held_out(results, examination, options)])
    return []


def _judge_by_ear(results: Results, spoken: list[Heard]) -> None:
    if not spoken:
        results.reasons |= dict.fromkeys(("speech_errors", "speech_quality"), "not measured: no reply was spoken")
        return
    results.measure("speech_errors", by=lambda: [speech_errors(spoken, results.details)])
    results.measure("speech_quality", by=lambda: [speech_quality(spoken)])


def _judge_dev(results: Results, dev: list[tuple[Question, Heard]]) -> None:
    results.values["transcript_errors"] = transcript_errors(dev)
    results.values["dev_right"] = _right(dev)
    results.values["prompt_starts"] = percent(started_in_time(*reply) for reply in dev)
    onsets = [(heard.onset_s(int(question.end_s / FRAME_S)), question.end_s) for question, heard in dev]
    delays = sorted(onset - end for onset, end in onsets if onset is not None)
    if delays:
        shown = {"p5": len(delays) // 20, "p50": len(delays) // 2, "p95": len(delays) * 19 // 20}
        results.details["seconds until a reply is heard"] = {name: round(delays[i], 3) for name, i in shown.items()}


def _right(replies: list[tuple[Question, Heard]]) -> float:
    return percent(heard.text() == question.answer for question, heard in replies)


def _held_out(results: Results, examination: Examination, options: argparse.Namespace) -> float:
    count = options.limit or _HELD_OUT
    questions, voices = held_out_questions(options.corpus, options.styles, count, options.spoken)
    results.details["held-out compositions are spoken by"] = voices
    return _right(examination.ask(questions, "held-out compositions"))


def _speed(results: Results, options: argparse.Namespace) -> tuple[float, float]:
    figures = speed(options.model, 125 if options.limit is None else 25)
    results.details["speed"] = {
        "frames_per_s": figures["frames_per_s"],
        "mlx_vlm_frames_per_s": figures["peer"]["frames_per_s"],
        "frames_with_the_peers_codes": figures["frames_with_the_peers_codes"],
    }
    return figures["realtime_factor"], figures["ratio_frames_per_s"]


def show(result: dict[str, Any]) -> None:
    """A table on stdout."""
    table = Table("what", "goal", "measured", "")
    for line in result["measures"]:
        table.add_row(line["what"], line["goal"], line["shown"], {True: "met", False: "missed", None: ""}[line["met"]])
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a small checkpoint.")
    parser.add_argument("--model", metavar="FOLDER", help="checkpoint (default: the one in the package)")
    parser.add_argument("--corpus", type=Path, required=True, metavar="FOLDER", help="what synthesis made")
    parser.add_argument(
        "--styles", type=Path, metavar="FOLDER", help="Kokoro's style tables: held-out lines in its voices"
    )
    parser.add_argument("--spoken", type=Path, metavar="FOLDER", help="keep held-out lines here for the next time")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts of the evaluation (default: all)")
    parser.add_argument("--limit", type=int, metavar="N", help="so many questions of each kind")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="write every question and reply there, a JSON line each"
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    options = parser.parse_args()
    try:
        results = evaluate(options)
    except VcpipeError as error:
        raise SystemExit(f"error: {error}") from None
    if options.log is not None:
        options.log.write_text("".join(json.dumps(line) + "\n" for line in results.log), encoding="utf-8")
        stderr.print(f"{len(results.log)} replies written to {options.log}", markup=False)
    print(json.dumps(results.to_json()))
    if not options.json:
        show(results.to_json())


if __name__ == "__main__":
    main()
