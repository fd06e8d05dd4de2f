"""Things said to the assistant that are none of its business, in words that its domain does not have."""

from __future__ import annotations

import random

from vcpipe.bench.mini.domain import words

_THINGS = words("""
    train bus plane ticket hotel taxi pizza coffee tea sandwich soup salad phone computer camera movie song newspaper letter
    package key wallet umbrella suitcase passport medicine bicycle engine ladder carpet sofa lamp mirror pillow towel
    museum theater stadium airport station bridge castle tower church library school hospital bank supermarket pharmacy
""")
_PEOPLE = words("""
    mother father brother sister uncle aunt neighbor manager waiter lawyer driver singer painter president queen
    captain dentist plumber cousin grandmother
""")
_NAMES = words("Thomas Sarah Peter Linda Robert Emma Michael Julia David Laura Martin Sophie")
_PLACES = words("Chicago Boston Texas Hollywood Manchester Sydney Geneva Milan Hamburg Barcelona Toronto Singapore")
_TIMES = ["tonight", "this afternoon", "next weekend", "last summer", "at midnight", "after lunch"]
_QUALITIES = words("expensive cheap broken heavy comfortable dangerous famous modern useful strange delicious popular")
_ACTS = [
    "repair the engine",
    "order a taxi",
    "book a table",
    "turn on the lights",
    "send a message",
    "play the guitar",
    "cook spaghetti",
    "learn French",
    "write an email",
    "climb a mountain",
    "clean the carpet",
    "paint the wall",
    "fix my computer",
    "bake a birthday cake",
    "call the police",
    "find my passport",
    "wash the dishes",
    "park the van",
    "translate this sentence",
    "set an alarm",
]


def strange_questions(count: int, seed: int = 11) -> list[str]:
    """``count`` different ones; the same for the same seed."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[_question(rng)] = None
    return list(found)


def _question(rng: random.Random) -> str:
    def a(choices: list[str]) -> str:
        return rng.choice(choices)

    thing, other, person, name, place = a(_THINGS), a(_THINGS), a(_PEOPLE), a(_NAMES), a(_PLACES)
    time, quality, act = a(_TIMES), a(_QUALITIES), a(_ACTS)
    return rng.choice(
        [
            f"When does the {thing} {rng.choice(['leave', 'open', 'close', 'arrive', 'start'])}?",
            f"How {quality} is the {thing}?",
            f"How much does the {thing} cost?",
            f"Where can I {rng.choice(['buy', 'find', 'get', 'rent'])} a {thing}?",
            f"Where did {name} put the {thing}?",
            f"Who {rng.choice(['won the game', 'wrote the song', 'painted the picture', 'stole the jewels'])} {time}?",
            f"Why is the {thing} so {quality}?",
            f"Can you {act}?",
            f"Could you please {act} {time}?",
            f"I would like to {act}.",
            f"Tell me a story about a {person} and a {thing}.",
            f"What does the {person} think about {place}?",
            f"How tall is the {thing} in {place}?",
            f"What was the weather like in {place} {time}?",
            f"Is there a {thing} near the {other}?",
            f"Do you remember {name}, the {person} from {place}?",
            f"My {person} wants to {act}.",
            f"Should I visit {place} or stay here {time}?",
            f"How do I {act}?",
            f"Please tell {name} that the {thing} is {quality}.",
            f"Does {name} work at the {thing}?",
            f"Which {thing} is more {quality}?",
            f"Have you ever been to {place}?",
            f"The {thing} was {quality}, but the {other} was better.",
        ]
    )
