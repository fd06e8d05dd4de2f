"""The codec in PyTorch against the actor's in MLX; how its codebooks are learnt; its training data and losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

torch = pytest.importorskip("torch")

from vcpipe.actors.codec.config import CodecConfig  # noqa: E402
from vcpipe.actors.codec.model import Codec as ActorCodec  # noqa: E402
from vcpipe.bench.mini.nets.codec import Codec, ResidualQuantiser, inverse_stft, polar_spectrum  # noqa: E402
from vcpipe.bench.mini.nets.discriminators import (  # noqa: E402
    Discriminators,
    discriminator_loss,
    generator_losses,
    halves,
)
from vcpipe.bench.mini.shape import mini_config  # noqa: E402
from vcpipe.bench.mini.sound import Clip  # noqa: E402
from vcpipe.bench.mini.train.books import BookAverages, fit_books  # noqa: E402
from vcpipe.bench.mini.train.codec import CONTEXT, FRAMES, Crops, Latents, decode, settle, silent_frames  # noqa: E402
from vcpipe.bench.mini.train.spectral import SpectralDistance, loudness_of_silence, mel_filters  # noqa: E402
from vcpipe.bench.tensor_shapes import tensor_shapes  # noqa: E402

SMALL = CodecConfig(base_channels=8, latent_dim=16, blocks_per_stage=2, num_quantizers=5, codebook_size=32)
FRAME = 1764


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    yield
    torch.set_num_threads(threads)


def random_codec(config: CodecConfig = SMALL) -> Codec:
    """Every weight random, norms and biases too."""
    codec = Codec(asdict(config))
    with torch.no_grad():
        for name, weight in codec.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                weight.add_(0.3 * torch.randn_like(weight))
        # Magnitudes around one are clamped now and then.
        codec.decoder.layers[-1].weight.mul_(0.7)
    return codec


def actor_codec(codec: Codec, config: CodecConfig = SMALL, dtype: mx.Dtype = mx.float32) -> ActorCodec:
    """The same weights in the actor's network."""
    actor = ActorCodec(config)
    shapes = {name: array.shape for name, array in tree_flatten(actor.parameters())}
    upsamplings = [f"decoder.layers.{i * (config.blocks_per_stage + 1)}.weight" for i in range(3)]
    weights = []
    for name, value in codec.state_dict().items():
        array = value.numpy()
        if array.ndim == 3:
            array = array.transpose((1, 2, 0) if name in upsamplings else (0, 2, 1))
        name = name.replace("_variance_list", "variance_list")
        assert array.shape == shapes.pop(name), name
        weights.append((name, mx.array(array).astype(dtype)))
    assert not shapes
    actor.update(tree_unflatten(weights))
    actor.prepare()
    return actor


def speech_like(samples: int, batch: int = 1) -> np.ndarray:
    """(batch, samples) float32: a buzz that changes in loudness, after silence."""
    time = np.arange(samples) / 22050
    tone = sum(np.sin(2 * np.pi * 140 * k * time) / k for k in range(1, 30)) * np.sin(3 * time) ** 2
    noise = np.random.default_rng(1).normal(0, 0.01, (batch, samples))
    return ((0.1 * tone + noise) * (time > 0.05)).astype(np.float32)


# ------------------------------------------------------------------------------------------------ equality
def test_names_and_shapes_are_the_checkpoints() -> None:
    config = mini_config(1000, ["<unk>"] * 10)
    config["tts_config"]["character_encoder"]["char_vocab_size"] = 257
    prefix = "tts_model.audio_codec."
    wanted = {name.removeprefix(prefix): s for name, s in tensor_shapes(config).items() if name.startswith(prefix)}
    codec = Codec(config["codec_config"])
    assert {name: tuple(value.shape) for name, value in codec.state_dict().items()} == wanted
    assert codec.books.shape == (31, 128, 64)


@pytest.mark.parametrize("samples", [5 * FRAME, 4 * FRAME + 1000])
def test_encoder_and_codes_equal_the_actors(samples: int) -> None:
    codec = random_codec()
    waveform = speech_like(samples, batch=2)
    with torch.no_grad():
        latents = codec.encode(torch.from_numpy(waveform))
        spread = latents.std((0, 1)) * torch.randn(5, 32, 16) * 0.5 ** torch.arange(5)[:, None, None]
        spread[0] += latents.mean((0, 1))
        codec.prvq.set_books(spread)
    actor = actor_codec(codec)
    expected = np.array(actor.encoder(mx.array(waveform)))
    assert latents.shape == (2, samples // FRAME, 16)
    assert np.abs(latents.numpy() - expected).max() < 1e-4 * np.abs(expected).max()
    codes, total = codec.quantise(latents)
    assert len(codes.unique()) > 10
    assert np.array_equal(codes.numpy().transpose(0, 2, 1), np.array(actor.encode(mx.array(waveform))))
    assert np.allclose(total, np.array(actor.prvq.decode(mx.array(codes.numpy().transpose(0, 2, 1)))), atol=1e-5)


def test_fewer_books_are_the_first_of_all() -> None:
    codec = random_codec()
    latents = torch.randn(1, 4, 16)
    codes, total = codec.quantise(latents)
    some, coarse = codec.quantise(latents, 2)
    assert torch.equal(some, codes[..., :2])
    assert torch.allclose(coarse, codec.books[0][some[..., 0]] + codec.books[1][some[..., 1]], atol=1e-6)
    assert not torch.allclose(coarse, total)


def test_full_decode_equals_the_actors_with_its_clamp_and_edges() -> None:
    codec = random_codec()
    actor = actor_codec(codec)
    codes = torch.randint(SMALL.codebook_size, (1, 6, SMALL.num_quantizers))
    total = sum(codec.books[q][codes[..., q]] for q in range(SMALL.num_quantizers))
    with torch.no_grad():
        waveform = codec.decode(total).numpy()
        spectrum = polar_spectrum(codec.decoder(total))
        softer = inverse_stft(0.01 * spectrum, 16, 4).numpy()
    expected = np.array(actor.decode(mx.array(codes.numpy().transpose(0, 2, 1)))[:, 0])
    assert waveform.shape == (1, 6 * FRAME)
    assert np.abs(100 * softer).max() > np.abs(waveform).max() * 1.1, "nothing was clamped"
    assert np.std(waveform) > 0.05
    assert np.abs(waveform - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_session_that_begins_with_silence_begins_as_in_the_actor() -> None:
    """Frame by frame from a session's first cache entries; its samples are 8 late."""
    codec = random_codec()
    actor = actor_codec(codec)
    with torch.no_grad():
        ours = codec.decode(torch.zeros(1, 5, SMALL.latent_dim)).numpy()[0]
    entries, pieces = actor.empty_entries(), []
    for _ in range(5):
        samples, entries = actor.decode_step(mx.zeros((1, SMALL.num_quantizers, 1), dtype=mx.int32), entries)
        pieces.append(np.array(samples[0, 0]))
    theirs = np.concatenate(pieces)
    # At a recording's first edge fewer windows overlap: there the full decode divides by less.
    edge = 6
    assert np.abs(ours[edge:-8] - theirs[edge + 8 :]).max() < 1e-4 * np.abs(ours).max()
    assert np.abs(theirs[: edge + 8]).max() < 1.1 * np.abs(ours[: 4 * edge]).max()
    frames = ours.reshape(5, FRAME)
    assert np.abs(frames[0] - frames[3]).max() > 0.1 * np.abs(frames[3]).max(), "a beginning like any other silence"
    assert np.abs(frames[2] - frames[3]).max() < 1e-4 * np.abs(frames[3]).max()


def test_bfloat16_decoding_is_near_the_actors() -> None:
    """Roundings fall in other places, so only their size can agree."""
    codec = random_codec()
    with torch.no_grad():
        for weight in codec.parameters():
            weight.copy_(weight.bfloat16())
    actor = actor_codec(codec, dtype=mx.bfloat16)
    codes = torch.randint(SMALL.codebook_size, (1, 6, SMALL.num_quantizers))
    total = sum(codec.books[q][codes[..., q]] for q in range(SMALL.num_quantizers))
    with torch.no_grad():
        exact, rounded = codec.decode(total).numpy(), codec.decode(total, torch.bfloat16).numpy()
    of_actor = np.array(actor.decode(mx.array(codes.numpy().transpose(0, 2, 1)))[:, 0])
    ours, theirs = np.std(rounded - exact), np.std(of_actor - exact)
    assert 0 < ours < 0.1 * np.std(exact)
    assert 0.4 < ours / theirs < 2.5


def test_gradients_reach_every_trained_weight() -> None:
    codec = random_codec()
    latents = codec.encode(torch.from_numpy(speech_like(3 * FRAME)))
    codec.decode(latents).square().mean().backward()
    for name, weight in codec.named_parameters():
        if not name.startswith("prvq."):
            assert weight.grad is not None and bool(weight.grad.abs().max() > 0), name


# ------------------------------------------------------------------------------------------------ books
def clusters(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Coarse centres (8, 16) far from zero, and ``count`` vectors around them: a fine grid of two offsets, and noise."""
    centres = 10 * torch.randn(8, 16)
    fine = torch.tensor([1.0, -1.0])[torch.randint(2, (count, 1))] * torch.ones(16)
    return centres, centres[torch.randint(8, (count,))] + fine + 0.01 * torch.randn(count, 16)


def left_by(quantiser: ResidualQuantiser, latents: torch.Tensor) -> list[float]:
    """Share of the energy that is left before each book and after the last."""
    _, given, total = quantiser.quantise(latents)
    rests = [*given, latents - total]
    return [float(rest.square().sum() / latents.square().sum()) for rest in rests]


def test_books_are_fitted_one_after_the_other_and_keep_a_row_for_silence() -> None:
    _, latents = clusters(2000)
    quantiser = ResidualQuantiser(3, 16, 16)
    fit_books(quantiser, latents, 15)
    shares = left_by(quantiser, latents)
    assert all(b < 0.9 * a for a, b in zip(shares, shares[1:], strict=False)), "a book that explains nothing"
    assert shares[1] < 0.1 and shares[3] < 2e-3
    assert not quantiser.books[:, 0].any()
    assert not quantiser.quantise(torch.zeros(4, 16))[0].any()
    unrounded = quantiser.books
    fit_books(quantiser, latents, 15, rounded=True)
    assert torch.equal(quantiser.books, quantiser.books.bfloat16().float())
    assert not torch.equal(unrounded, unrounded.bfloat16().float())


def test_moving_averages_follow_latents_that_move() -> None:
    centres, latents = clusters(2000)
    quantiser = ResidualQuantiser(2, 16, 16)
    fit_books(quantiser, latents, 10)
    averages = BookAverages(quantiser, keep=0.9)
    moved = latents + 0.8
    before = left_by(quantiser, moved)[-1]
    for _ in range(40):
        batch = moved[torch.randint(len(moved), (256,))]
        codes, given, _ = quantiser.quantise(batch)
        averages.update(codes, given, torch.ones(256))
    assert left_by(quantiser, moved)[-1] < 0.2 * before
    assert not quantiser.books[:, 0].any()


def test_moving_averages_learn_nothing_from_frames_that_do_not_count() -> None:
    _, latents = clusters(512)
    learnt = []
    for disturbance in (0.0, 50.0):
        torch.manual_seed(7)
        quantiser = ResidualQuantiser(2, 16, 16)
        averages = BookAverages(quantiser, keep=0.9)
        counted = (torch.arange(512) % 2).float()
        disturbed = latents + disturbance * (1 - counted)[:, None]
        for _ in range(3):
            codes, given, _ = quantiser.quantise(disturbed)
            averages.update(codes, given, counted)
        learnt.append(quantiser.books)
    assert torch.allclose(*learnt, atol=1e-5)


def test_dead_rows_begin_anew_among_the_latents() -> None:
    _, latents = clusters(2000)
    quantiser = ResidualQuantiser(1, 16, 16)
    books = torch.full((1, 16, 16), 1e3)  # where no latent is, but for two rows
    books[0, 0], books[0, 1] = 0.0, latents[0]
    quantiser.set_books(books)
    averages = BookAverages(quantiser, keep=0.9)
    for _ in range(60):
        codes, given, _ = quantiser.quantise(latents[torch.randint(len(latents), (256,))])
        averages.update(codes, given, torch.ones(256))
    assert float(quantiser.books.abs().max()) < 100
    assert left_by(quantiser, latents)[-1] < 0.25
    assert len(quantiser.quantise(latents)[0].unique()) >= 8


def test_settling_leaves_bfloat16_values_and_silence_at_zero() -> None:
    codec = random_codec(replace(SMALL, codebook_size=8))
    crops = Crops(torch.randint(-3000, 3000, (4 * 40000,), dtype=torch.int16), clips_of(40000, 4), FRAME)
    silence = torch.zeros(1, 8 * FRAME)
    with torch.no_grad():
        before = codec.encode(silence)[0, -1].norm()
        settle(codec, crops, 100)
        after = codec.encode(silence)[0, -1].norm()
    assert float(after) < 0.05 * float(before)
    for weight in [*codec.encoder.parameters(), codec.books]:
        assert torch.equal(weight, weight.bfloat16().float())
    assert not codec.books[:, 0].any()


# ------------------------------------------------------------------------------------------------ training
def clips_of(samples: int, count: int) -> list[Clip]:
    fields = dict.fromkeys(("text", "transcript", "voice", "engine", "split", "intent", "answer_id"), "")
    return [
        Clip(id=str(i), words=(), seconds=samples / 22050, offset=i * samples, samples=samples, **fields)
        for i in range(count)
    ]


def test_crops_hold_one_clip_amid_zeros() -> None:
    """Clip i consists of the value 1000 (i + 1), so that a crop tells whence it is."""
    samples = 50000
    sound = torch.cat([torch.full((samples,), 1000 * (i + 1), dtype=torch.int16) for i in range(3)])
    crops = Crops(sound, clips_of(samples, 3), FRAME).batch(150)
    assert crops.shape == (150, FRAMES * FRAME)
    loud = crops.abs() > 0
    levels = crops.amax(1) * 32768
    assert set((levels[levels > 0] / 1000).log2().round().int().tolist()) <= {0, 1, 2}
    assert 0 < int((levels == 0).sum()) < 25, "a few crops are silent throughout"
    edges = (~loud[:, 0] | ~loud[:, -1]).float().mean()
    assert 0.15 < float(edges) < 0.8
    onsets = loud.int().diff(dim=1).argmax(1)[~loud[:, 0] & loud[:, -1]] + 1
    aligned = (onsets % FRAME == 0).float().mean()
    assert 0.3 < float(aligned) < 0.7, "half of them on the frame grid"


def test_frames_count_as_silent_once_speech_is_two_frames_past() -> None:
    waveform = torch.zeros(1, 8 * FRAME)
    waveform[0, 3 * FRAME + 5] = 0.1
    zero, silent = silent_frames(waveform, FRAME)
    assert zero[0].tolist() == [True, True, True, False, True, True, True, True]
    assert silent[0].tolist() == [True, True, True, False, False, False, True, True]


def test_the_decoder_is_given_sums_of_some_books_and_the_encoder_still_learns() -> None:
    codec = random_codec()
    waveform = torch.from_numpy(speech_like(6 * FRAME, batch=16))
    crops = Crops((waveform.flatten() * 32768).short(), clips_of(6 * FRAME, 16), FRAME)
    latents = Latents(codec, frozen=False)
    latents.start_books(crops, 60)
    latents.noise = 0.0
    given, losses = latents(waveform)
    z = codec.encode(waveform)
    distances = (given - z)[:, 2:].square().sum((1, 2))
    assert int((distances < 1e-9).sum()) in range(1, 12), "some samples are not quantised"
    assert len((distances * 1e4).round().unique()) > 3, "different samples use different numbers of books"
    assert set(losses) == {"commitment", "scale", "silence"}
    given.square().mean().backward()
    assert bool(codec.encoder.layers[0].weight.grad.abs().max() > 0)
    frozen, none = Latents(codec, frozen=True)(waveform)
    assert not none and not frozen.requires_grad


def test_it_is_told_how_loud_a_session_begins_with_silence() -> None:
    codec = random_codec()
    given = torch.randn(2, FRAMES, SMALL.latent_dim)
    decoded, start = decode(codec, given, torch.float32)
    start.backward()
    with torch.no_grad():
        assert torch.allclose(decoded, codec.decode(given), atol=1e-5)
        silence = codec.decode(torch.zeros_like(given[:1]))[:, : CONTEXT * FRAME]
    assert float(start.detach()) == pytest.approx(
        float(loudness_of_silence(silence, torch.ones_like(silence))), rel=1e-4
    )
    assert all(bool(block.dwconv.bias.grad.any()) for block in codec.decoder.layers if hasattr(block, "dwconv"))


def test_spectral_distance_tells_near_from_far_and_forgives_phase() -> None:
    distance = SpectralDistance(22050)
    true = torch.from_numpy(speech_like(20000))
    near, far = true + 1e-3 * torch.randn_like(true), torch.randn_like(true) * 0.1
    same, flipped, close, wide = (float(sum(distance(x, true))) for x in (true, -true, near, far))
    assert same == pytest.approx(0, abs=1e-6) and flipped == pytest.approx(0, abs=1e-4)
    assert 0 < close < 0.6 * wide
    silence = torch.zeros(1, 20000, requires_grad=True)
    sum(distance(silence, true)).backward()
    assert bool(silence.grad.isfinite().all())
    mask = torch.ones(1, 20000)
    assert float(loudness_of_silence(torch.zeros(1, 20000), mask)) == 0
    assert float(loudness_of_silence(torch.full((1, 20000), 1e-4), mask)) == pytest.approx(1.04, abs=0.01)
    filters = mel_filters(22050, 64, 8)
    assert filters.shape == (8, 33) and np.allclose(filters.sum(1), 1)


def test_discriminators_learn_to_tell_noise_from_a_tone_and_the_decoder_gets_gradients() -> None:
    discriminators = Discriminators((3,), (256,))
    real = torch.from_numpy(speech_like(4000, 2))
    fake = (0.1 * torch.randn(2, 4000)).requires_grad_()
    losses = []
    for _ in range(5):
        loss = discriminator_loss(*halves(discriminators(torch.cat([real, fake.detach()]))))
        losses.append(float(loss.detach()))
        weights = list(discriminators.parameters())
        with torch.no_grad():
            for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight -= 1e-3 * slope.sign()
    assert losses[-1] < 0.8 * losses[0]
    adversarial, features = generator_losses(discriminators(real), discriminators(fake))
    (adversarial + features).backward()
    assert float(adversarial.detach()) > 0.1 and float(features.detach()) > 0.1
    assert bool(fake.grad.abs().sum() > 0)
