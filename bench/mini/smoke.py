"""Chooses the questions of the smoke test: dev questions that a checkpoint answers also when they are said a bit otherwise.

    python -m vcpipe.bench.mini.smoke --corpus FOLDER [--model FOLDER] --out tests/data/questions

Sums in another order may round otherwise on another machine, so a question is asked louder, more softly and between frames too,
and has to be answered each time.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import soundfile as sf

from vcpipe.bench.mini.assistant import FRAME_S, Assistant
from vcpipe.bench.mini.progress import told
from vcpipe.bench.mini.questions import Question, dev_questions, needs_corpus
from vcpipe.bench.mini.sound import USER_RATE
from vcpipe.launch.library import start_pipeline
from vcpipe.schemas.errors import VcpipeError

#: How many questions of each engine.
WANTED = {"kokoro": 4, "flite": 3, "espeak": 1, "festival": 2}

#: Of the ten so many at most are of one family of intents, as all calculations are.
_OF_A_FAMILY = 3

#: Factor of the sound, and samples of silence before it.
MANNERS = ((1.0, 0), (0.7, 0), (1.3, 0), (1.0, 640))

#: Seconds from the end of the sound to the reply; the test allows 0.05 more on either side.
_START_S = (0.25, 0.85)


def stands(assistant: Assistant, question: Question) -> bool:
    """Whether it is heard and answered in all manners, in time, and followed by silence."""
    return all(_answers(assistant, question, *manner) for manner in MANNERS)


def _answers(assistant: Assistant, question: Question, factor: float, lead: int) -> bool:
    sound = np.concatenate([np.zeros(lead, np.float32), np.clip(factor * question.samples, -1, 1)])
    heard = assistant.hear(sound)
    if (heard.transcript, heard.text()) != (question.transcript, question.answer):
        return False
    asked = -(-len(sound) // round(FRAME_S * USER_RATE))
    onset = heard.onset_s(0)
    early, late = _START_S
    in_time = onset is not None and early <= onset - asked * FRAME_S <= late
    return in_time and not heard.audible(heard.frames - 3)


def choose(asked: Iterable[Question], stand: Callable[[Question], bool], wanted: Mapping[str, int]) -> list[Question]:
    """The first that ``stand``, so many of each kind, no two with the same reply, and of many families of intents."""
    chosen: list[Question] = []
    for question in asked:
        if len(chosen) == sum(wanted.values()):
            break
        is_full = sum(each.kind == question.kind for each in chosen) >= wanted.get(question.kind, 0)
        alike = sum(_family(each) == _family(question) for each in chosen)
        is_new = question.answer not in {each.answer for each in chosen} and alike < _OF_A_FAMILY
        if not is_full and is_new and stand(question):
            chosen.append(question)
    return chosen


def _family(question: Question) -> str:
    """The intent up to its first underscore."""
    return question.intent.split("_")[0]


def write(chosen: list[Question], out: Path) -> None:
    """A recording each and questions.json, in place of those in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.flac"), *out.glob("questions.json")):
        old.unlink()
    lines = []
    for question in chosen:
        name = f"{question.transcript.replace(' ', '_')}.flac"
        sf.write(out / name, question.samples, USER_RATE)
        said = {"transcript": question.transcript, "reply": question.answer}
        lines.append({"file": name, "voice": f"{question.kind} {question.voice}", **said})
    (out / "questions.json").write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose the questions of the smoke test.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the corpus")
    parser.add_argument("--model", help="checkpoint folder (default: the one in the package)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the recordings and questions.json")
    options = parser.parse_args()
    try:
        needs_corpus(options.corpus)
        with start_pipeline(options.model) as pipeline:
            assistant = Assistant(pipeline)
            asked = told(dev_questions(options.corpus), "dev questions")
            chosen = choose(asked, lambda question: stands(assistant, question), WANTED)
    except VcpipeError as error:
        raise SystemExit(f"error: {error}") from None
    write(chosen, options.out)
    missing = Counter(WANTED) - Counter(question.kind for question in chosen)
    print(f"{options.out}: {len(chosen)} questions" + (f"; none left for {dict(missing)}" if missing else ""))


if __name__ == "__main__":
    main()
