"""Speaks the corpus: replies by Kokoro, questions by Kokoro, flite, festival and espeak-ng. Every step can be stopped and
started again: clips are named by a hash of what is said and how, and one that exists is not made again.

    python -m vcpipe.bench.mini.synthesis answers   --out FOLDER --styles FOLDER [--shard I/N]
    python -m vcpipe.bench.mini.synthesis questions --out FOLDER --styles FOLDER [--shard I/N] [--part P]
    python -m vcpipe.bench.mini.synthesis programs  --out FOLDER [--shard I/N] [--part P]
    python -m vcpipe.bench.mini.synthesis words     --out FOLDER [--styles FOLDER] [--shard I/N]
    python -m vcpipe.bench.mini.synthesis strangers --out FOLDER [--shard I/N]
    python -m vcpipe.bench.mini.synthesis check     --out FOLDER [--share 0.1]
    python -m vcpipe.bench.mini.synthesis index     --out FOLDER
    python -m vcpipe.bench.mini.synthesis say       --out FILE.wav --styles FOLDER --text "What is a puppy?" [--voice NAME]

``answers`` and ``questions`` need Kokoro's packages, ``programs`` the Debian packages (requirements.txt lists both); ``words``
speaks single words by the programs, and by Kokoro where its styles are given; ``strangers`` what is outside the domain, by the
programs. ``check`` lets Whisper hear all replies and a share of the questions; ``index`` writes answers.jsonl and users.jsonl,
without the clips that it could not understand. Shards are for several processes at once. Parts 1, 2, ... speak more lines for
training.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf

from vcpipe.bench.mini import corpus
from vcpipe.bench.mini.clips import level, resample, trim
from vcpipe.bench.mini.plans import GROUPS, clip_id, plan_answers, plan_questions, plan_strangers, plan_words
from vcpipe.bench.mini.progress import told
from vcpipe.bench.mini.sound import ANSWER_RATE, AROUND_S, USER_RATE, Word
from vcpipe.bench.mini.voices import ASSISTANT, PROGRAMS, Speaker, Speech
from vcpipe.launch.console import stderr
from vcpipe.schemas.errors import ConfigError, VcpipeError

Record = dict[str, Any]

#: libsndfile takes Opus' bit rate as a compression level: this one is 24 kb/s.
_OPUS_LEVEL = 1 - (24000 - 6000) / 250000

#: Word error rate above which a clip is left out, where the judge can be trusted: not on spelled letters.
_MOST_ERRORS = 0.34
_HARD_TO_HEAR = {
    *("letter_after", "letter_before", "bare_letter", "letter_code", "letter_ends"),
    *("code_word", "bare_code_word", "first_letter"),
}


class Records:
    """Lines about clips, written as they are made: ``made/NAME.*.jsonl``, one file for each shard."""

    def __init__(self, out: Path, name: str, shard: str = "0/1") -> None:
        folder = out / "made"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.{shard.replace('/', '_')}.jsonl"
        self.done: dict[str, Record] = {}
        for path in sorted(folder.glob(f"{name}.*.jsonl")):
            self.done |= {record["id"]: record for record in _records(path)}

    def add(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _records(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.endswith("}"):  # the last one may be cut
            yield json.loads(line)


# ------------------------------------------------------------------------------------------------ speaking
def make_answers(out: Path, kokoro: Speaker, shard: str, limit: int | None) -> None:
    """Replies and general sentences in the assistant's voice, FLAC at 22.05 kHz."""
    records = Records(out, "answers", shard)
    for record in _to_make(plan_answers()[:limit], records, shard):
        samples, words = _cut(kokoro(record["text"], ASSISTANT, 1.0), ANSWER_RATE, 0.02, 0.04)
        _write(out / "answers" / f"{record['id']}.flac", samples, ANSWER_RATE, "PCM_16", 1.0)
        records.add({**record, "seconds": round(len(samples) / ANSWER_RATE, 3), "speed": 1.0, "words": words})


def make_questions(
    out: Path, name: str, plan: list[Record], speakers: Mapping[str, Speaker], shard: str, limit: int | None
) -> None:
    """What users say, as planned, Opus at 16 kHz; ``name`` of its records. What a program can not say is skipped."""
    records = Records(out, name, shard)
    for record in _to_make(plan[:limit], records, shard):
        try:
            speech = speakers[record["engine"]](record["text"], record["voice"], record["speed"])
        except subprocess.SubprocessError as error:
            stderr.print(f"skipped: {record['text']} ({error})", markup=False)
            continue
        samples, words = _cut(speech, USER_RATE, *AROUND_S)
        _write(out / "users" / f"{record['id']}.ogg", samples, USER_RATE, "OPUS", _OPUS_LEVEL)
        timed = {} if words is None else {"words": words}
        records.add({**record, "seconds": round(len(samples) / USER_RATE, 3), **timed})


def _name(group: str, part: int) -> str:
    """Of the records of a part of a group's plan."""
    return f"{group}_{part}" if part else group


def _made_plans(out: Path) -> Iterator[tuple[dict[str, Record], list[Record]]]:
    """Of each plan that may have been spoken: what was made, by its ids, and the plan."""
    for group in GROUPS:
        for part in count():
            made = Records(out, _name(group, part)).done
            if part and not made:
                break
            yield made, plan_questions(group, part)
        yield Records(out, f"{group}_words").done, plan_words(group)
    yield Records(out, "strangers").done, plan_strangers()


def _made_questions(out: Path) -> list[Record]:
    """What users say of all that was planned and made, in the plans' order. Few clips are in two plans."""
    found: dict[str, Record] = {}
    for made, plan in _made_plans(out):
        for record in plan:
            if record["id"] in made:
                found.setdefault(record["id"], made[record["id"]])
    return list(found.values())


def question(speech: Speech) -> np.ndarray:
    """What was spoken as a question of the corpus has it: (n,) float32 at 16 kHz, trimmed and levelled."""
    return _cut(speech, USER_RATE, *AROUND_S)[0]


def _cut(speech: Speech, rate: int, before: float, after: float) -> tuple[np.ndarray, list[Word] | None]:
    samples, words = trim(resample(speech.samples, speech.rate, rate), rate, speech.words, before, after)
    return level(samples), words


def _to_make(plan: list[Record], records: Records, shard: str) -> Iterator[Record]:
    """This shard's part of the plan that is not made yet; tells how far it is."""
    index, count = map(int, shard.split("/"))
    left = [record for record in plan[index::count] if record["id"] not in records.done]
    return told(left, "clips")


def _write(path: Path, samples: np.ndarray, rate: int, subtype: str, compression: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "OGG" if subtype == "OPUS" else "FLAC"
    sf.write(path, np.clip(samples, -1, 1), rate, format=kind, subtype=subtype, compression_level=compression)


# ------------------------------------------------------------------------------------------------ check and index
def check(out: Path, share: float, shard: str) -> None:
    """What Whisper hears of every reply and of a fixed random share of the questions."""
    from vcpipe.bench.mini.judge import Whisper, scored_words
    from vcpipe.bench.mini.scoring import word_errors

    whisper, heard = Whisper(), Records(out, "heard", shard)
    plan = [record | {"file": f"answers/{record['id']}.flac"} for record in Records(out, "answers").done.values()]
    for record in _made_questions(out):
        if random.Random(record["id"]).random() < share:
            plan.append(record | {"file": f"users/{record['id']}.ogg"})
    for record in _to_make(plan, heard, shard):
        samples, rate = sf.read(out / record["file"], dtype="float32")
        text = whisper.hear(resample(samples, rate, USER_RATE), record["text"])
        wanted = scored_words(record["text"])
        errors = word_errors(wanted, scored_words(text))
        line = {"id": record["id"], "text": record["text"], "heard": text, "errors": errors, "words": len(wanted)}
        heard.add(line | {"voice": record.get("engine", record.get("kind"))})


def index(out: Path) -> None:
    """answers.jsonl and users.jsonl of the clips that exist, and check.json with the word error rates."""
    heard = Records(out, "heard").done
    rates = {id_: line["errors"] / max(1, line["words"]) for id_, line in heard.items()}
    made = Records(out, "answers").done
    answers = [made[plan["id"]] for plan in plan_answers() if plan["id"] in made]
    answers = [line for line in answers if line["kind"] == "answer" or rates.get(line["id"], 0) <= _MOST_ERRORS]
    _write_index(out / "answers.jsonl", answers, rates)
    questions = []
    for line in _made_questions(out):
        if line["intent"] in _HARD_TO_HEAR or rates.get(line["id"], 0) <= _MOST_ERRORS:
            extra = {"transcript": corpus.transcript(line["text"]), "answer_id": clip_id("a", line["answer"])}
            questions.append(line | extra)
    _write_index(out / "users.jsonl", questions, rates)
    totals: dict[str, dict[str, int]] = {}
    for line in heard.values():
        total = totals.setdefault(line["voice"], {"clips": 0, "words": 0, "errors": 0})
        total["clips"] += 1
        total["words"] += line["words"]
        total["errors"] += line["errors"]
    above = [[line["text"], line["heard"], line["voice"]] for id_, line in heard.items() if rates[id_] > _MOST_ERRORS]
    (out / "check.json").write_text(json.dumps({"rates": totals, "above_limit": sorted(above)}, indent=1) + "\n")


def _write_index(path: Path, lines: Iterable[Record], rates: dict[str, float]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            heard = {"wer": round(rates[line["id"]], 3)} if line["id"] in rates else {}
            file.write(json.dumps(line | heard, ensure_ascii=False) + "\n")


# ------------------------------------------------------------------------------------------------ command line
def _kokoro(styles: Path | None) -> Speaker:
    from vcpipe.bench.mini.kokoro import Kokoro

    if styles is None:
        raise ConfigError("Kokoro needs --styles: the folder voices/ of the package kokoro-js")
    return Kokoro(styles).say


def _run(options: argparse.Namespace) -> None:
    out, shard, limit, part = options.out, options.shard, options.limit, options.part

    def speak(group: str, name: str, plan: list[Record]) -> None:
        speakers = PROGRAMS if group == "programs" else {"kokoro": _kokoro(options.styles)}
        make_questions(out, name, plan, speakers, shard, limit)

    match options.step:
        case "answers":
            make_answers(out, _kokoro(options.styles), shard, limit)
        case "questions":
            speak("kokoro", _name("kokoro", part), plan_questions("kokoro", part))
        case "programs":
            speak("programs", _name("programs", part), plan_questions("programs", part))
        case "words":
            for group in GROUPS if options.styles else ("programs",):
                speak(group, f"{group}_words", plan_words(group))
        case "strangers":
            speak("programs", "strangers", plan_strangers())
        case "check":
            check(out, options.share, shard)
        case "index":
            index(out)
        case "say":
            sf.write(
                out, question(_kokoro(options.styles)(options.text, options.voice, 1.0)), USER_RATE, subtype="PCM_16"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Speak the corpus.")
    parser.add_argument(
        "step", choices=["answers", "questions", "programs", "words", "strangers", "check", "index", "say"]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpus")
    parser.add_argument("--styles", type=Path, help="folder with Kokoro's style tables, NAME.bin")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="part I of N, for several processes")
    parser.add_argument(
        "--part", type=int, default=0, metavar="P", help="of the questions' plans; 0 holds the dev split"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the plan's first N clips only")
    parser.add_argument("--share", type=float, default=0.1, help="share of the questions that are heard")
    parser.add_argument("--text", default="What is the capital of France?", help="what to say")
    parser.add_argument("--voice", default="am_michael", help="Kokoro's voice to say it")
    try:
        _run(parser.parse_args())
    except VcpipeError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
