"""Sentences of the replies' words in other orders, for the codec and the speech decoder."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from vcpipe.bench.mini import domain
from vcpipe.bench.mini.wordings import ORDINALS, capital, number

_COLORS = "red blue green yellow white black brown orange purple pink gray"
_MORE_ANIMALS = {"horse", "spider", "whale", "camel"}
_NOT_ADJECTIVES = "up down left right day night first last push pull inside outside near far"
_MORE_NOUNS = "window door chair violin hammer apple lemon shirt car bicycle house jacket"


def general_sentences(count: int, seed: int = 7) -> list[str]:
    """``count`` different sentences; the same for the same seed."""
    patterns = _patterns(random.Random(seed))
    sentences: dict[str, None] = {}
    while len(sentences) < count:
        sentence = patterns[len(sentences) % len(patterns)]()
        sentences[re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", sentence)] = None
    return list(sentences)


def _patterns(rng: random.Random) -> list[Callable[[], str]]:
    """Functions that make one sentence each. Their words are drawn from left to right."""
    days, months, letters = domain.DAYS, domain.MONTHS, domain.LETTERS[1:]
    cities, lands = list(domain.CAPITALS.values()), list(domain.CAPITALS)
    animals = sorted(set(domain.SOUNDS) | set(domain.YOUNG) | _MORE_ANIMALS)
    plurals = {animal: animal if animal == "sheep" else f"{animal}s" for animal in animals}
    adjectives = sorted({word for pair in domain.OPPOSITES for word in pair} - set(_NOT_ADJECTIVES.split()))
    nouns = [*domain.SAY_WORDS[:7], *_MORE_NOUNS.split()]
    colors = _COLORS.split()

    def a(words: list[str]) -> str:
        return rng.choice(words)

    def of(*words: str) -> str:
        return rng.choice(words)

    def count(low: int = 2, high: int = 99) -> str:
        return number(rng.randint(low, high))

    def ordinal() -> str:
        return ORDINALS[rng.randint(0, 11)]

    return [
        lambda: f"On {a(days)} we saw {count(2, 20)} {a(colors)} {plurals[a(animals)]} near {a(cities)}.",
        lambda: f"In {a(months)} the {a(nouns)} is {a(adjectives)}, but the {a(nouns)} is {a(adjectives)}.",
        lambda: (
            f"{capital(count())} and {count()}, not {count()}, "
            f"said the {of('teacher', 'doctor', 'farmer', 'pilot', 'baker')}."
        ),
        lambda: (
            f"The {a(adjectives)} {a(animals)} from {a(lands)} has {count(2, 12)} {of('legs', 'eyes', 'toes', 'wings')}."
        ),
        lambda: f"From {a(cities)} to {a(cities)} it is {count(20, 99)} kilometers, and we walk.",
        lambda: (
            f"{a(months)}, {a(months)} and {a(months)} come before the {ordinal()} "
            f"{of('week', 'day', 'month', 'year')}."
        ),
        lambda: (
            f"Say {a(domain.CODE_WORDS)}, {a(domain.CODE_WORDS)}, {a(domain.CODE_WORDS)} "
            f"and then wait {count(2, 60)} seconds."
        ),
        lambda: f"Yes, I know {a(cities)}, and no, I do not live in {a(lands)}.",
        lambda: f"A {a(animals)} is never {a(adjectives)} when the {a(animals)} is {a(adjectives)}.",
        lambda: (
            f"Put the {a(colors)} {a(nouns)} on the {of('left', 'right', 'table', 'first chair', 'last chair')}, please."
        ),
        lambda: f"{a(days)} was {a(adjectives)}, {a(days)} was {a(adjectives)}, and {a(days)} is today.",
        lambda: (
            f"Sorry, there are only {count(2, 40)} {plurals[a(animals)]} and {count(2, 40)} "
            f"{of('hours', 'minutes', 'letters', 'apples')} in {a(lands)}."
        ),
        lambda: f"The letters {', '.join(rng.sample(letters, 3))} and {rng.choice(letters)} are {a(colors)}.",
        lambda: f"Hello, my {a(adjectives)} friend, can you hear the {a(animals)} in the {a(nouns)}?",
        lambda: (
            f"Why does the {of('doctor', 'teacher', 'pilot', 'baker')} in {a(cities)} like {a(colors)} "
            f"{of('snow', 'milk', 'grass', 'chocolate', 'gold', 'water')}?"
        ),
    ]
