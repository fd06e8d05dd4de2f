"""Train the codec on the assistant's voice.

    python -m vcpipe.bench.mini.train.codec --corpus FOLDER --start FOLDER --seconds 270 --out FIRST
    python -m vcpipe.bench.mini.train.codec --corpus FOLDER --start FOLDER --seconds 300 --out SECOND --resume FIRST \
        --freeze-codes

The first run trains encoder, codebooks and decoder, the last part of it against discriminators. At its end encoder and books
take bfloat16 values, so the speech decoder can be trained on the codes of FIRST. The second run leaves them as they are and
trains the decoder further, always against discriminators.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from vcpipe.bench.mini.nets.codec import Codec, spectral_features
from vcpipe.bench.mini.nets.discriminators import Discriminators, Opinions, discriminator_loss, generator_losses, halves
from vcpipe.bench.mini.sound import Bank, Clip, load_answers
from vcpipe.bench.mini.train.books import BookAverages, fit_books
from vcpipe.bench.mini.train.spectral import SpectralDistance, loudness_of_silence
from vcpipe.bench.mini.training import Run, device, load_weights

#: Code frames of a crop. The first few lack the past that encoder and decoder would see: no loss is taken of them.
FRAMES, CONTEXT = 16, 2

#: Code frames of the piece that the discriminators see.
JUDGED = 7

#: Latents from which the books are learnt at once.
INITIAL_LATENTS, FINAL_LATENTS = 16_384, 65_536

_EVALUATION_SECONDS = 60.0


# ------------------------------------------------------------------------------------------------ sound
def is_dev(clip: Clip) -> bool:
    """About 3 % of the clips, by a hash of their names."""
    return hashlib.sha1(clip.id.encode()).digest()[0] < 8


class Crops:
    """Random crops of clips amid digital silence, all on the device.

    Half of them lie on the clip's own frame grid, as replies do. Some clips are cut off as an interruption does it, and some
    crops are silent throughout. Loudness varies by 3 dB either way.
    """

    _SILENT, _CUT, _FADE = 0.03, 0.05, 220

    def __init__(self, sound: Tensor, clips: list[Clip], frame: int) -> None:
        self._sound, self._frame = sound, frame
        self._offsets = torch.tensor([clip.offset for clip in clips], device=sound.device)
        self._lengths = torch.tensor([clip.samples for clip in clips], device=sound.device)
        self._weights = self._lengths + 0.2 * FRAMES * frame

    def batch(self, size: int) -> Tensor:
        """(size, FRAMES * frame) float32."""
        place, crop = self._sound.device, FRAMES * self._frame
        clip = torch.multinomial(self._weights, size, replacement=True)
        length, offset = self._lengths[clip], self._offsets[clip]
        chance = torch.rand(6, size, device=place)
        start = (-0.3 * crop + chance[0] * (length - 0.2 * crop)).long()
        start = torch.where(chance[1] < 0.5, start // self._frame * self._frame, start)
        index = start[:, None] + torch.arange(crop, device=place)  # (size, crop), from the clip's first sample
        inside = (index >= 0) & (index < length[:, None])
        sound = self._sound[offset[:, None] + torch.where(inside, index, 0)].float() / 32768 * inside
        end = (chance[2] * FRAMES).long() * self._frame
        fade = ((end[:, None] - torch.arange(crop, device=place)) / self._FADE).clamp(0, 1)
        sound = torch.where((chance[3] < self._CUT)[:, None], sound * fade, sound)
        gain = 10 ** ((chance[4] * 6 - 3) / 20) * (chance[5] >= self._SILENT)
        return (sound * gain[:, None]).clamp(-1, 1)


def silent_frames(waveform: Tensor, frame: int) -> tuple[Tensor, Tensor]:
    """(B, T * frame) -> two (B, T) masks: frames of zeros, and those of them with such frames in all the past that counts."""
    zero = (waveform.unflatten(1, (-1, frame)) == 0).all(-1)
    before = torch.cat([torch.ones_like(zero[:, :2]), zero], dim=1)
    return zero, zero & before[:, 1:-1] & before[:, :-2]


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
    """Numbers on clips that training does not see, and on silence."""

    _CLIPS, _FRAMES = 16, 40

    def __init__(self, bank: Bank, clips: list[Clip], frame: int, place: torch.device) -> None:
        self._waveform = torch.zeros(min(len(clips), self._CLIPS), self._FRAMES * frame)
        for row, clip in zip(self._waveform, clips, strict=False):
            sound = torch.from_numpy(bank.cut(clip))[: len(row)]
            row[: len(sound)] = sound
        self._waveform = self._waveform.to(place)
        self._silence = torch.zeros(1, 125 * frame, device=place)

    @torch.no_grad()
    def __call__(self, codec: Codec, distance: SpectralDistance) -> dict[str, float]:
        """``mel_*``: mean distance of natural log-mel spectra; ``left_*``: share of the latents' energy that books leave."""
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
        return numbers | self._of_silence(codec)

    def _mel(self, decoded: Tensor, true: Tensor, counted: Tensor, distance: SpectralDistance) -> float:
        return float((distance.log_mel(decoded) - true)[counted].abs().mean())

    def _of_silence(self, codec: Codec) -> dict[str, float]:
        latents = codec.encode(self._silence)
        codes, total = codec.quantise(latents)
        return {
            "silence_norm": float(latents.norm(dim=-1).max()),
            "silence_kinds": float(len(codes[0].unique(dim=0))),
            "silence_zero_codes": float((codes == 0).all(-1).float().mean()),
            "silence_db": _decibel(codec.decode(total, torch.bfloat16)),
        }


def _decibel(waveform: Tensor) -> float:
    return float(10 * torch.log10(waveform.square().mean() + 1e-20))


# ------------------------------------------------------------------------------------------------ training
class Rival:
    """The discriminators and their training, on random pieces of JUDGED frames."""

    def __init__(self, run: Run, frame: int, head_start: int) -> None:
        self.run, self._frame, self._head_start = run, frame, head_start

    def __call__(self, decoded: Tensor, true: Tensor) -> dict[str, Tensor]:
        """One step of the discriminators; then the losses of the decoder, once the discriminators know anything."""
        self.run.going()
        start = int(torch.randint(decoded.shape[1] - JUDGED * self._frame + 1, ()))
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
        if (options.resume / "discriminators").is_dir():
            discriminators.load_state_dict(load_file(str(options.resume / "discriminators" / "weights.safetensors")))
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
    evaluation = Evaluation(bank, dev, codec.frame_samples, place)
    books_from = 0.0 if options.resume else 0.12
    bfloat16_from = 0.0 if frozen and place.type == "cuda" else options.bfloat16_from
    begun, evaluated = frozen, 0.0
    first = CONTEXT * codec.frame_samples
    while run.going():
        if not begun and run.fraction() >= books_from:
            latents.start_books(crops, INITIAL_LATENTS)
            begun = True
        waveform = crops.batch(options.batch)
        given, losses = latents(waveform)
        rounded = run.fraction() >= bfloat16_from
        decoded = codec.decode(given, torch.bfloat16 if rounded else torch.float32)[:, first:]
        true = waveform[:, first:]
        zero = silent_frames(waveform, codec.frame_samples)[0].repeat_interleave(codec.frame_samples, dim=1)[:, first:]
        losses["mel"], losses["magnitude"] = distance(decoded, true)
        losses["pause"] = loudness_of_silence(decoded, zero)
        if run.fraction() >= adversarial_from:
            losses |= rival(decoded, true)
        run.update(sum(WEIGHTS[name] * loss for name, loss in losses.items()))
        run.log(**losses)
        if run.elapsed() - evaluated > _EVALUATION_SECONDS:
            evaluated = run.elapsed()
            run.event(**evaluation(run.average, distance))
    if not frozen:
        settle(run.average, crops, FINAL_LATENTS)
    run.finish()
    if rival_run.steps:
        rival_run.finish()
    run.event(**evaluation(run.average, distance))


#: What each loss counts.
WEIGHTS = {
    "mel": 15.0,
    "magnitude": 1.0,
    "pause": 0.5,
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
    parser.add_argument("--start", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--seconds", type=float, required=True, help="time to train")
    parser.add_argument("--resume", type=Path, help="folder of a run to begin from")
    parser.add_argument("--freeze-codes", action="store_true", help="train the decoder only")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=4e-4, help="peak learning rate")
    parser.add_argument("--discriminator-rate", type=float, default=5e-4)
    parser.add_argument("--warm-up", type=int, default=200, help="steps in which the rate rises")
    parser.add_argument("--bfloat16-from", type=float, default=0.4, help="share of the time with a float32 decoder")
    parser.add_argument("--adversarial-from", type=float, default=0.5, help="share of the time without discriminators")
    parser.add_argument("--head-start", type=int, default=100, help="steps the discriminators learn alone")
    parser.add_argument("--clips", type=int, help="use the first clips only, and evaluate on them")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
