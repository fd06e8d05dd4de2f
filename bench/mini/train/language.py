"""Trains the language model on conversations, over a frozen encoder.

    python -m vcpipe.bench.mini.train.language --corpus FOLDER --start FOLDER --perception RUN --out FOLDER --seconds 540

``--start``: config.json and tokenizer.json; ``--perception``: the run that trained the encoder, or still does: questions are
spliced meanwhile. A second instalment goes on with ``--resume OUT_OF_THE_FIRST``. Sound is laid out, disturbed and encoded on
the device for every step; other processes draw who speaks when. A reply has to follow from what was heard, so most of this is
there against learning by heart.

Pairs of numbers are few: without help a network of this size learns their results by heart, and nothing about other pairs.
So it has to tell the question's numbers from its middle, and the result further up a little later, in a form in which numbers
have an order and digits.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from vcpipe.bench.mini.conversations import RECALLED_NUMBERS, RECALLED_WORDS, RESULT_LATER, Conversations
from vcpipe.bench.mini.material import Amounts, Material, load_material
from vcpipe.bench.mini.nets.language import Language
from vcpipe.bench.mini.nets.perception import SpeechRecogniser
from vcpipe.bench.mini.shape import PAD
from vcpipe.bench.mini.tokens import TextTokens
from vcpipe.bench.mini.train.language_batch import NO_WORD, Asked, Packed
from vcpipe.bench.mini.train.language_check import Check, Features, by_intent
from vcpipe.bench.mini.train.language_sound import Stage
from vcpipe.bench.mini.training import Run, device, wait_for

#: The function channel says PAD and nothing else: that is learnt on every eighth frame, and soon.
_FUNCTION_STRIDE, _FUNCTION_WEIGHT = 8, 0.05

#: A number is told by its size in this unit, by the logarithm of its size, in which products are sums, and by its place on
#: circles of these circumferences: a sum's place follows from its parts' places, a product's from small tables of them.
_UNIT, _CIRCLES = 20, (2, 3, 5, 7, 9, 10, 11, 20, 40, 100)
_TOLD_BY = 2 + 2 * len(_CIRCLES)

#: Where the names of weights begin that only training has.
_HEADS = ("recall.", "numbers.", "result.")


class Learner(Language):
    """The network with heads that only training has: they tell the question's words and numbers from inside the network.

    What a reply follows from has to be known in the middle of the network before it replies, the reply's number before the last
    two blocks, which then only have to put it into words. The heads are no part of the state that is saved.
    """

    def __init__(self, config: dict[str, Any], vocabulary: int, *, dropout: float) -> None:
        """``vocabulary``: words of transcripts, ids 1 and up; 0 stands for no word."""
        super().__init__(config, dropout=dropout)
        self.middle, self.late = len(self.llm.layers) // 2, len(self.llm.layers) - 2
        hidden = config["text_config"]["hidden_size"]
        self.recall = nn.Linear(hidden, RECALLED_WORDS * (vocabulary + 1))
        self.numbers = nn.Linear(hidden, RECALLED_NUMBERS * _TOLD_BY)
        self.result = nn.Linear(hidden, _TOLD_BY)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Tensor]:
        """Without the heads."""
        tensors: dict[str, Tensor] = super().state_dict(*args, **options)
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(_HEADS)}

    def save_heads(self, folder: Path) -> None:
        """Beside the weights, for a run that goes on with these."""
        heads = {name: value for name, value in super().state_dict().items() if name.startswith(_HEADS)}
        save_file({name: value.cpu().contiguous() for name, value in heads.items()}, str(folder / "heads.safetensors"))

    def resume(self, folder: Path) -> None:
        """Weights of a run, with its heads where it left some that fit, else with new ones."""
        tensors, heads = load_file(str(folder / "weights.safetensors")), folder / "heads.safetensors"
        shapes = {name: value.shape for name, value in super().state_dict().items()}
        if heads.is_file():
            found = load_file(str(heads))
            tensors |= {name: value for name, value in found.items() if shapes.get(name) == value.shape}
        missing, unknown = self.load_state_dict(tensors, strict=False)
        if unknown or any(not name.startswith(_HEADS) for name in missing):
            raise ValueError(f"{folder}: weights of another network; missing {missing}, unknown {unknown}")


@dataclass(frozen=True)
class Noise:
    """Disturbance of encoder frames: spread of a factor, share of values and of frames (in stretches of 1 to 3) set to 0."""

    factor: float = 0.1
    dropped: float = 0.05
    masked: float = 0.02

    def __call__(self, encoded: Tensor) -> Tensor:
        """(B, T, encoder) -> the same."""
        encoded = F.dropout(encoded, self.dropped) * (1 + self.factor * torch.randn_like(encoded))
        starts = torch.rand(encoded.shape[:2], device=encoded.device) * (1 / max(self.masked, 1e-9))
        longest = F.pad((3 - (3 * starts).floor()).clamp(min=0), (2, 0))  # 1 to 3 where a stretch begins
        hidden = (longest[:, 2:] > 0) | (longest[:, 1:-1] > 1) | (longest[:, :-2] > 2)
        return encoded.masked_fill(hidden[..., None], 0.0)


def shown(numbers: Tensor) -> Tensor:
    """Numbers (...) as what they are told by, (..., 2 + 2 circles)."""
    turns = torch.stack([numbers * (2 * math.pi / circle) for circle in _CIRCLES], dim=-1)
    sizes = torch.stack([numbers / _UNIT, numbers.clamp(min=0).log1p()], dim=-1)
    return torch.cat([sizes, turns.cos(), turns.sin()], dim=-1)


@dataclass(frozen=True)
class Objective:
    """Losses of a batch. Weights of telling the question's words, its numbers, and the number in the reply."""

    network: Learner
    recall: float
    numbers: float
    result: float

    def __call__(self, encoded: Tensor, asked: Asked) -> dict[str, Tensor]:
        """``loss`` and its parts. encoded (B, T, encoder) are the encoder's frames of the batch's sound."""
        network = self.network
        fused = network.fuse(encoded, asked.previous, asked.prompt)
        hidden, middle, late = network.hidden(fused, network.middle, network.late)
        each = F.cross_entropy(network.lm_head(hidden).flatten(0, 1), asked.text.flatten(), reduction="none")
        parts = {"text": (each * asked.weight.flatten()).sum() / asked.weight.sum()}
        some = network.function_head(hidden[:, ::_FUNCTION_STRIDE]).flatten(0, 1)
        parts["function"] = F.cross_entropy(some, torch.full_like(some[:, 0], PAD, dtype=torch.long))
        parts |= self._told(middle, late, asked.recall)
        loss = parts["text"] + _FUNCTION_WEIGHT * parts["function"]
        told = self.recall * parts["recall"] + self.numbers * parts["numbers"] + self.result * parts["result"]
        return parts | {"loss": loss + told}

    def _told(self, middle: Tensor, late: Tensor, recall: Tensor) -> dict[str, Tensor]:
        """Of words, in nats each, and numbers, squared, as the insides of the network, (B, T, hidden) each, tell them."""
        network = self.network
        row, frame = recall[:, 0], recall[:, 1]
        words, numbers, result = recall[:, 2:].split([RECALLED_WORDS, RECALLED_NUMBERS, 1], dim=1)
        there = middle[row, frame]
        told = network.recall(there).unflatten(-1, (RECALLED_WORDS, -1)).flatten(0, 1)
        count = (words != NO_WORD).sum().clamp(min=1)
        missed = F.cross_entropy(told, words.flatten(), ignore_index=NO_WORD, reduction="sum") / count
        told_numbers = network.numbers(there).unflatten(-1, (RECALLED_NUMBERS, -1))
        told_result = network.result(late[row, (frame + RESULT_LATER).clamp(max=late.shape[1] - 1)])[:, None]
        return {
            "recall": missed,
            "numbers": _squared(told_numbers, numbers),
            "result": _squared(told_result, result),
        }


def _squared(told: Tensor, numbers: Tensor) -> Tensor:
    """How far what was ``told`` (Q, n, 2 + 2 circles) is off from ``numbers`` (Q, n), those below 0 left out."""
    known = (numbers >= 0)[..., None]
    off = (told - shown(numbers.float())).square() * known
    return off.mean(dim=-1).sum() / known.sum().clamp(min=1)


class Drawn(IterableDataset):
    """Endless batches, other ones from every process.

    Short rows, and every ``--long-every`` steps long ones, so that long sessions stay like short ones.
    """

    def __init__(self, material: Material, vocabulary: int, options: argparse.Namespace) -> None:
        self._material, self._vocabulary, self._options = material, vocabulary, options

    def __iter__(self) -> Iterator[Packed]:
        worker, options = get_worker_info(), self._options
        number = worker.id if worker else 0
        short, long = (
            Conversations(self._material, self._vocabulary, rows, frames, 2 * (1000 * options.seed + number) + i)
            for i, (rows, frames) in enumerate(
                [(options.rows, options.frames), (options.long_rows, options.long_frames)]
            )
        )
        # The loader asks one process after the other.
        for step in count(1 + number):
            is_long = options.long_every and step % options.long_every == 0
            yield Packed.of((long if is_long else short).batch())


def batches(material: Material, vocabulary: int, options: argparse.Namespace) -> Iterator[Packed]:
    """From processes that are started at once: they are forked, which comes before any use of the GPU."""
    return iter(
        DataLoader(
            Drawn(material, vocabulary, options),
            batch_size=None,
            num_workers=options.workers,
            prefetch_factor=6 if options.workers else None,
            pin_memory=torch.cuda.is_available(),
        )
    )


def train(
    run: Run, drawn: Iterator[Packed], stage: Stage, features: Features, check: Check, options: argparse.Namespace
) -> None:
    """Until the run's time is over, with evaluations in between. ``run.network`` is a :class:`Learner`."""
    assert isinstance(run.network, Learner)
    noise, objective, checked = Noise(), Objective(run.network, options.recall, options.numbers, options.result), 0.0

    @torch.no_grad()
    def encode(heard: Tensor) -> Tensor:
        return noise(features(heard))

    def step(encoded: Tensor, ids: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return objective(encoded, Asked.of(ids, weight))

    def whole(heard: Tensor, ids: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return step(encode(heard), ids, weight)

    replayed = run.replayed(whole, graph=options.graph and not options.encoder_apart)
    # Where the encoder keeps a step from being captured, all but the encoder may still be.
    without_encoder = run.replayed(step, graph=options.graph)
    while run.going():
        batch = next(drawn)
        ids, weight, speech, echo = batch.to(stage.device)
        heard = stage.heard(speech, echo, *batch.shape)
        if replayed.plain:
            without_encoder(encode(heard), ids, weight)
        else:
            replayed(heard, ids, weight)
        if run.elapsed() - checked > options.check_seconds:
            checked = run.elapsed()
            run.save()
            run.event(**check.everything(run.average))


def main() -> None:
    options = _options()
    torch.manual_seed(options.seed)
    where, tokens = device(), TextTokens(options.start)
    config = json.loads((options.start / "config.json").read_text())
    amounts = Amounts(
        unspoken=options.unspoken,
        spoken=options.spoken,
        senseless=options.senseless,
        held=options.held,
        further=options.further,
        lines=options.lines,
    )
    material = load_material(options.corpus, tokens, amounts, options.seed)
    drawn = batches(material, tokens.size, options)
    wait_for(options.perception)
    stage = Stage(material.sounds.sound, where, options.seed)
    recogniser = SpeechRecogniser.load(config["audio_config"], options.perception).to(where)
    features = recogniser.encoder.features
    network = Learner(config, len(material.vocabulary), dropout=options.dropout)
    if options.resume:
        network.resume(options.resume)
    left = math.inf if options.until is None else options.until - time.time()
    run = Run(
        options.out,
        network.to(where),
        seconds=max(1.0, min(options.seconds, left)),
        peak_rate=options.rate,
        settings=vars(options),
        weight_decay=options.decay,
    )
    check = Check(material, stage, features, tokens)
    train(run, drawn, stage, features, check, options)
    run.finish()
    assert isinstance(run.average, Learner)
    run.average.save_heads(options.out)
    run.event(**check.everything(run.average))
    for name, lines in (("dev", material.dev), ("held", material.held)):
        wrong = check.questions(run.average, lines)[1]
        print(f"wrong replies, {name}: {by_intent(wrong, lines)}")
        for line, said in wrong[:15]:
            print(f"  {line.text} -> {said[:60]!r}, not {material.replies[line.reply].text!r}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("corpus", "start", "perception", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder of a run to go on with")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--until", type=float, help="when to end at the latest, in seconds since 1970")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--recall", type=float, default=0.2, help="weight of telling the question's words; 0: none")
    parser.add_argument("--numbers", type=float, default=1.0, help="weight of telling the question's numbers")
    parser.add_argument("--result", type=float, default=1.0, help="weight of telling the number in the reply")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--frames", type=int, default=160)
    parser.add_argument("--long-rows", type=int, default=16)
    parser.add_argument("--long-frames", type=int, default=600)
    parser.add_argument("--long-every", type=int, default=6, help="every how many steps; 0: never")
    parser.add_argument("--workers", type=int, default=6, help="processes that draw batches; 0: none")
    parser.add_argument("--no-graph", dest="graph", action="store_false", help="take steps kernel by kernel")
    parser.add_argument("--encoder-apart", action="store_true", help="keep the encoder out of what is captured")
    parser.add_argument("--check-seconds", type=float, default=120)
    parser.add_argument("--unspoken", type=int, default=3, help="spliced renderings of a line nobody spoke")
    parser.add_argument("--spoken", type=int, default=1, help="spliced renderings of a line that was spoken")
    parser.add_argument("--senseless", type=int, default=1500)
    parser.add_argument("--further", type=int, default=6000, help="calculations outside the domain to learn from")
    parser.add_argument("--held", type=int, default=300, help="test lines to evaluate")
    parser.add_argument("--lines", type=int, help="learn so many lines only")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
