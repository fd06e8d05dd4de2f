"""Trains the speech decoder on the frozen codec's latents.

    python -m vcpipe.bench.mini.train.tts --corpus FOLDER --start FOLDER --codec FOLDER --out FOLDER --seconds N

Every frame of a session is to be predicted from the frames before and the text: scored is the likelihood of what each pass of
refinement has to predict. What the network is fed is disturbed, and partly what it said itself (scheduled sampling, Bengio et
al. 2015; whole sessions spoken by itself now and then, as in DAgger, Ross et al. 2011): durations are fixed by the text, so
the frame to predict stays the same. Some sessions see no text, for guidance (Ho and Salimans 2021).
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf
import torch
from torch import Tensor

from vcpipe.bench.mini.nets.codec import Codec
from vcpipe.bench.mini.nets.tts import SpeechDecoder, generate
from vcpipe.bench.mini.nets.tts_mixture import Likelihood, known_counts
from vcpipe.bench.mini.shape import PAD
from vcpipe.bench.mini.sound import Bank, Clip, load_answers
from vcpipe.bench.mini.timeline import REPLY_FRAME, REPLY_RATE
from vcpipe.bench.mini.tokens import TextTokens
from vcpipe.bench.mini.train.tts_data import Frames, Renderer, Replies, Window, Windows
from vcpipe.bench.mini.training import Run, device, load_weights

#: Replies of the dev split, in percent.
_DEV_PERCENT = 3

#: Longest silence that an evaluation listens to, in frames.
_SILENCE_FRAMES = 300


@dataclass(frozen=True)
class Settings:
    """How training treats its windows. Shares are of sessions, or of frames where it says so.

    ``passes``: refinement passes drawn for each frame. ``silent_weight``: of frames of pure silence in the loss. ``drawn``:
    part of the loss that goes by components as they are drawn, not by the mixture: in many dimensions a mixture loses little
    by a vague choice among its components, but what is said is the mean of one of them. ``blur``: noise on what is to
    be predicted, at first near what the codebooks leave of it and none at the end: without it silence, known exactly, would
    make early gradients very steep, and with it silence would not become exact.
    ``balance``: power of the spread's square by which likelihoods are weighted (beta-NLL, Seitzer et al. 2022).
    """

    batch: int = 64
    frames: int = 113
    passes: int = 2
    without_text: float = 0.12
    interrupted: float = 0.1
    general: float = 0.3
    noisy: float = 0.5
    noise: float = 0.4
    own: float = 0.7
    coarse: float = 0.25
    strayed: float = 0.02
    silent_weight: float = 0.5
    drawn: float = 0.3
    blur: float = 0.04
    balance: float = 0.75


# ------------------------------------------------------------------------------------------------ data
@dataclass(frozen=True)
class Data:
    """Frames and replies of both splits, on the device."""

    frames: Frames
    train: Replies
    dev: Replies
    dev_clips: list[Clip]
    general: Tensor


def is_dev(clip: Clip) -> bool:
    """Whether a reply is held out, by its text."""
    return clip.intent == "answer" and zlib.crc32(clip.text.encode()) % 100 < _DEV_PERCENT


def prepare(
    bank: Bank, clips: Sequence[Clip], tokens: TextTokens, codec: Codec, known: Sequence[int], offsets: int, seed: int
) -> Data:
    """Encode ``clips``, those for training with so many ``offsets`` of the sound in its first frame."""
    renderer = Renderer(bank, tokens, codec, np.random.default_rng(seed), spelling=0.1)
    learnt, held = [clip for clip in clips if not is_dev(clip)], [clip for clip in clips if is_dev(clip)]
    train = renderer.render(learnt, [REPLY_FRAME * i // offsets for i in range(offsets)], cuts=min(2, offsets))
    dev = renderer.render(held or learnt[:8], [0], cuts=0)
    frames = Frames.of(renderer.latents(), codec, codec.books, known)
    general = torch.tensor([learnt[i].intent == "general" for i in train.clips.tolist()], device=train.clips.device)
    return Data(frames, train, dev, held or list(learnt[:8]), general)


def reply_weights(replies: Replies, general: Tensor, share: float) -> Tensor:
    """How often each rendering is drawn: ``general`` sentences with this share, sound without an offset for every third."""
    renderings = (replies.clips == replies.clips[0]).sum()
    aligned = torch.arange(len(general), device=general.device) % renderings == 0
    weights = torch.where(aligned, (renderings - 1).clamp(min=1) / 2, 1.0)
    kinds = general.float().mean()
    is_mixed = 0 < float(kinds) < 1
    return weights * torch.where(general, share / kinds, (1 - share) / (1 - kinds)) if is_mixed else weights


# ------------------------------------------------------------------------------------------------ loss
class Trainer:
    """One step of training: draws a batch, disturbs what is fed back, scores, and notes what the network would have said."""

    def __init__(self, decoder: SpeechDecoder, data: Data, settings: Settings) -> None:
        self.decoder, self.frames, self.settings = decoder, data.frames, settings
        weights = reply_weights(data.train, data.general, settings.general)
        self.windows = Windows(data.train, weights, settings.frames, interrupted=settings.interrupted)
        self.passes = self.frames.known.shape[1]

    def loss(self, late: Tensor, *, speak: bool) -> dict[str, Tensor]:
        """Numbers for the log, "loss" among them. ``speak``: also draw codes for a quarter of the sessions, to be fed back.

        ``late``: (), share of the training that is over.
        """
        settings, model = self.settings, self.decoder.tts_model
        window = self.windows.draw(settings.batch)
        without_text = self._some(settings.batch, settings.without_text)
        hidden = self.decoder(self.disturbed(window), window.text, without_text)
        numbers = torch.randint(self.passes, (settings.passes, *window.frames.shape), device=hidden.device)
        rows = window.frames.expand_as(numbers)
        found, is_silent = score(self.decoder, hidden, self.frames, rows, numbers, settings.blur * (1 - late))
        per_dimension = torch.lerp(found.nll, found.drawn_nll, settings.drawn) / model.mog_head.latent
        # Where little is uncertain, likelihoods are steep: they would drown what matters most, the first codebooks.
        weights = torch.where(is_silent, settings.silent_weight, 1.0) * found.log_std.exp() ** (2 * settings.balance)
        if speak:
            self._speak(window, hidden.detach(), without_text)
        return {
            "loss": (per_dimension * weights).mean(),
            "speech_nll": _mean(found.nll.detach(), ~is_silent) / model.mog_head.latent,
            "speech_drawn_nll": _mean(found.drawn_nll.detach(), ~is_silent) / model.mog_head.latent,
            "silence_nll": _mean(found.nll.detach(), is_silent) / model.mog_head.latent,
            "entropy": _mean(found.entropy, ~is_silent),
        }

    def disturbed(self, window: Window) -> Tensor:
        """Code sums (B, T, Z) to feed back: noise on all, codes of its own, trailing books lost or wrong, stray frames."""
        frames, settings, (batch, length) = self.frames, self.settings, window.frames.shape
        place = window.frames.device
        sums = frames.sums[window.frames]
        share = torch.rand(batch, 1, device=place) * self._some(batch, settings.own)[:, None] * 1.5  # of its frames
        is_own = torch.rand(batch, length, device=place) < share
        sums = torch.where(is_own[..., None], frames.own[window.frames], sums)
        # The first books right, the others those of another frame, or none.
        strangers = torch.randint(len(frames.sums), (batch, length), device=place)
        kept = torch.randint(1, self.passes, (batch, length), device=place)
        rest = (frames.sums[strangers] - frames.known[strangers, kept]) * self._some(batch * length, 0.5).view(
            batch, length, 1
        )
        is_coarse = self._some(batch, settings.coarse)[:, None] & (torch.rand(batch, length, device=place) < 0.5)
        sums = torch.where(is_coarse[..., None], frames.known[window.frames, kept] + rest, sums)
        is_stray = self._some(batch * length, settings.strayed).view(batch, length, 1)
        sums = torch.where(is_stray, frames.sums[strangers], sums)
        strength = torch.rand(batch, 1, 1, device=place).square() * settings.noise
        strength = strength * self._some(batch, settings.noisy)[:, None, None]
        return sums + strength * torch.randn_like(sums)

    @torch.no_grad()
    def rehearse(self, batch: int) -> None:
        """Speak whole sessions, as in use, and keep what was said to be fed back later on."""
        self.decoder.eval()
        window = self.windows.draw(batch)
        self._keep(window.frames, generate(self.decoder, window.text))
        self.decoder.train()

    @torch.no_grad()
    def _speak(self, window: Window, hidden: Tensor, without_text: Tensor) -> None:
        some = len(hidden) // 4
        model, rows = self.decoder.tts_model, hidden[:some].flatten(0, 1)
        _, sums = model.refine(rows, None, model.draws(len(rows)))
        # What was said without text is not what the network would say.
        frames = torch.where(without_text[:some, None], 0, window.frames[:some])
        self._keep(frames, sums.view(*frames.shape, -1))

    def _keep(self, frames: Tensor, sums: Tensor) -> None:
        self.frames.own[frames.flatten()] = sums.flatten(0, 1)
        self.frames.own[0] = self.frames.sums[0]  # silence is one frame for all

    def _some(self, count: int, share: float) -> Tensor:
        return torch.rand(count, device=self.frames.sums.device) < share


def score(
    decoder: SpeechDecoder, hidden: Tensor, frames: Frames, rows: Tensor, passes: Tensor, blur: Tensor | float = 0.0
) -> tuple[Likelihood, Tensor]:
    """Likelihood of what pass ``passes`` (P, B, T) has to predict of frames ``rows`` (P, B, T), and which of them are silence.

    ``hidden``: (B, T, H). ``blur``: spread of the noise added to the latents. All results are flat, (P * B * T,).
    """
    model = decoder.tts_model
    known = frames.known[rows, passes]
    x = model.mog_head.stack((hidden + model.embed_code(known)).flatten(0, -2))
    residual = (frames.latents[rows] - known).flatten(0, -2)
    return model.mog_head.likelihood(x, residual + blur * torch.randn_like(residual)), (rows == 0).flatten()


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return (values * where).sum() / where.sum().clamp(min=1)


# ------------------------------------------------------------------------------------------------ evaluation
class Evaluation:
    """Held-out replies: their likelihood, and how near the network comes to them when it speaks by itself."""

    def __init__(self, data: Data, codec: Codec, folder: Path, frames: int, samples: int = 10) -> None:
        self._data, self._codec, self._folder, self._samples = data, codec, folder, samples
        self._length = frames

    @torch.no_grad()
    def __call__(self, decoder: SpeechDecoder, step: int) -> dict[str, float]:
        """``decoder`` in evaluation mode -> numbers; writes samples named after ``step``."""
        numbers = self._likelihood(decoder)
        generator = torch.Generator(self._data.frames.sums.device).manual_seed(1)
        dev, train = self._sessions(self._data.dev), self._sessions(self._data.train)
        both = generate(decoder, torch.cat([dev.text, train.text]), generator=generator)
        for name, window, said in (("dev", dev, both[: len(dev.text)]), ("train", train, both[len(dev.text) :])):
            numbers |= {f"{name}_{key}": value for key, value in self._compare(said, window).items()}
        self._write(both, step)
        return numbers | self._silence(decoder, generator)

    def _sessions(self, replies: Replies, count: int = 64) -> Window:
        """Sessions of one reply each, the sound without an offset."""
        clips, place = replies.clips, replies.clips.device
        renderings = int((clips == clips[0]).sum())
        chosen = torch.arange(0, len(clips), renderings, device=place)[:, None]
        chosen = chosen[:: max(1, len(chosen) // count)][:count]
        gaps = torch.full_like(chosen, 5)
        return Windows(replies, clips.float(), self._length, interrupted=0.0).lay(
            chosen, gaps, torch.full_like(chosen, -1)
        )

    def _likelihood(self, decoder: SpeechDecoder) -> dict[str, float]:
        """By pass, in nats a dimension; how components are used in the first and the last pass."""
        window, frames = self._sessions(self._data.dev), self._data.frames
        hidden = decoder(
            frames.sums[window.frames],
            window.text,
            torch.zeros(len(window.text), dtype=torch.bool, device=window.text.device),
        )
        numbers = {}
        passes = frames.known.shape[1]
        for i in range(passes):
            found, is_silent = score(
                decoder, hidden, frames, window.frames[None], torch.full_like(window.frames[None], i)
            )
            numbers[f"dev_nll_{i}"] = float(_mean(found.nll / decoder.tts_model.mog_head.latent, ~is_silent))
            if i in (0, passes - 1):
                used = torch.bincount(
                    found.component[~is_silent], minlength=decoder.tts_model.mog_head.components
                ).float()
                shares = used / used.sum()
                numbers[f"dev_entropy_{i}"] = float(_mean(found.entropy, ~is_silent))
                numbers[f"dev_log_std_{i}"] = float(_mean(found.log_std, ~is_silent))
                numbers[f"dev_components_{i}"] = float(torch.exp(-(shares * shares.clamp(min=1e-9).log()).sum()))
            if i == passes - 1:
                numbers["silence_log_std"] = float(_mean(found.log_std, is_silent))
        return numbers

    def _compare(self, said: Tensor, window: Window) -> dict[str, float]:
        """Latents and sound of what was ``said`` (B, T, Z) against the recordings, in frames with sound."""
        frames, heard = self._data.frames, window.frames > 0
        wanted = frames.sums[window.frames]
        center = wanted[heard].mean(dim=0)
        a, b = said[heard] - center, wanted[heard] - center
        spread = b.square().mean()
        mel = (log_mel(self._codec.decode(said)) - log_mel(self._codec.decode(wanted))).abs().mean(dim=-1)
        return {
            "error": float((a - b).square().mean() / spread),
            "correlation": float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-9)),
            "size": float(a.square().mean() / spread),
            "mel_db": float(mel[heard].mean()),
        }

    def _write(self, said: Tensor, step: int) -> None:
        """Sound of the first few of what was ``said``: dev replies."""
        count = min(self._samples, len(self._data.dev_clips))
        sound = self._codec.decode(said[:count]).cpu().numpy()
        for i, samples in enumerate(sound):
            text = self._data.dev_clips[i * max(1, len(self._data.dev_clips) // 64)].text
            name = "".join(letter if letter.isalnum() else "_" for letter in text)
            folder = self._folder / f"samples_{step}"
            folder.mkdir(exist_ok=True)
            sf.write(folder / f"{i}_{name}.wav", np.clip(samples, -1, 1), REPLY_RATE)

    def _silence(self, decoder: SpeechDecoder, generator: torch.Generator) -> dict[str, float]:
        """Minutes without text: the share of frames that are not exactly silence."""
        place = self._data.frames.sums.device
        said = generate(decoder, torch.full((4, _SILENCE_FRAMES), PAD, device=place), generator=generator)
        is_off = (said - self._data.frames.sums[0]).abs().amax(dim=-1) > 1e-6
        return {
            "silence_off": float(is_off.float().mean()),
            "silence_level": float(self._codec.decode(said).abs().max()),
        }


def log_mel(sound: Tensor, bands: int = 80, size: int = 1024) -> Tensor:
    """Sound (B, 1764 T) at 22.05 kHz -> its mel spectrum in dB (B, T, bands), above -80 dB."""
    bins = torch.linspace(0, REPLY_RATE / 2, size // 2 + 1, device=sound.device)
    mels = torch.linspace(0, 2595 * math.log10(1 + REPLY_RATE / 1400), bands + 2, device=sound.device)
    edges = 700 * (10 ** (mels / 2595) - 1)
    rising = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    filters = torch.minimum(rising, falling).clamp(min=0)  # (bins, bands)
    spectrum = torch.stft(
        sound, size, REPLY_FRAME // 4, window=torch.hann_window(size, device=sound.device), return_complex=True
    )
    power = spectrum.abs().square().transpose(1, 2) @ filters
    frames = sound.shape[1] // REPLY_FRAME
    decibels = 10 * torch.log10(power[:, : 4 * frames] / size + 1e-8)
    return decibels.unflatten(1, (frames, 4)).mean(dim=2)


# ------------------------------------------------------------------------------------------------ program
def load_codec(folder: Path, config: dict[str, Any], place: torch.device) -> Codec:
    """The trained codec, frozen; its codebooks rounded as they will be stored."""
    codec = Codec(config["codec_config"])
    load_weights(codec, folder)
    codec.prvq.set_books(codec.books.to(torch.bfloat16).float())
    return codec.to(place).eval().requires_grad_(False)


def train(
    decoder: SpeechDecoder, data: Data, codec: Codec, run: Run, settings: Settings, options: argparse.Namespace
) -> None:
    """Train until the run's time is over; evaluate now and then."""
    trainer = Trainer(decoder, data, settings)
    evaluate = Evaluation(data, codec, run.folder, settings.frames)
    evaluated = rehearsed = 0.0
    late, spoken = torch.zeros((), device=data.frames.sums.device), data.frames.own
    speaking, listening = (
        run.replayed(partial(trainer.loss, speak=speak), changed=[spoken] if speak else [], graph=options.graph)
        for speak in (True, False)
    )
    while run.going():
        (listening if run.steps % options.speak_every else speaking)(late.fill_(run.fraction()))
        if options.rehearse_every and run.elapsed() - rehearsed > options.rehearse_every:
            trainer.rehearse(4 * settings.batch)
            rehearsed = run.elapsed()
        if run.elapsed() - evaluated > options.evaluate_every:
            run.save()
            run.event(**evaluate(run.average, run.steps))
            evaluated = run.elapsed()
    run.finish()
    run.event(**evaluate(run.average, run.steps))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the speech decoder.")
    for name in ("corpus", "start", "codec", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="a run to take the weights of")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--drawn", type=float, default=Settings.drawn, help="see Settings")
    parser.add_argument("--average", type=float, default=0.999, help="how much of the average of weights a step keeps")
    parser.add_argument("--warm-up", type=int, default=300, help="steps")
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--frames", type=int, default=Settings.frames)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--offsets", type=int, default=12, help="of a sound in its first frame, for each reply")
    parser.add_argument("--clips", type=int, help="train on so many replies only")
    parser.add_argument("--speak-every", type=int, default=2, help="steps")
    parser.add_argument("--rehearse-every", type=float, default=15, help="seconds; 0: never")
    parser.add_argument("--evaluate-every", type=float, default=60, help="seconds")
    parser.add_argument("--no-graph", dest="graph", action="store_false", help="take steps kernel by kernel")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    place = device()
    config = json.loads((options.start / "config.json").read_text())
    tokens = TextTokens(options.start)
    bank = load_answers(options.corpus)
    codec = load_codec(options.codec, config, place)
    settings = Settings(batch=options.batch, frames=options.frames, drawn=options.drawn)
    known = known_counts(config["tts_config"])
    clips = bank.clips[: options.clips]
    data = prepare(bank, clips, tokens, codec, known, options.offsets, options.seed)
    decoder = SpeechDecoder(config["tts_config"], tokens, options.dropout)
    decoder.set_codebooks(codec.books.cpu(), data.frames.silence.cpu())
    decoder.to(place)
    if options.resume:
        load_weights(decoder, options.resume)
    run = Run(
        options.out,
        decoder,
        seconds=options.seconds,
        peak_rate=options.rate,
        warm_up=options.warm_up,
        average=options.average,
        weight_decay=options.weight_decay,
        settings=vars(options) | {"frames_in_all": len(data.frames.sums)},
    )
    train(decoder, data, codec, run, settings, options)


if __name__ == "__main__":
    main()
