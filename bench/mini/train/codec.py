"""Train the codec on the assistant's voice.

    python -m vcpipe.bench.mini.train.codec --corpus FOLDER --start FOLDER --seconds 270 --out FIRST
    python -m vcpipe.bench.mini.train.codec --corpus FOLDER --start FOLDER --seconds 300 --out SECOND --resume FIRST \
        --freeze-codes
    python -m vcpipe.bench.mini.train.codec --corpus FOLDER --start FOLDER --seconds 300 --out THIRD --resume SECOND \
        --freeze-codes --tts TTS_RUN --rate 2e-4

The first run trains encoder, codebooks and decoder, the last part of it against discriminators. At its end encoder and books
take bfloat16 values, so the speech decoder can be trained on the codes of FIRST. The second run leaves them as they are and
trains the decoder further, always against discriminators. With ``--tts`` part of what it decodes is what the speech decoder
makes of the replies: it errs, and frames drawn one by one do not fit together as true ones do.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from vcpipe.bench.mini.nets.codec import Codec, spectral_features
from vcpipe.bench.mini.nets.discriminators import Discriminators, Opinions, discriminator_loss, generator_losses, halves
from vcpipe.bench.mini.sound import Bank, Clip, load_answers
from vcpipe.bench.mini.tokens import TextTokens
from vcpipe.bench.mini.train.books import BookAverages, fit_books
from vcpipe.bench.mini.train.codec_crops import CONTEXT, FRAMES, Crops, is_dev, silent_frames
from vcpipe.bench.mini.train.codec_said import SaidReplies, load_speaker
from vcpipe.bench.mini.train.spectral import SpectralDistance, loudness_of_silence
from vcpipe.bench.mini.training import Run, device, load_weights

#: Code frames of the piece that the discriminators see.
JUDGED = 7

#: Latents from which the books are learnt at once.
INITIAL_LATENTS, FINAL_LATENTS = 16_384, 65_536

#: Offsets of a reply's sound in its first frame, and draws of each, that the speech decoder makes at the start.
SAID_OFFSETS, SAID_TIMES = 12, 2

_EVALUATION_SECONDS = 60.0


# ------------------------------------------------------------------------------------------------ latents
class Latents:
    """From waveforms to what the decoder is given, and the losses on the way.

    The decoder is trained on sums of all books, of some, and on latents that are not quantised, with noise on top: so that it
    takes what the speech decoder predicts. That also keeps the encoder from hiding detail in the latents.
    """

    def __init__(self, codec: Codec, *, frozen: bool) -> None:
        self._codec, self._frozen = codec, frozen
        self._averages: BookAverages | None = None
        self._ready = frozen
        # At most, in standard deviations of a latent; more of it hides the phase, and voices get hoarse.
        self.noise = 0.1 if frozen else 0.15

    def start_books(self, crops: Crops, count: int) -> None:
        """Learn the first books from ``count`` latents."""
        fit_books(self._codec.prvq, latents_of(self._codec, crops, count), 10)
        self._averages = BookAverages(self._codec.prvq)
        self._ready = True

    def __call__(self, waveform: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(B, n) -> what to decode (B, T, 64), losses by name (none where the codes are frozen)."""
        codec = self._codec
        zero, silent = silent_frames(waveform, codec.frame_samples)
        with torch.set_grad_enabled(not self._frozen):
            latents = codec.encode(waveform)
        counted = ~silent
        counted[:, :CONTEXT] = False
        share = counted / counted.sum().clamp(min=1)
        given, losses = latents, {}
        if self._ready:
            rest = self._rest(latents, counted)
            given = latents - rest.detach()
            losses["commitment"] = ((latents - given.detach()).square().mean(-1) * share).sum()
        if self._frozen:
            losses = {}
        else:
            losses["scale"] = _distance_to_normal(latents, share)
            losses["silence"] = (latents.norm(dim=-1) * silent).sum() / silent.sum().clamp(min=1)
        amount = self.noise * torch.rand(len(given), 1, 1, device=given.device)
        return given + amount * torch.randn_like(given) * ~zero[..., None], losses

    def _rest(self, latents: Tensor, counted: Tensor) -> Tensor:
        """(B, T, 64): what the books that a sample may use leave of its latents; nothing for samples without quantisation."""
        flat = latents.detach().flatten(0, 1)
        codes, given, total = self._codec.prvq.quantise(flat)
        if self._averages is not None:
            self._averages.update(codes, given, counted.flatten().float())
        books = len(given)
        # Index n: what n books leave; n = books + 1 stands for nothing.
        rests = torch.cat([given, (flat - total)[None], torch.zeros_like(flat)[None]]).unflatten(1, latents.shape[:2])
        batch = len(latents)
        chance = torch.rand(batch, device=flat.device)
        some = torch.randint(books // 4 if self._frozen else 1, books + 1, (batch,), device=flat.device)
        all_of_them, plain = (0.6, 0.15) if self._frozen else (0.35, 0.3)
        used = torch.where(chance < all_of_them, books, torch.where(chance < 1 - plain, some, books + 1))
        return rests[used, torch.arange(batch, device=flat.device)]


def _distance_to_normal(latents: Tensor, share: Tensor) -> Tensor:
    """Per dimension the divergence of a normal distribution with the batch's mean and variance from the standard one."""
    mean = (latents * share[..., None]).sum((0, 1))
    variance = ((latents - mean).square() * share[..., None]).sum((0, 1))
    return 0.5 * (mean.square() + variance - 1 - (variance + 1e-4).log()).mean()


@torch.no_grad()
def latents_of(codec: Codec, crops: Crops, count: int) -> Tensor:
    """About ``count`` latents (N, 64) of sound."""
    found: list[Tensor] = []
    while sum(map(len, found)) < count:
        waveform = crops.batch(min(64, 1 + count // FRAMES))
        _, silent = silent_frames(waveform, codec.frame_samples)
        found.append(codec.encode(waveform)[:, CONTEXT:][~silent[:, CONTEXT:]])
    return torch.cat(found)


@torch.no_grad()
def scale_inputs(codec: Codec, waveform: Tensor) -> None:
    """Begin with inputs of equal size: in speech the highest bins are a thousandth of the lowest."""
    features = spectral_features(waveform, codec.n_fft, codec.hop)
    size = features.square().mean((0, 1)).sqrt()
    # Two of them are always zero: a real signal has no imaginary part there.
    codec.encoder.layers[0].weight /= size.clamp(min=1e-3 * float(size.max()))[None, :, None]


# ------------------------------------------------------------------------------------------------ evaluation
class Evaluation:
    """Numbers on clips that training does not see, and on silence. ``said``: of such clips."""

    _CLIPS, _FRAMES = 16, 40

    def __init__(
        self, bank: Bank, clips: list[Clip], frame: int, place: torch.device, said: SaidReplies | None = None
    ) -> None:
        self._said = None
        if said is not None:
            chosen = torch.arange(min(len(said), self._CLIPS), device=place)
            zeros = torch.zeros_like(chosen)
            self._said = said.pieces(chosen, zeros, self._FRAMES, zeros)
        self._waveform = torch.zeros(min(len(clips), self._CLIPS), self._FRAMES * frame)
        for row, clip in zip(self._waveform, clips, strict=False):
            sound = torch.from_numpy(bank.cut(clip))[: len(row)]
            row[: len(sound)] = sound
        self._waveform = self._waveform.to(place)
        self._silence = torch.zeros(1, 125 * frame, device=place)

    @torch.no_grad()
    def __call__(self, codec: Codec, distance: SpectralDistance) -> dict[str, float]:
        """``mel_*``: mean distance of natural log-mel spectra; ``left_*``: share of the latents' energy that books leave.

        ``mel_said``: of what the speech decoder draws; ``loudness_said``: level against the recording's, in dB.
        ``start_db``: level of the first 10 ms of a session that begins with silence.
        """
        zero, silent = silent_frames(self._waveform, codec.frame_samples)
        latents = codec.encode(self._waveform)
        true = distance.log_mel(self._waveform)
        counted = true.amax(-1) > -7
        numbers = {"mel_plain": self._mel(codec.decode(latents), true, counted, distance)}
        for books in (4, 8, 16, None):
            _, total = codec.quantise(latents, books)
            decoded = codec.decode(total)
            numbers[f"mel_{books or 'all'}"] = self._mel(decoded, true, counted, distance)
            left = (latents - total)[~silent].square().sum() / latents[~silent].square().sum()
            numbers[f"left_{books or 'all'}"] = float(left)
        rough = codec.decode(total, torch.bfloat16)
        numbers["bf16_snr"] = float(10 * torch.log10(decoded.square().sum() / (rough - decoded).square().sum()))
        deviations = latents[~silent].std(0)
        numbers |= {
            "std": float(deviations.mean()),
            "std_min": float(deviations.min()),
            "std_max": float(deviations.max()),
        }
        pauses = decoded.unflatten(1, (-1, codec.frame_samples))[zero]
        numbers["pause_db"] = _decibel(pauses) if len(pauses) else -200.0
        return numbers | self._of_silence(codec) | self._of_said(codec, distance)

    def _mel(self, decoded: Tensor, true: Tensor, counted: Tensor, distance: SpectralDistance) -> float:
        return float((distance.log_mel(decoded) - true)[counted].abs().mean())

    def _of_said(self, codec: Codec, distance: SpectralDistance) -> dict[str, float]:
        if self._said is None:
            return {}
        waveform, latents = self._said
        decoded, true = codec.decode(latents), distance.log_mel(waveform)
        mel = self._mel(decoded, true, true.amax(-1) > -7, distance)
        return {"mel_said": mel, "loudness_said": _decibel(decoded) - _decibel(waveform)}

    def _of_silence(self, codec: Codec) -> dict[str, float]:
        latents = codec.encode(self._silence)
        codes, total = codec.quantise(latents)
        decoded = codec.decode(total, torch.bfloat16)
        return {
            "silence_norm": float(latents.norm(dim=-1).max()),
            "silence_kinds": float(len(codes[0].unique(dim=0))),
            "silence_zero_codes": float((codes == 0).all(-1).float().mean()),
            "silence_db": _decibel(decoded),
            "start_db": _decibel(decoded[:, : codec.frame_samples // 8]),
        }


def _decibel(waveform: Tensor) -> float:
    return float(10 * torch.log10(waveform.square().mean() + 1e-20))


# ------------------------------------------------------------------------------------------------ training
class Rival:
    """The discriminators and their training, on random pieces of JUDGED frames."""

    def __init__(self, run: Run, frame: int, head_start: int) -> None:
        self.run, self._frame, self._head_start = run, frame, head_start
        self._chance = random.Random(0)  # not the device's, which would have to be waited for

    def __call__(self, decoded: Tensor, true: Tensor) -> dict[str, Tensor]:
        """One step of the discriminators; then the losses of the decoder, once the discriminators know anything."""
        self.run.going()
        start = self._chance.randrange(decoded.shape[1] - JUDGED * self._frame + 1)
        fake, real = (sound[:, start : start + JUDGED * self._frame] for sound in (decoded, true))
        opinions_of_real, opinions_of_fake = halves(self._judge(torch.cat([real, fake.detach()])))
        self.run.update(discriminator_loss(opinions_of_real, opinions_of_fake))
        if self.run.steps <= self._head_start:
            return {}
        discriminators = self.run.network.requires_grad_(False)
        # What they made of true sound a step ago serves as well.
        adversarial, features = generator_losses(opinions_of_real, self._judge(fake))
        discriminators.requires_grad_(True)
        return {"adversarial": adversarial, "features": features}

    def _judge(self, waveform: Tensor) -> Opinions:
        kind = waveform.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            return self.run.network(waveform)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    place = device()
    bank = load_answers(options.corpus)
    clips = [clip for clip in bank.clips if not is_dev(clip)][: options.clips]
    dev = [clip for clip in bank.clips if is_dev(clip)] if options.clips is None else clips
    codec = Codec(json.loads((options.start / "config.json").read_text())["codec_config"])
    discriminators = Discriminators()
    if options.resume:
        load_weights(codec, options.resume)
        judges = options.resume / "discriminators" / "weights.safetensors"
        if judges.is_file():
            discriminators.load_state_dict(load_file(str(judges)))
    codec, discriminators = codec.to(place), discriminators.to(place)
    frozen = options.freeze_codes
    if frozen:
        codec.encoder.requires_grad_(False)
    crops = Crops(bank.on(place), clips, codec.frame_samples)
    if not options.resume:
        scale_inputs(codec, crops.batch(64))
    settings = {**vars(options), "clips_used": len(clips)}
    common = {"settings": settings, "betas": (0.8, 0.99), "warm_up": options.warm_up}
    run = Run(options.out, codec, seconds=options.seconds, peak_rate=options.rate, **common)
    # Books are no mean of past ones: both networks share them.
    run.average.prvq = codec.prvq
    adversarial_from = 0.0 if frozen else options.adversarial_from
    rival_run = Run(
        options.out / "discriminators",
        discriminators,
        seconds=options.seconds * max(0.01, 1 - adversarial_from),
        peak_rate=options.discriminator_rate,
        **common,
    )
    rival = Rival(rival_run, codec.frame_samples, options.head_start)
    latents = Latents(codec, frozen=frozen)
    distance = SpectralDistance(bank.rate).to(place)
    said, said_in_dev = None, None
    if options.tts:
        said, said_in_dev = said_replies(options, bank, (clips, dev), codec)
    of_said = round(options.batch * options.tts_share) if said else 0
    evaluation = Evaluation(bank, dev, codec.frame_samples, place, said_in_dev)
    books_from = 0.0 if options.resume else 0.12
    bfloat16_from = 0.0 if frozen and place.type == "cuda" else options.bfloat16_from
    begun, evaluated = frozen, 0.0
    first = CONTEXT * codec.frame_samples
    while run.going():
        if not begun and run.fraction() >= books_from:
            latents.start_books(crops, INITIAL_LATENTS)
            begun = True
        waveform = crops.batch(options.batch - of_said)
        given, losses = latents(waveform)
        if said:
            recorded, drawn = said.batch(of_said, FRAMES)
            waveform, given = torch.cat([waveform, recorded]), torch.cat([given, drawn])
        dtype = torch.bfloat16 if run.fraction() >= bfloat16_from else torch.float32
        decoded, losses["start"] = decode(codec, given, dtype)
        decoded, true = decoded[:, first:], waveform[:, first:]
        zero = silent_frames(waveform, codec.frame_samples)[0].repeat_interleave(codec.frame_samples, dim=1)[:, first:]
        losses["mel"], losses["magnitude"] = distance(decoded, true)
        losses["pause"] = loudness_of_silence(decoded, zero)
        if run.fraction() >= adversarial_from:
            losses |= rival(decoded, true)
        run.update(sum(WEIGHTS[name] * loss for name, loss in losses.items()))
        run.log(**losses)
        if run.elapsed() - evaluated > _EVALUATION_SECONDS:
            evaluated = run.elapsed()
            run.save()
            run.event(**evaluation(run.average, distance))
    if not frozen:
        settle(run.average, crops, FINAL_LATENTS)
    run.finish()
    if rival_run.steps:
        rival_run.finish()
    run.event(**evaluation(run.average, distance))


def decode(codec: Codec, latents: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Latents (B, T, 64) -> their waveform (B, 1764 T), and how loud a session begins that begins with silence.

    A session has no past: its first convolutions see zeros, which silence does not look like further up. Of recordings this
    teaches nothing, as the first frames of a crop do not count.
    """
    decoded = codec.decode(torch.cat([latents, torch.zeros_like(latents[:1])]), dtype)
    beginning = decoded[-1:, : CONTEXT * codec.frame_samples]
    return decoded[:-1], loudness_of_silence(beginning, torch.ones_like(beginning))


def said_replies(
    options: argparse.Namespace, bank: Bank, splits: tuple[list[Clip], list[Clip]], codec: Codec
) -> tuple[SaidReplies, SaidReplies]:
    """What the speech decoder of ``options.tts`` makes of both ``splits``: of the first in every way, of the second in one."""
    speaker, tokens = load_speaker(options.tts, options.start, codec), TextTokens(options.start)
    sound = bank.on(codec.books.device)
    every = [i * codec.frame_samples // SAID_OFFSETS for i in range(SAID_OFFSETS)]
    first, second = (
        SaidReplies(bank, sound, clips, codec, speaker, tokens, offsets=offsets, times=times)
        for clips, offsets, times in zip(splits, (every, [0]), (SAID_TIMES, 1), strict=True)
    )
    return first, second


#: What each loss counts.
WEIGHTS = {
    "mel": 15.0,
    "magnitude": 1.0,
    "pause": 0.5,
    "start": 0.5,
    "adversarial": 1.0,
    "features": 3.0,
    "commitment": 0.25,
    "scale": 1.0,
    "silence": 1.0,
}


def settle(codec: Codec, crops: Crops, count: int) -> None:
    """Give the encoder its final, bfloat16 values and fit the books to ``count`` of the latents that it then has."""
    with torch.no_grad():
        for weight in codec.encoder.parameters():
            weight.copy_(weight.bfloat16())
        # What training left of silence goes into the last bias, as the last convolution has none.
        block, convolution = codec.encoder.layers[-2], codec.encoder.layers[-1]
        silence = codec.encode(torch.zeros(1, 8 * codec.frame_samples, device=codec.books.device))[0, -1]
        bias = block.pwconv2.bias
        bias.copy_((bias - torch.linalg.pinv(convolution.weight.sum(-1)) @ silence).bfloat16())
    fit_books(codec.prvq, latents_of(codec, crops, count), 20, rounded=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with answers.jsonl and answers/")
    parser.add_argument(
        "--start", type=Path, required=True, help="folder with config.json, and for --tts the tokenizer"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--seconds", type=float, required=True, help="time to train")
    parser.add_argument("--resume", type=Path, help="folder of a run to begin from")
    parser.add_argument("--freeze-codes", action="store_true", help="train the decoder only")
    parser.add_argument("--tts", type=Path, help="a run of the speech decoder: also train on what it draws")
    parser.add_argument("--tts-share", type=float, default=0.5, help="share of a batch that is of it")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=4e-4, help="peak learning rate")
    parser.add_argument("--discriminator-rate", type=float, default=5e-4)
    parser.add_argument("--warm-up", type=int, default=200, help="steps in which the rate rises")
    parser.add_argument("--bfloat16-from", type=float, default=0.4, help="share of the time with a float32 decoder")
    parser.add_argument("--adversarial-from", type=float, default=0.5, help="share of the time without discriminators")
    parser.add_argument("--head-start", type=int, default=100, help="steps the discriminators learn alone")
    parser.add_argument("--clips", type=int, help="use the first clips only, and evaluate on them")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.tts and not options.freeze_codes:
        parser.error("--tts needs --freeze-codes: the speech decoder speaks in codes that are settled")
    train(options)


if __name__ == "__main__":
    main()
