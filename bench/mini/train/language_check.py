"""How well the language model does on its own: free-running over questions, silence and conversations.

What counts is the reply's text to the word. Weights are rounded to bfloat16 first, as the checkpoint stores them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vcpipe.bench.mini.augment import augment
from vcpipe.bench.mini.conversations import PLAIN, Conversations, Laid
from vcpipe.bench.mini.material import Line, Material
from vcpipe.bench.mini.nets.language import Language
from vcpipe.bench.mini.shape import EOS, PAD
from vcpipe.bench.mini.timeline import FRAME_SECONDS, USER_FRAME, USER_RATE, Reply, first_frame
from vcpipe.bench.mini.tokens import SPECIALS, TextTokens
from vcpipe.bench.mini.train.language_sound import Stage

#: What makes encoder frames (B, T, encoder) of sound (B, n).
Features = Callable[[Tensor], Tensor]

#: Rooms are never quite silent.
_FLOOR = 3e-4
_LEAD = (0.3, 1.2)
_AT_ONCE = 256


@dataclass(frozen=True)
class Asked:
    """One question in silence and what has to be said."""

    line: Line
    reply: Reply
    start: int
    source: int
    samples: int

    def laid(self, first: int) -> Laid:
        """In a row that begins at sample ``first`` of a batch."""
        return self.source, self.samples, first + self.start, 1.0, 1.0


def rounded(network: Language) -> Language:
    """A copy with the weights that the checkpoint will hold."""
    other = copy.deepcopy(network).eval()
    with torch.no_grad():
        for weight in other.parameters():
            weight.copy_(weight.bfloat16())
    return other


class Check:
    """Evaluations with a fixed seed, so that the same questions come each time."""

    def __init__(self, material: Material, stage: Stage, features: Features, tokens: TextTokens, seed: int = 1) -> None:
        self._material, self._stage, self._features, self._tokens, self._seed = material, stage, features, tokens, seed

    def everything(self, network: Language) -> dict[str, float]:
        """All numbers, by name; shares are of 1."""
        network = rounded(network)
        numbers: dict[str, float] = {}
        for name, lines in (("dev", self._material.dev), ("held", self._material.held)):
            if lines:
                numbers |= {f"{name}_{key}": value for key, value in self.questions(network, lines)[0].items()}
        return numbers | self.silence(network) | self.conversations(network)

    # -------------------------------------------------------------------------------------------- questions
    def questions(self, network: Language, lines: Sequence[Line]) -> tuple[dict[str, float], list[tuple[Line, str]]]:
        """Each of ``lines`` alone, asked in silence: numbers, and the lines that got a wrong reply with what was said.

        ``right``: share of exact replies; ``early``: share that began more than a frame too soon; ``start``: mean delay of the
        first token against its place, in s; ``ended``: share of right replies with one EOS, at most a frame off.
        """
        asked = [self._ask(line, np.random.default_rng((self._seed, i))) for i, line in enumerate(lines)]
        asked.sort(key=lambda each: each.reply.end)
        right, early, ended, starts, wrong = 0, 0, 0, [], []
        for i in range(0, len(asked), _AT_ONCE):
            some = asked[i : i + _AT_ONCE]
            frames = some[-1].reply.end + 12
            laid = [each.laid(row * frames * USER_FRAME) for row, each in enumerate(some)]
            said = self._said(network, self._stage.lay(laid, len(some), frames))
            for each, ids in zip(some, said, strict=True):
                spoken = np.flatnonzero(ids >= len(SPECIALS))
                ends = np.flatnonzero(ids == EOS)
                early += bool(len(spoken) and spoken[0] < each.reply.first - 1)
                if ids[spoken].tolist() == [token for _, token in each.reply.tokens]:
                    right += 1
                    starts.append(spoken[0] - each.reply.tokens[0][0])
                    ended += len(ends) == 1 and abs(int(ends[0]) - each.reply.end) <= 1
                else:
                    wrong.append((each.line, self._tokens.text(ids.tolist())))
        numbers = {"right": right / len(asked), "early": early / len(asked), "ended": ended / max(right, 1)}
        return numbers | {"start": float(np.mean(starts)) * FRAME_SECONDS if starts else 0.0}, wrong

    def _ask(self, line: Line, rng: np.random.Generator) -> Asked:
        rendering = (line.spoken or line.spliced)[0]
        sounds = self._material.sounds
        start, samples = int(rng.uniform(*_LEAD) * USER_RATE), int(sounds.samples[rendering])
        reply = self._material.replies[line.reply].laid.moved(first_frame(start + samples))
        return Asked(line, reply, start, int(sounds.offset[rendering]), samples)

    # -------------------------------------------------------------------------------------------- the rest
    def silence(self, network: Language, rows: int = 64, frames: int = 150) -> dict[str, float]:
        """``false_start``: share of rows without a question in which something is said.

        Half of them hold noise, half the talk of four others, 20 dB below a user's.
        """
        batch = Conversations(self._material, self._tokens.size, rows, frames, self._seed, PLAIN).batch()
        talk = self._stage.lay(batch.speech, rows, frames)
        talk = 0.1 * sum(talk.roll(shift, 0).roll(shift * USER_RATE, 1) for shift in range(4))
        nothing = torch.zeros_like(talk)
        noise = augment(nothing, nothing, self._stage.generator)
        sound = torch.cat([noise[: rows // 2], talk[rows // 2 :]])
        return {"false_start": float((self._said(network, sound) != PAD).any(1).mean())}

    def conversations(self, network: Language, rows: int = 12, frames: int = 500) -> dict[str, float]:
        """Long sessions of training lines with interruptions, half of them with an echo 20 dB below.

        ``long_right``: share of exact replies among those that nobody interrupted; ``long_cut``: share of the interrupted ones
        that end at most two frames off.
        """
        habits = replace(PLAIN, echo=0.5, interrupted=0.15, long_pause=0.1, spliced=0.4)
        batch = Conversations(self._material, self._tokens.size, rows, frames, self._seed, habits).batch()
        speech, echo = (self._stage.lay(stretches, rows, frames) for stretches in (batch.speech, batch.echo))
        said = self._said(network, speech + 0.1 * echo)
        whole: list[bool] = []
        cut: list[bool] = []
        for row, reply, until in batch.replies:
            if reply.end >= frames - 2:
                continue
            ids = said[row, reply.first - 1 : min(until, frames)]
            if reply.cut:
                cut.append(bool((said[row, reply.end - 2 : reply.end + 3] == EOS).any()))
            else:
                whole.append(ids[ids >= len(SPECIALS)].tolist() == [token for _, token in reply.tokens])
        return {"long_right": float(np.mean(whole or [False])), "long_cut": float(np.mean(cut or [False]))}

    def _said(self, network: Language, sound: Tensor) -> np.ndarray:
        """Text ids (B, T) in reply to sound (B, n)."""
        sound = sound + _FLOOR * torch.randn(sound.shape, device=sound.device)
        return np.asarray(network.run(self._features(sound))[0].cpu().numpy())


def by_intent(wrong: Sequence[tuple[Line, str]], lines: Sequence[Line]) -> str:
    """Which intents fail: "arithmetic_plus 12/80, ..."."""
    failed, asked = Counter(line.intent for line, _ in wrong), Counter(line.intent for line in lines)
    return ", ".join(f"{intent} {count}/{asked[intent]}" for intent, count in failed.most_common())
