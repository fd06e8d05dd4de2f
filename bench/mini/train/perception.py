"""Train the encoder and the RNN-T on the users' lines.

    python -m vcpipe.bench.mini.train.perception --corpus FOLDER --start FOLDER --out FOLDER --seconds N [--resume FOLDER]

A CTC head on the encoder (Graves et al. 2006) helps at first, and is gone by a third of the time; from then on a small penalty
keeps pieces from coming late. The language model reads the same encoder afterwards, frozen.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vcpipe.bench.mini.augment import augment, mask_mel
from vcpipe.bench.mini.nets.perception import SpeechRecogniser
from vcpipe.bench.mini.sound import load_answers, load_users
from vcpipe.bench.mini.tokens import Pieces
from vcpipe.bench.mini.train.perception_check import Check
from vcpipe.bench.mini.train.rnnt_loss import rnnt_loss
from vcpipe.bench.mini.train.stretches import Batch, Stretches
from vcpipe.bench.mini.training import Run, device

_CTC_WEIGHT, _CTC_UNTIL = 0.5, 0.35  # share of the time after which the CTC head is silent
_FORGET_ALL, _FORGET_ONE, _MISTAKE = 0.15, 0.1, 0.04


class Learner(SpeechRecogniser):
    """With a head that only training has: what is saved is without it."""

    def __init__(self, audio: Mapping[str, Any], *, dropout: float) -> None:
        super().__init__(audio, dropout=dropout)
        self.ctc = nn.Linear(audio["encoder"]["d_model"], self.blank + 1)

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Tensor]:
        tensors = super().state_dict(*arguments, **options)
        return {name: tensor for name, tensor in tensors.items() if not name.startswith("ctc.")}


class Objective:
    """The loss of a batch; ``generator`` on the network's device."""

    def __init__(self, network: Learner, generator: torch.Generator, *, delay_penalty: float) -> None:
        self._network, self._generator, self._delay_penalty = network, generator, delay_penalty

    def __call__(self, sound: Tensor, batch: Batch, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        """sound: (B, frames * 1280) as the microphone gives it; progress: 0 to 1. The loss, and numbers to log."""
        network = self._network
        with torch.no_grad():
            mel = mask_mel(network.encoder.log_mel(sound), self._generator)
        encoded = network.encoder(mel)
        predicted = self._predict(batch)
        logits = network.rnnt_joint(encoded, predicted)
        frames = torch.full_like(batch.symbols, batch.frames)
        penalty = self._delay_penalty * min(1.0, max(0.0, progress / _CTC_UNTIL - 1.0))
        losses = rnnt_loss(logits, batch.targets, frames, batch.symbols, blank=network.blank, delay_penalty=penalty)
        count = batch.symbols.sum() + len(batch.symbols)
        rnnt = losses.sum() / count
        ctc_weight = _CTC_WEIGHT * max(0.0, 1.0 - progress / _CTC_UNTIL)
        if ctc_weight == 0.0 or batch.targets.shape[1] == 0:
            return rnnt, {"rnnt": rnnt.detach()}
        ctc = self._ctc(encoded, batch) / count
        return rnnt + ctc_weight * ctc, {"rnnt": rnnt.detach(), "ctc": ctc.detach()}

    def _predict(self, batch: Batch) -> Tensor:
        """(B, U + 1, pred_hidden). Pieces are forgotten or mistaken now and then, so that sound counts more than habit."""
        pieces = torch.cat([batch.history, batch.targets], 1)
        chance = torch.rand(3, *pieces.shape, device=pieces.device, generator=self._generator)
        mistakes = (chance[2] * self._network.blank).long()
        pieces = torch.where(chance[0] < _MISTAKE, mistakes, pieces)
        keep = chance[1] >= _FORGET_ONE
        keep &= torch.rand(len(pieces), 1, device=pieces.device, generator=self._generator) >= _FORGET_ALL
        return self._network.rnnt_decoder(pieces, keep[..., None])[:, batch.history.shape[1] :]

    def _ctc(self, encoded: Tensor, batch: Batch) -> Tensor:
        log_p = self._network.ctc(encoded).float().log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(batch.symbols),), batch.frames, dtype=torch.long)
        return F.ctc_loss(
            log_p, batch.targets, frames, batch.symbols, self._network.blank, reduction="sum", zero_infinity=True
        )


@torch.no_grad()
def initialise(network: Learner, sound: Tensor) -> None:
    """Start from some of the sound to be learnt from, (B, n).

    What the subsampling gives is brought to mean 0 and deviation 1 over time, channel by channel: behind its ReLUs the mean
    is ten times as large as what speech changes, and the encoder would begin as a constant. The blank gets four fifths of the
    probability, about its share of frames: else the first steps teach it to every weight there is, at the cost of all else.
    """
    subsampling = network.encoder.pre_encode
    x = subsampling(network.encoder.log_mel(sound)).flatten(0, 1)
    deviation = x.std(0)
    subsampling.out.weight /= deviation[:, None]
    subsampling.out.bias.copy_((subsampling.out.bias - x.mean(0)) / deviation)
    for head in (network.rnnt_joint.joint_net[2], network.ctc):
        head.bias[-1] = math.log(4 * network.blank)


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    place = device()
    generator = torch.Generator(place).manual_seed(arguments.seed)
    audio = json.loads((arguments.start / "config.json").read_text(encoding="utf-8"))["audio_config"]
    pieces = Pieces.load(arguments.start / "pieces.json")
    users, answers = load_users(arguments.corpus), load_answers(arguments.corpus)
    stretches = Stretches(users, answers, pieces, frames=arguments.frames, seed=arguments.seed, clips=arguments.clips)
    loader = DataLoader(
        stretches,
        batch_size=None,
        num_workers=arguments.workers,
        prefetch_factor=4 if arguments.workers else None,
        pin_memory=place.type == "cuda",
    )
    batches, checked = iter(loader), 0.0
    users_sound, answers_sound = users.on(place), answers.on(place)
    network = Learner(audio, dropout=arguments.dropout).to(place)
    if arguments.resume:
        weights = SpeechRecogniser.load(audio, arguments.resume).state_dict()
        network.load_state_dict(weights, strict=False)  # it has a head more
    else:
        speech, echo = next(batches).to(place).sound(users_sound, answers_sound)
        initialise(network, augment(speech, echo, generator))
    run = Run(
        arguments.out,
        network,
        seconds=arguments.seconds,
        peak_rate=arguments.rate,
        settings=vars(arguments),
        warm_up=arguments.warm_up,
        weight_decay=0.02,
    )
    check = Check(users, answers, pieces, place)
    objective = Objective(network, generator, delay_penalty=arguments.delay_penalty)
    while run.going():
        batch = next(batches).to(place)
        speech, echo = batch.sound(users_sound, answers_sound)
        sound = augment(speech, echo, generator)
        # In a run that is taken up again the CTC head has done its work.
        loss, numbers = objective(sound, batch, 1.0 if arguments.resume else run.fraction())
        run.update(loss)
        run.log(**numbers)
        if run.elapsed() - checked > arguments.check_seconds:
            checked = run.elapsed()
            run.save()
            run.event(**check(run.average))
    run.finish()
    run.event(**check(run.average))
    for weight in run.average.parameters():
        weight.copy_(weight.bfloat16())
    run.event(**{f"bfloat16_{name}": value for name, value in check(run.average).items()})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True, help="folder with config.json and pieces.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--resume", type=Path, help="folder of a run whose weights to begin with")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--warm-up", type=int, default=500, help="steps")
    parser.add_argument("--frames", type=int, default=6400, help="encoder frames (80 ms) of a batch")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--delay-penalty", type=float, default=0.01, help="nats a frame, in the end")
    parser.add_argument("--clips", type=int, help="use only so many training clips")
    parser.add_argument("--workers", type=int, default=3, help="processes that plan batches")
    parser.add_argument("--check-seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(_arguments())
