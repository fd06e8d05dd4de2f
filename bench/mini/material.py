"""What conversations are made of: questions in several voices, replies with their words on the clock, all sound in one array.

Most lines of the domain were never spoken by a synthesiser. They are spliced of words of the training clips here, once, before
training begins; so are lines without sense, which teach that not everything has a reply.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from scipy.signal import resample_poly

from vcpipe.bench.mini import wordings
from vcpipe.bench.mini.corpus import Item, items, reply_to, reply_to_others, transcript
from vcpipe.bench.mini.sound import AROUND_S, Bank, Clip, Splicer, load_answers, load_users
from vcpipe.bench.mini.timeline import REPLY_RATE, USER_RATE, Reply
from vcpipe.bench.mini.tokens import TextTokens
from vcpipe.bench.mini.wordings import ONES, TENS

#: Silence after the last word of a spliced line, as recorded questions have it, in s.
_TAIL = 0.05

#: Lines of one intent are asked with a frequency that grows slower than their number, and calculations more often: they are
#: most of what is asked in an evaluation, and products are the hardest. Single words have nothing that helps to hear them, and
#: opposites are learnt late.
_INTENT_POWER = 0.75
_EMPHASIS = {
    "arithmetic_plus": 1.2,
    "arithmetic_minus": 1.4,
    "arithmetic_times": 2.0,
    "further_plus": 0.35,
    "further_minus": 0.35,
    "further_times": 0.7,
    "opposite": 1.5,
} | dict.fromkeys(("bare_number", "bare_letter", "bare_code_word", "bare_month", "bare_day"), 2.0)

#: Share of what is outside the domain, senseless or said by strangers, among all that is asked.
_SENSELESS = 0.08

_NUMBERS = {word: n for n, word in enumerate(ONES)} | {word: 20 + 10 * i for i, word in enumerate(TENS)}

#: Beginnings and ends of these intents might be put together to something with sense.
_OF_NUMBERS = ("arithmetic", "bare", "bigger", "double", "even", "half", "number", "sum")


@dataclass(frozen=True)
class Line:
    """A question. ``spoken`` and ``spliced`` index renderings; ``reply`` the replies; ``words``: ids of its transcript.

    ``numbers``: the numbers in it, two at most, the larger first: a product does not depend on their order, and nothing is
    taken from less.
    ``result``: the number that the reply tells last, 100 at most, or -1.
    """

    text: str
    intent: str
    reply: int
    words: tuple[int, ...]
    numbers: tuple[int, ...] = ()
    result: int = -1
    spoken: list[int] = field(default_factory=list)
    spliced: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SpokenReply:
    """``laid``: on a clock that begins with its first text frame; ``echo``: the rendering that is its sound at 16 kHz."""

    text: str
    laid: Reply
    echo: int


class Sounds:
    """Renderings at 16 kHz, one after the other in ``sound`` (int16): ``offset``, ``samples``, and ``onset`` of speech."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._onsets: list[int] = []

    def add(self, sound: np.ndarray, onset: float) -> int:
        """Take in int16 samples that begin to speak after ``onset`` seconds; returns the rendering's number."""
        self._parts.append(sound)
        self._onsets.append(int(onset * USER_RATE))
        return len(self._parts) - 1

    def close(self) -> None:
        """All are there: lay them out."""
        self.onset = np.array(self._onsets, np.int64)
        self.samples = np.array([len(part) for part in self._parts], np.int64)
        self.offset = np.cumsum(self.samples) - self.samples
        self.sound = np.concatenate(self._parts)
        self._parts = []


@dataclass(frozen=True)
class Material:
    """``lines`` to learn, ``dev`` as recorded in the dev split, ``held``: spliced lines of compositions kept for the test.

    ``weights`` (lines,): how often each is asked, sum 1. ``vocabulary``: the words of transcripts, from id 1 on.
    """

    sounds: Sounds
    replies: list[SpokenReply]
    lines: list[Line]
    dev: list[Line]
    held: list[Line]
    weights: np.ndarray
    vocabulary: list[str]


@dataclass(frozen=True)
class Amounts:
    """How much to splice: renderings of a line that was never spoken and of one that was, senseless lines, test lines.

    ``further``: calculations outside the domain that help to learn those within, about as many of each kind; ``lines``: take so
    many spoken and spliced lines only, for trials.
    """

    unspoken: int = 3
    spoken: int = 1
    senseless: int = 1500
    held: int = 300
    further: int = 6000
    lines: int | None = None


def load_material(corpus: Path, tokens: TextTokens, amounts: Amounts, seed: int) -> Material:
    """Read the corpus and splice; takes all processors for a minute or so."""
    rng = np.random.default_rng(seed)
    users, sounds = load_users(corpus), Sounds()
    replies, reply_of = _replies(load_answers(corpus), tokens, sounds)
    known = [item for item in items() if item.answer in reply_of]
    vocabulary = sorted({word for item in known for word in transcript(item.question).split()})
    word_id = {word: i for i, word in enumerate(vocabulary, 1)}

    further = _further(amounts.further, rng, reply_of)

    def line(text: str, answer: str, intent: str) -> Line:
        words = transcript(text).split()
        numbers = tuple(sorted(spoken_numbers(words)[:2], reverse=True))
        told = [number for number in spoken_numbers(transcript(answer).split()) if number <= 100]
        ids = tuple(word_id.get(word, 0) for word in words)
        return Line(text, intent, reply_of[answer], ids, numbers, told[-1] if told else -1)

    train = {item.question: line(item.question, item.answer, item.intent) for item in known if item.split == "train"}
    sorry = reply_to_others()
    strangers: dict[str, Line] = {}
    dev: list[Line] = []
    answer_of = {item.question: item.answer for item in known}
    for clip in users.clips:
        if clip.intent == "stranger":
            strangers.setdefault(clip.text, line(clip.text, sorry, "senseless")).spoken.append(
                _add(clip, users, sounds)
            )
        if clip.text not in answer_of:
            continue
        if clip.split == "train" and clip.text in train:
            train[clip.text].spoken.append(_add(clip, users, sounds))
        elif clip.split == "dev":
            dev.append(line(clip.text, answer_of[clip.text], clip.intent))
            dev[-1].spoken.append(_add(clip, users, sounds))

    lines = list(train.values())
    if amounts.lines is not None:
        chosen = rng.permutation(len(lines))[: amounts.lines]
        lines = [lines[i] for i in chosen]
    texts = _senseless([item for item in known if item.split == "train"], amounts.senseless, rng)
    lines += [*strangers.values(), *(line(text, sorry, "senseless") for text in texts)]
    lines += [line(each.question, each.answer, each.intent) for each in further]
    untold = [item for item in known if item.split == "test"]
    chosen = rng.permutation(len(untold))[: amounts.held]
    held = [line(untold[i].question, untold[i].answer, untold[i].intent) for i in chosen]

    wanted: list[Line] = []
    for each in lines:
        once = each.intent.startswith(("senseless", "further"))
        wanted += [each] * (1 if once else amounts.spoken if each.spoken else amounts.unspoken)
    _splice(users, [*wanted, *held], sounds, seed)
    lines, held = ([each for each in some if each.spoken or each.spliced] for some in (lines, held))
    sounds.close()
    return Material(sounds, replies, lines, dev, held, _frequencies(lines), vocabulary)


def _further(count: int, rng: np.random.Generator, known: Iterable[str]) -> list[wordings.Line]:
    """About ``count`` calculations outside the domain with ``known`` replies, a third of each kind."""
    by_kind: dict[str, list[wordings.Line]] = defaultdict(list)
    answers = set(known)
    for line in wordings.further_sums():
        if line.answer in answers:
            kind = line.intent.replace("arithmetic", "further")
            by_kind[kind].append(line._replace(intent=kind))
    return [some[i] for some in by_kind.values() for i in rng.permutation(len(some))[: count // len(by_kind)]]


def spoken_numbers(words: Sequence[str]) -> list[int]:
    """The numbers among words, which may take several words: "twenty one" is 21."""
    found: list[int] = []
    room = 0  # smaller numbers than this join the one before
    for word in words:
        if word == "hundred" and found:
            found[-1] *= 100
            room = 100
        elif word in _NUMBERS:
            number = _NUMBERS[word]
            if 0 < number < room:
                found[-1] += number
            else:
                found.append(number)
            room = 10 if number >= 20 else 0
        else:
            room = 0
    return found


def _add(clip: Clip, bank: Bank, sounds: Sounds) -> int:
    onset = clip.words[0][1] if clip.words else AROUND_S[0]
    return sounds.add(bank.sound[clip.offset : clip.offset + clip.samples], onset)


def _replies(bank: Bank, tokens: TextTokens, sounds: Sounds) -> tuple[list[SpokenReply], dict[str, int]]:
    """The replies and the number of each text."""
    clips = [clip for clip in bank.clips if clip.intent == "answer"]
    parts = [bank.sound[clip.offset : clip.offset + clip.samples] for clip in clips]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        echoes = list(pool.map(_to_user_rate, parts, chunksize=16))
    replies = []
    for clip, echo in zip(clips, echoes, strict=True):
        laid = Reply.lay(clip.words, clip.samples, tokens, 0)
        replies.append(SpokenReply(clip.text, laid, sounds.add(echo, 0.0)))
    return replies, {reply.text: i for i, reply in enumerate(replies)}


def _to_user_rate(sound: np.ndarray) -> np.ndarray:
    resampled = resample_poly(sound.astype(np.float32), USER_RATE // 50, REPLY_RATE // 50)
    return np.clip(np.round(resampled), -32768, 32767).astype(np.int16)


def _frequencies(lines: Sequence[Line]) -> np.ndarray:
    counts = Counter(line.intent for line in lines)
    weights = np.array([_EMPHASIS.get(line.intent, 1.0) * counts[line.intent] ** (_INTENT_POWER - 1) for line in lines])
    senseless = np.array([line.intent == "senseless" for line in lines])
    if senseless.any() and not senseless.all():
        weights[senseless] *= _SENSELESS / (1 - _SENSELESS) * weights[~senseless].sum() / weights[senseless].sum()
    return weights / weights.sum()


# ------------------------------------------------------------------------------------------------ splicing
_SPLICED_AT_ONCE = 100
_bank: Bank | None = None  # of a worker process, which inherits it rather than being sent it


def _splice(users: Bank, lines: Iterable[Line], sounds: Sounds, seed: int) -> None:
    """Give each of ``lines`` a spliced rendering, where all its words were spoken by somebody."""
    global _bank
    _bank = users
    wanted = list(lines)
    starts = range(0, len(wanted), _SPLICED_AT_ONCE)
    jobs = [([line.text for line in wanted[i : i + _SPLICED_AT_ONCE]], (seed, i)) for i in starts]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        spliced = [each for some in pool.map(_splice_some, jobs) for each in some]
    _bank = None
    for line, rendering in zip(wanted, spliced, strict=True):
        if rendering is not None:
            line.spliced.append(sounds.add(*rendering))


def _splice_some(job: tuple[list[str], tuple[int, int]]) -> list[tuple[np.ndarray, float] | None]:
    texts, seed = job
    assert _bank is not None
    splicer = Splicer(_bank, np.random.default_rng(seed))
    spliced: list[tuple[np.ndarray, float] | None] = []
    for text in texts:
        if (made := splicer.line(text)) is None:
            spliced.append(None)
            continue
        sound, words = made
        sound = np.pad(sound, (0, int(_TAIL * USER_RATE)))
        spliced.append(((np.clip(sound, -1, 1) * 32767).astype(np.int16), words[0][1]))
    return spliced


def _senseless(known: Sequence[Item], count: int, rng: np.random.Generator) -> list[str]:
    """Lines outside the domain: words in any order, and the beginning of one question with the end of quite another."""
    words = sorted({word for item in known for word in item.question.rstrip(".?").split()})
    by_kind: dict[str, list[str]] = defaultdict(list)
    for item in known:
        kind = item.intent.split("_")[0]
        by_kind["number" if kind in _OF_NUMBERS else kind].append(item.question)
    kinds = sorted(by_kind)
    made: list[str] = []
    while len(made) < count:
        if rng.random() < 0.5:
            text = " ".join(words[i] for i in rng.integers(len(words), size=rng.integers(3, 9))) + "."
        else:
            first, second = (by_kind[kinds[i]] for i in rng.choice(len(kinds), 2, replace=False))
            one, other = (some[rng.integers(len(some))].split() for some in (first, second))
            text = " ".join([*one[: (len(one) + 1) // 2], *other[len(other) // 2 :]])
        if len(text.split()) > 2 and reply_to(text) is None:
            made.append(text)
    return made
