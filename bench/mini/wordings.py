"""Every line of the domain: how questions about each of its facts are worded, and the one right reply to each.

The lines come in a fixed order, which the plans of what is spoken depend on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vcpipe.bench.mini import domain

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
ONES, TENS, ORDINALS = _ONES.split(), _TENS.split(), _ORDINALS.split()

_SEASONS = ("winter", "spring", "summer", "autumn")


class Line(NamedTuple):
    """A question and its reply. ``composition``: what it puts together, if anything; ``held``: kept for testing."""

    question: str
    answer: str
    intent: str
    composition: str | None
    held: bool


def lines() -> Iterator[Line]:
    """All lines; a question may come again with the same reply."""
    for reply, questions in domain.SMALLTALK:
        yield from _ask("smalltalk", reply, questions)
    yield from _arithmetic()
    yield from _numbers()
    yield from _comparisons()
    yield from _days()
    yield from _months()
    yield from _capitals()
    yield from _words()
    yield from _letters()
    yield from _things()
    for reply, question in domain.YES_NO.items():
        body = question.removesuffix("?")
        yield from _ask("yes_no", reply, [question, f"Tell me, {body[0].lower()}{body[1:]}?", f"{body}, yes or no?"])
    for reply, questions in domain.FACTS:
        yield from _ask("fact", reply, questions)
    yield from _ask("unknown", domain.UNKNOWN_ANSWER, domain.UNKNOWN)


# ------------------------------------------------------------------------------------------------ words
def number(n: int) -> str:
    """0 to 199 in words, without hyphens."""
    if n >= 100:
        return f"one hundred {number(n - 100)}" if n > 100 else "one hundred"
    if n < 20:
        return ONES[n]
    tens = TENS[n // 10 - 2]
    return f"{tens} {ONES[n % 10]}" if n % 10 else tens


def capital(text: str) -> str:
    """The first letter in upper case, the others as they are."""
    return text[0].upper() + text[1:]


def bucket(key: str, buckets: int) -> int:
    """A number below ``buckets`` that depends on ``key`` alone, the same everywhere."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") % buckets


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _ask(
    intent: str, answer: str, questions: Iterable[str], composition: str | None = None, held: bool = False
) -> Iterator[Line]:
    return (Line(question, answer, intent, composition, held) for question in questions)


# ------------------------------------------------------------------------------------------------ numbers
def _arithmetic() -> Iterator[Line]:
    """The reply tells the result alone, so that about 100 replies cover every pair of numbers."""
    for a in range(21):
        for b in range(21):
            yield from _calculation("plus", a, b, a + b, "Add {a} and {b}.", "What do you get if you add {a} and {b}?")
    for a in range(21):
        for b in range(a + 1):
            yield from _calculation(
                "minus", a, b, a - b, "Take {b} from {a}.", "What is left if you take {b} from {a}?"
            )
    for a in range(11):
        for b in range(11):
            forms = "Multiply {a} by {b}.", "What do you get if you multiply {a} by {b}?"
            yield from _calculation("times", a, b, a * b, *forms)
    for a in range(1, 6):
        for b in range(1, 6):
            sum_ = f"the sum of {number(a)} and {number(b)}"
            key = f"{a} plus {b} long"
            reply = f"{capital(number(a))} plus {number(b)} is {number(a + b)}."
            questions = [f"Say {sum_}.", f"Please say {sum_}.", f"Give me {sum_}."]
            yield from _ask("sum_sentence", reply, questions, key, bucket(f"arith long {key}", 5) == 0)
    for n in range(21):
        key, name = f"double {n}", number(n)
        questions = [f"What is double {name}?", f"Double {name}.", f"What is twice {name}?"]
        yield from _ask("double", f"It is {number(2 * n)}.", questions, key, bucket(key, 6) == 0)
        key, name = f"half {2 * n}", number(2 * n)
        questions = [f"What is half of {name}?", f"Half of {name}."]
        yield from _ask("half", f"It is {number(n)}.", questions, key, bucket(key, 6) == 0)


def further_sums(largest: int = 40) -> Iterator[Line]:
    """Calculations outside the domain, with numbers up to ``largest`` and results up to 100, to be learnt from and not scored.

    The domain's pairs of numbers are so few that they could be learnt by heart.
    """
    for a in range(largest + 1):
        for b in range(largest + 1):
            if max(a, b) > 20 and a + b <= 100:
                yield from _calculation(
                    "plus", a, b, a + b, "Add {a} and {b}.", "What do you get if you add {a} and {b}?"
                )
            if a > 20 and b <= a:
                yield from _calculation("minus", a, b, a - b, "Take {b} from {a}.")
            if max(a, b) > 10 and a * b <= 100:
                yield from _calculation("times", a, b, a * b, "Multiply {a} by {b}.")


def _calculation(operation: str, a: int, b: int, result: int, *forms: str) -> Iterator[Line]:
    key = f"{a} {operation} {b}"
    term = f"{number(a)} {operation} {number(b)}"
    questions = [
        f"What is {term}?",
        f"How much is {term}?",
        f"{capital(term)}.",
        f"{capital(term)}?",
        f"Tell me {term}.",
        f"Please work out {term}.",
        f"What does {term} make?",
        f"Calculate {term}.",
        *(form.format(a=number(a), b=number(b)) for form in forms),
    ]
    reply = f"It is {number(result)}."
    yield from _ask(f"arithmetic_{operation}", reply, questions, key, bucket(f"arith {key}", 5) == 0)


def _numbers() -> Iterator[Line]:
    for n in range(100):
        name, following = number(n), number(n + 1)
        questions = [
            f"What number comes after {name}?",
            f"Which number follows {name}?",
            f"What comes after {name}?",
            f"What is one more than {name}?",
            f"Tell me the number after {name}.",
        ]
        key = f"after {n}"
        yield from _ask("number_after", f"It is {following}.", questions, key, bucket(key, 7) == 0)
        questions = [
            f"What number comes before {following}?",
            f"What comes before {following}?",
            f"What is one less than {following}?",
            f"Tell me the number before {following}.",
        ]
        key = f"before {n + 1}"
        yield from _ask("number_before", f"It is {name}.", questions, key, bucket(key, 7) == 0)
    for n in [*range(21), *range(30, 100, 10)]:
        name = capital(number(n))
        questions = [f"{name}.", f"{name}?", f"The number {number(n)}."]
        yield from _ask("bare_number", f"After {number(n)} comes {number(n + 1)}.", questions)


def _comparisons() -> Iterator[Line]:
    for a in range(21):
        for b in range(21):
            if a == b:
                continue
            pair = f"{number(a)} or {number(b)}"
            questions = [f"Which is bigger, {pair}?", f"Which number is larger, {pair}?"]
            # Both orders of a pair stay on one side.
            held = bucket(f"bigger {min(a, b)} {max(a, b)}", 5) == 0
            yield from _ask("bigger", f"{capital(number(max(a, b)))} is bigger.", questions, f"bigger {a} {b}", held)
    for n in range(21):
        name = number(n)
        questions = [
            f"Is {name} even or odd?",
            f"Is {name} odd or even?",
            f"Is the number {name} even?",
            f"Is the number {name} odd?",
        ]
        yield from _ask("even_odd", f"{capital(name)} is {'odd' if n % 2 else 'even'}.", questions)


# ------------------------------------------------------------------------------------------------ days and months
def _days() -> Iterator[Line]:
    days = domain.DAYS
    for i, day in enumerate(days):
        before, after = days[i - 1], days[(i + 1) % 7]
        follows, precedes = f"After {day} comes {after}.", f"Before {day} comes {before}."
        questions = [
            f"What day comes after {day}?",
            f"Which day follows {day}?",
            f"Tell me the day after {day}.",
            f"What is the day after {day}?",
            f"What comes after {day}?",
        ]
        yield from _ask("day_after", follows, questions)
        yield from _ask("bare_day", follows, [f"{day}.", f"{day}?"])
        questions = [
            f"What day comes before {day}?",
            f"Which day is before {day}?",
            f"Tell me the day before {day}.",
            f"What is the day before {day}?",
            f"What comes before {day}?",
        ]
        yield from _ask("day_before", precedes, questions)
        reply = f"{day} is on the weekend." if i > 4 else f"{day} is a weekday."
        questions = [f"Is {day} a weekday?", f"Is {day} on the weekend?", f"Do people work on {day}?"]
        yield from _ask("weekday", reply, questions)
        questions = [f"If today is {day}, what day is tomorrow?", f"Today is {day}. What is tomorrow?"]
        yield from _ask("day_tomorrow", f"It is {after}.", questions)
        questions = [f"If today is {day}, what day was yesterday?", f"Today is {day}. What was yesterday?"]
        yield from _ask("day_yesterday", f"It is {before}.", questions)
        which = f"the {ORDINALS[i]} day of the week"
        yield from _ask("day_number", f"It is {day}.", [f"What is {which}?", f"Which day is {which}?"])
    questions = ["Which days are the weekend?", "When is the weekend?", "What is the weekend?"]
    yield from _ask("days_list", "The weekend is Saturday and Sunday.", questions)


def _months() -> Iterator[Line]:
    months = domain.MONTHS
    for i, month in enumerate(months):
        before, after, ordinal = months[i - 1], months[(i + 1) % 12], ORDINALS[i]
        questions = [
            f"What month comes after {month}?",
            f"Which month follows {month}?",
            f"What is the month after {month}?",
            f"What comes after {month}?",
        ]
        yield from _ask("month_after", f"After {month} comes {after}.", questions)
        yield from _ask("bare_month", f"After {month} comes {after}.", [f"{month}.", f"{month}?"])
        questions = [
            f"What month comes before {month}?",
            f"Which month is before {month}?",
            f"What is the month before {month}?",
            f"What comes before {month}?",
        ]
        yield from _ask("month_before", f"Before {month} comes {before}.", questions)
        questions = [
            f"Which month of the year is {month}?",
            f"What number is the month {month}?",
            f"What is the number of {month}?",
        ]
        yield from _ask("month_rank", f"{month} is the {ordinal} month.", questions)
        questions = [
            f"What is the {ordinal} month?",
            f"Which month is the {ordinal} month of the year?",
            f"Name the {ordinal} month.",
        ]
        yield from _ask("month_number", f"It is {month}.", questions)
        questions = [f"How many days are in {month}?", f"How many days does {month} have?", f"How long is {month}?"]
        yield from _ask("month_days", f"{month} has {number(domain.MONTH_DAYS[i])} days.", questions)
        questions = [f"Which season is it in {month}?", f"What season is {month} in?"]
        yield from _ask("month_season", f"It is {_SEASONS[(i + 1) % 12 // 3]}.", questions)


# ------------------------------------------------------------------------------------------------ capitals, words, letters
def _capitals() -> Iterator[Line]:
    for country, city in domain.CAPITALS.items():
        forms = [
            f"What is the capital of {country}?",
            f"Tell me the capital of {country}.",
            f"Which city is the capital of {country}?",
            f"Name the capital of {country}.",
            f"What is {country}'s capital?",
            f"Do you know the capital of {country}?",
        ]
        held = [form for form in range(len(forms)) if bucket(f"capital {country} {form}", 6) == 0][:2]
        if country == "France":  # the example that everybody tries first
            held = [form for form in held if form != 0]
        for form, question in enumerate(forms):
            key = f"capital {country} {form}"
            yield Line(question, f"The capital of {country} is {city}.", "capital", key, form in held)
        questions = [f"Where is {city}?", f"Which country is {city} in?", f"In which country is {city}?"]
        yield from _ask("city_country", f"{city} is in {country}.", questions)


def _words() -> Iterator[Line]:
    for pair in domain.OPPOSITES:
        for word, other in (pair, pair[::-1]):
            questions = [
                f"What is the opposite of {word}?",
                f"Tell me the opposite of {word}.",
                f"What is the reverse of {word}?",
                f"The opposite of {word}?",
                f"Give me the opposite of {word}.",
            ]
            yield from _ask("opposite", f"The opposite of {word} is {other}.", questions)
    for word, plural in domain.PLURALS.items():
        questions = [f"What is the plural of {word}?", f"Tell me the plural of {word}.", f"The plural of {word}?"]
        yield from _ask("plural", f"The plural of {word} is {plural}.", questions)
    for word, kind in domain.KINDS.items():
        thing = word if word in ("gold", "red") else _with_article(word)
        questions = [f"What is {thing}?", f"What kind of thing is {thing}?", f"Tell me what {thing} is."]
        yield from _ask("kind", capital(f"{thing} is {kind}."), questions)
    for word in domain.SAY_WORDS:
        questions = [f"Say {word}.", f"Please say {word}.", f"Repeat after me, {word}.", f"Can you say {word}?"]
        yield from _ask("say", capital(word) + ".", questions)
    for word in domain.FIRST_LETTER:
        questions = [
            f"What is the first letter of {word}?",
            f"Which letter does {word} start with?",
            f"What does {word} begin with?",
        ]
        yield from _ask("first_letter", f"{capital(word)} starts with {word[0].upper()}.", questions)


def _letters() -> Iterator[Line]:
    for i, (letter, code) in enumerate(zip(domain.LETTERS, domain.CODE_WORDS, strict=True)):
        yield from _neighbours(letter, domain.LETTERS[i + 1 : i + 2])
        reply = f"{capital(code)} stands for {letter}."
        questions = [f"What does {code} stand for?", f"Which letter is {code}?", f"What letter does {code} mean?"]
        yield from _ask("code_word", reply, questions)
        # "November." alone is the month.
        bare = [] if code == "november" else [f"{capital(code)}."]
        yield from _ask("bare_code_word", reply, [*bare, f"Code word {code}."])
        questions = [
            f"What is the code word for {letter}?",
            f"Tell me the code word for {letter}.",
            f"How do you say the letter {letter} in code?",
        ]
        yield from _ask("letter_code", f"The code word is {code}.", questions)
    yield from _ask("letter_ends", "A is the first letter.", _ends("first"))


def _neighbours(letter: str, following: str) -> Iterator[Line]:
    """``following``: the next letter, or nothing after the last."""
    bare = [f"{letter}.", f"The letter {letter}."]
    if not following:
        last = f"{letter} is the last letter."
        yield from _ask("letter_after", last, [f"What letter comes after {letter}?", f"What comes after {letter}?"])
        yield from _ask("bare_letter", last, bare)
        yield from _ask("letter_ends", last, _ends("last"))
        return
    questions = [
        f"What letter comes after {letter}?",
        f"Which letter follows {letter}?",
        f"What comes after {letter}?",
        f"What is the letter after {letter}?",
    ]
    yield from _ask("letter_after", f"After {letter} comes {following}.", questions)
    questions = [
        f"What letter comes before {following}?",
        f"Which letter is before {following}?",
        f"What comes before {following}?",
        f"What is the letter before {following}?",
    ]
    yield from _ask("letter_before", f"Before {following} comes {letter}.", questions)
    yield from _ask("bare_letter", f"After {letter} comes {following}.", bare)


def _ends(which: str) -> list[str]:
    letter = f"What is the {which} letter"
    return [f"{letter}?", f"Which letter comes {which}?", f"{letter} of the alphabet?"]


# ------------------------------------------------------------------------------------------------ things and animals
def _things() -> Iterator[Line]:
    for (first, second), mixed in domain.MIXES.items():
        questions = []
        for pair in (f"{first} and {second}", f"{second} and {first}"):
            mix = f"Which color do you get when you mix {pair}?"
            questions += [f"What do {pair} make?", mix, f"Mix {pair}."]
        yield from _ask("mix", capital(f"{first} and {second} make {mixed}."), questions)
    for thing, color in domain.THINGS.items():
        questions = [f"What color is {thing}?", f"Which color is {thing}?", f"Tell me the color of {thing}."]
        yield from _ask("color", capital(f"{thing} is {color}."), questions)
    for animal, sound in domain.SOUNDS.items():
        one = _with_article(animal)
        questions = [f"What does {one} say?", f"What sound does {one} make?", f"Which animal says {sound}?"]
        yield from _ask("sound", capital(f"{one} says {sound}."), questions)
    for animal, young in domain.YOUNG.items():
        questions = [
            f"What is a young {animal} called?",
            f"What do you call a baby {animal}?",
            f"What is a baby {animal}?",
            f"What is {young}?",
        ]
        yield from _ask("young", f"A young {animal} is {young}.", questions)
    for animal, count in domain.LEGS.items():
        one, legs = _with_article(animal), number(int(count)) if count != "0" else "no"
        questions = [
            f"How many legs does {one} have?",
            f"How many legs has {one}?",
            f"Tell me how many legs {one} has.",
        ]
        yield from _ask("legs", capital(f"{one} has {legs} legs."), questions)
    yield from _counts()


def _counts() -> Iterator[Line]:
    for parts, whole, reply in domain.COUNTS:
        place = "in" if parts in ("letters", "players") else "on"
        questions = [
            f"How many {parts} does {whole} have?",
            f"How many {parts} are {place} {whole}?",
            f"Tell me how many {parts} {whole} has.",
        ]
        yield from _ask("count", reply, questions)
    for small, large, count in domain.UNITS:
        questions = [
            f"How many {small} are in {large}?",
            f"How many {small} are there in {large}?",
            f"How many {small} make {large}?",
            f"Tell me how many {small} are in {large}.",
        ]
        yield from _ask("unit", f"There are {count} {small} in {large}.", questions)
