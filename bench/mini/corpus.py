"""The domain as a corpus: every question with its one right reply, its intent and its split; and further sentences.

The reply is a function of the question, so the pairs can be learnt and scored exactly. Splits:

* ``train``: what a model may learn from;
* ``dev``: other wordings of the same compositions, about 6 %;
* ``test``: compositions (pairs of numbers, neighbours of a number, a country in a wording) that no line of the others has.

A hash of the text divides them: the same everywhere, and no line moves when intents are added.

    python -m vcpipe.bench.mini.corpus

prints how many lines each intent has, and one of them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cache

from vcpipe.bench.mini.wordings import Line, bucket, lines, number

__all__ = ["Item", "answers", "items", "number", "reply_to", "reply_to_others", "transcript"]

_DEV_PERCENT = 6


@dataclass(frozen=True)
class Item:
    """``question`` as it is written, to be spoken; ``composition``: lines with an equal one are in one split."""

    question: str
    answer: str
    intent: str
    split: str
    composition: str


def transcript(text: str) -> str:
    """Lower case without punctuation: what the transcript should hold, and what is scored."""
    return " ".join(re.sub(r"[^a-z' ]", " ", text.lower()).split())


def items() -> list[Item]:
    """All lines, each question once. ValueError where one question has two replies."""
    found: dict[str, Item] = {}
    for line in lines():
        if line.question not in found:
            found[line.question] = _item(line)
        elif found[line.question].answer != line.answer:
            raise ValueError(f"two replies to {line.question!r}: {found[line.question].answer!r}, {line.answer!r}")
    learnt = {item.answer for item in found.values() if item.split == "train"}
    # A reply that no line of train asks for could not be learnt: its dev lines go back.
    return [
        replace(item, split="train") if item.split == "dev" and item.answer not in learnt else item
        for item in found.values()
    ]


def answers() -> list[str]:
    """The replies that lines of train and dev ask for, in order of first use."""
    return list(dict.fromkeys(item.answer for item in items() if item.split != "test"))


def reply_to(words: str) -> str | None:
    """The right reply to a question given as its words, whatever their case and punctuation; None outside the domain.

    Where two questions differ in punctuation alone they have one reply, but for the letter A and the article.
    """
    return _replies().get(transcript(words))


def reply_to_others() -> str:
    """The reply to whatever is outside the domain."""
    return next(item.answer for item in items() if item.intent == "unknown")


@cache
def _replies() -> dict[str, str]:
    return {transcript(item.question): item.answer for item in reversed(items())}


def _item(line: Line) -> Item:
    key = transcript(line.question)
    if line.intent in ("bare_letter", "letter_after", "letter_before") and " " not in key:
        key = line.question  # "A." alone is not the article
    dev = bucket(f"dev {key}", 100) < _DEV_PERCENT
    split = "test" if line.held else "dev" if dev else "train"
    return Item(line.question, line.answer, line.intent, split, line.composition or key)


def main() -> None:
    every = items()
    by_intent = defaultdict(list)
    for item in every:
        by_intent[item.intent].append(item)
    splits = ", ".join(f"{split} {count}" for split, count in Counter(item.split for item in every).items())
    print(f"{len(every)} lines ({splits}), {len(answers())} replies in train and dev")
    for intent, group in by_intent.items():
        example = group[len(group) // 2]
        print(f"{intent:16} {len(group):5} lines, such as {example.question} -> {example.answer}")


if __name__ == "__main__":
    main()
