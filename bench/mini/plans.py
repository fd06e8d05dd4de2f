"""Which lines are spoken, by which voice and how fast. The same everywhere: all choices are seeded."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from typing import Any

from vcpipe.bench.mini import corpus
from vcpipe.bench.mini.corpus import Item
from vcpipe.bench.mini.sentences import general_sentences
from vcpipe.bench.mini.strangers import strange_questions
from vcpipe.bench.mini.voices import DEV_VOICES, PROGRAM_VOICES, TRAIN_VOICES

#: Lines of the intents that have many; all others get some for each reply.
_LINES = {
    "arithmetic_plus": 260,
    "arithmetic_minus": 190,
    "arithmetic_times": 130,
    "sum_sentence": 40,
    "double": 24,
    "half": 18,
    "number_after": 130,
    "number_before": 120,
    "bigger": 90,
    "smalltalk": 200,
    "unknown": 60,
    "bare_number": 64,
    "bare_day": 28,
    "bare_month": 36,
    "bare_letter": 60,
    "bare_code_word": 52,
}
_LINES_PER_REPLY = 2
_GENERAL = 250
_STRANGERS = 1500

#: Of a group: its share of the lines above, and how many dev lines it speaks.
GROUPS = {"kokoro": (1.0, 260), "programs": (0.92, 160)}
_SEEDS = {"kokoro": "mini kokoro", "programs": "mini spice"}
_SHARES = {"flite": 0.42, "festival": 0.24, "espeak": 0.34}


def clip_id(kind: str, *what: Any) -> str:
    """``kind`` is a letter: a(nswer), g(eneral) or u(ser)."""
    return kind + hashlib.sha1("|".join(map(str, what)).encode()).hexdigest()[:11]


def plan_answers() -> list[dict[str, Any]]:
    """id, text and kind of everything that the assistant's voice says."""
    lines = [("answer", text) for text in corpus.answers()] + [
        ("general", text) for text in general_sentences(_GENERAL)
    ]
    return [{"id": clip_id(kind[0], text), "text": text, "kind": kind} for kind, text in lines]


def plan_questions(group: str, part: int = 0) -> list[dict[str, Any]]:
    """``kokoro`` or ``programs``: id, text, answer, intent, engine, voice, speed and split of every question.

    Parts past the first choose lines and voices anew, and are for training alone.
    """
    rng = random.Random(f"{_SEEDS[group]} {part}" if part else _SEEDS[group])
    share, dev_lines = GROUPS[group]
    every = corpus.items()
    train = _choose([item for item in every if item.split == "train"], rng, share)
    dev = [item for item in every if item.split == "dev"]
    rng.shuffle(dev)
    plan = []
    for n, item in enumerate(train if part else train + dev[:dev_lines]):
        split = "train" if n < len(train) else "dev"
        speaker, speed = _speaker(group, split, n, rng), _speed(rng)
        plan.append(_record(item.question, item.answer, item.intent, speaker, speed, split))
    rng.shuffle(plan)
    named = {clip_id("u", *(line[key] for key in ("engine", "voice", "speed", "text"))): line for line in plan}
    return [{"id": id_, **line} for id_, line in named.items()]


def plan_words(group: str) -> list[dict[str, Any]]:
    """``kokoro`` or ``programs``: words of calculations one by one, by every voice, to be put together for halting lines.

    They are no questions, and have no answer.
    """
    voices = {"kokoro": TRAIN_VOICES} if group == "kokoro" else PROGRAM_VOICES
    words = [*map(corpus.number, (*range(21), *range(30, 100, 10))), "plus", "minus", "times"]
    speakers = [(engine, voice) for engine, some in voices.items() for voice in some]
    return [
        {"id": clip_id("w", *speaker, word), **_record(word, "", "word", speaker)}
        for word in words
        for speaker in speakers
    ]


def plan_strangers() -> list[dict[str, Any]]:
    """Things outside the domain, said by the programs' voices: the reply is that of the domain's intent "unknown"."""
    rng = random.Random("mini strangers")
    answer, plan = corpus.reply_to_others(), []
    for text in strange_questions(_STRANGERS):
        speaker, speed = _speaker("programs", "train", 0, rng), _speed(rng)
        plan.append({"id": clip_id("s", *speaker, text), **_record(text, answer, "stranger", speaker, speed)})
    return plan


def _record(
    text: str, answer: str, intent: str, speaker: tuple[str, str], speed: float = 1.0, split: str = "train"
) -> dict[str, Any]:
    """What users say, but for its id. ``speaker``: engine and voice."""
    engine, voice = speaker
    said = {"text": text, "answer": answer, "intent": intent}
    return said | {"engine": engine, "voice": voice, "speed": speed, "split": split}


def _speed(rng: random.Random) -> float:
    return round(rng.uniform(0.85, 1.2), 2)


def _choose(lines: list[Item], rng: random.Random, share: float) -> list[Item]:
    """Lines to speak: each reply of an intent in turn, each of its wordings in turn, until the intent has its number."""
    intents: dict[str, dict[str, list[Item]]] = defaultdict(lambda: defaultdict(list))
    for item in lines:
        intents[item.intent][item.answer].append(item)
    chosen = []
    for intent, replies in intents.items():
        wanted = max(1, round(_LINES.get(intent, _LINES_PER_REPLY * len(replies)) * share))
        queues = list(replies.values())
        for queue in queues:
            rng.shuffle(queue)
        rng.shuffle(queues)
        for n in range(wanted):
            turn, which = divmod(n, len(queues))
            chosen.append(queues[which][turn % len(queues[which])])
    rng.shuffle(chosen)
    return chosen


def _speaker(group: str, split: str, n: int, rng: random.Random) -> tuple[str, str]:
    """Engine and voice; a voice "a*0.40+b" is a blend."""
    if group == "programs":
        engine = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
        return engine, rng.choice(PROGRAM_VOICES[engine])
    if split == "dev" and n % 4 < len(DEV_VOICES):
        return "kokoro", DEV_VOICES[n % 4]
    if rng.random() < 0.6:
        return "kokoro", rng.choice(TRAIN_VOICES)
    first, second = rng.sample(TRAIN_VOICES, 2)
    return "kokoro", f"{first}*{rng.uniform(0.2, 0.8):.2f}+{second}"
