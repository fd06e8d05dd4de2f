"""The codec network: waveform, spectrum, codes; full and streamed decoding; the peer's numbers."""

from __future__ import annotations

from dataclasses import asdict

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from vcpipe.actors.codec import convnext, frames, quantizer
from vcpipe.actors.codec.cache import StreamCache
from vcpipe.actors.codec.config import CodecConfig
from vcpipe.actors.codec.model import Codec
from vcpipe.actors.codec.quantizer import ResidualQuantizer
from vcpipe.actors.codec.stft import InverseStft, polar_spectrum, spectral_features
from vcpipe.schemas.errors import ConfigError

SMALL = CodecConfig(base_channels=8, latent_dim=16, num_quantizers=4, codebook_size=32)
FRAME = 1764
#: Samples by which a stream lags behind the full decode.
DELAY = 8
#: Samples at the very start that the full decode divides by a window sum without a past.
EDGE = 6


def random_codec(
    config: CodecConfig = SMALL, seed: int = 5, dtype: mx.Dtype = mx.float32, prepare: bool = True
) -> Codec:
    """Weights that keep activations near unit size, codebooks that matter, hence an audible output."""
    rng = np.random.default_rng(seed)
    codec = Codec(config)

    def fill(array: mx.array) -> mx.array:
        fan_in = array.size / array.shape[0] if array.ndim == 3 else 1.0
        return mx.array(rng.normal(0, fan_in**-0.5, array.shape).astype(np.float32)).astype(dtype)

    codec.update(tree_map(fill, codec.parameters()))
    if prepare:
        codec.prepare()
    return codec


def random_codes(frames: int, config: CodecConfig = SMALL, seed: int = 6) -> mx.array:
    return mx.array(np.random.default_rng(seed).integers(0, config.codebook_size, (1, config.num_quantizers, frames)))


def stream(codec: Codec, codes: mx.array, chunks: list[int], flush: bool = False) -> np.ndarray:
    """Decode ``codes`` in calls of the given numbers of frames; ``flush`` marks the last call."""
    entries: dict[str, mx.array] = {}
    samples, start = [], 0
    for count in chunks:
        last = start + count == codes.shape[-1]
        piece, entries = codec.decode_step(codes[..., start : start + count], entries, flush=flush and last)
        mx.eval(piece, entries)
        samples.append(np.array(piece[0, 0]))
        start += count
    return np.concatenate(samples)


# ------------------------------------------------------------------------------------------------ streaming
@pytest.mark.parametrize("frames", [6, 40])
def test_decode_step_concatenation_equals_full_decode(frames: int) -> None:
    codec, codes = random_codec(), random_codes(frames)
    full = np.array(codec.decode(codes)[0, 0])
    streamed = stream(codec, codes, [1] * frames)
    assert full.shape == streamed.shape == (frames * FRAME,)
    assert np.std(full) > 0.05, "a silent codec would prove nothing"
    assert np.abs(streamed[DELAY + EDGE :] - full[EDGE:-DELAY]).max() < 1e-5
    assert (streamed[DELAY : DELAY + EDGE] != full[:EDGE]).all(), "a stream sees frames of zeros before its first"


def test_flush_returns_the_last_samples_and_ends_the_stream() -> None:
    codec, codes = random_codec(), random_codes(6)
    full = np.array(codec.decode(codes)[0, 0])
    streamed = stream(codec, codes, [1] * 6, flush=True)
    assert streamed.shape == (6 * FRAME + DELAY,)
    assert np.abs(streamed[DELAY + EDGE : 1 - EDGE] - full[EDGE : 1 - EDGE]).max() < 1e-5
    one, entries = codec.decode_step(codes[..., :1], {}, flush=True)
    assert one.shape == (1, 1, FRAME + DELAY)
    assert entries == {}


@pytest.mark.parametrize("chunks", [[6], [1, 2, 3], [5, 1]])
def test_frames_per_call_do_not_matter(chunks: list[int]) -> None:
    codec, codes = random_codec(), random_codes(6)
    assert np.abs(stream(codec, codes, chunks) - stream(codec, codes, [1] * 6)).max() < 1e-5


def test_seams_jump_no_more_than_the_signal_does_elsewhere() -> None:
    streamed = stream(random_codec(), random_codes(40), [1] * 40)
    jumps = np.abs(np.diff(streamed))
    at_seams = np.arange(1, 40) * FRAME - 1
    elsewhere = np.delete(jumps, at_seams)
    assert np.median(jumps[at_seams]) < np.percentile(elsewhere, 99)
    assert jumps[at_seams].max() <= elsewhere.max()


def test_step_is_pure_and_streams_do_not_mix() -> None:
    codec = random_codec()
    first, second = random_codes(3, seed=1), random_codes(3, seed=2)
    alone = [stream(codec, codes, [1] * 3) for codes in (first, second)]
    entries: list[dict[str, mx.array]] = [{}, {}]
    mixed: list[list[np.ndarray]] = [[], []]
    for frame in range(3):
        for which, codes in enumerate((first, second)):
            before = {key: np.array(value) for key, value in entries[which].items()}
            samples, after = codec.decode_step(codes[..., frame : frame + 1], entries[which])
            mixed[which].append(np.array(samples[0, 0]))
            assert all(np.array_equal(before[key], np.array(entries[which][key])) for key in before)
            entries[which] = after
    for which in (0, 1):
        assert np.array_equal(np.concatenate(mixed[which]), alone[which])


def test_state_of_a_stream_has_a_constant_size() -> None:
    codec, codes = random_codec(), random_codes(5)
    entries: dict[str, mx.array] = {}
    sizes = []
    for frame in range(5):
        _, entries = codec.decode_step(codes[..., frame : frame + 1], entries)
        sizes.append(StreamCache(entries).nbytes)
    # Six frames for each of three blocks of 32, 16 and 8 channels; four frames of 16 samples; float32.
    assert sizes == [4 * (6 * 3 * (32 + 16 + 8) + 4 * 16)] * 5
    assert {key: entry.shape for key, entry in codec.empty_entries().items()} == {
        key: entry.shape for key, entry in entries.items()
    }


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_the_forms_for_a_gpu_give_the_same_samples(dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = random_codes(4)
    expected = stream(random_codec(dtype=dtype), codes, [1, 1, 2])
    for module in (convnext, frames, quantizer):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    samples = stream(random_codec(dtype=dtype), codes, [1, 1, 2])
    assert np.abs(samples - expected).max() < (1e-5 if dtype == mx.float32 else 3e-2)


def test_looked_up_values_are_the_functions_own() -> None:
    values = mx.array(np.random.default_rng(9).normal(0, 4, (3, 1000)).astype(np.float32)).astype(mx.bfloat16)
    for function in (nn.gelu, mx.cos, mx.exp):
        assert mx.array_equal(frames.Tabulated(function)(values), function(values))


@pytest.mark.parametrize("used", [1, 3, 4])
def test_codebooks_are_summed_one_after_the_other(used: int) -> None:
    """bfloat16 is rounded after every addition, in this order."""
    books = random_codec(dtype=mx.bfloat16).prvq
    codes = random_codes(5)[:, :used]
    latents = mx.zeros((1, 5, 16), mx.bfloat16)
    for index in range(used):
        latents = latents + books.mus_list[index][codes[:, index]]
    assert mx.array_equal(books.decode(codes), latents)


# ------------------------------------------------------------------------------------------------ full decode
@pytest.mark.parametrize("segment_frames", [1, 2, 5, 6])
def test_segments_equal_one_decode(segment_frames: int) -> None:
    codec, codes = random_codec(), random_codes(7)
    whole = np.array(codec.decode(codes, segment_frames=7))
    segmented = np.array(codec.decode(codes, segment_frames=segment_frames))
    assert segmented.shape == (1, 1, 7 * FRAME)
    assert np.abs(segmented - whole).max() < 1e-5


def test_decode_needs_codes_of_rank_3_and_known_codebooks() -> None:
    codec = random_codec()
    with pytest.raises(ValueError, match=r"\(batch, codebooks, frames\), not \(4, 3\)"):
        codec.prvq.decode(mx.zeros((4, 3), dtype=mx.int32))
    with pytest.raises(ValueError, match="5 codebooks, the codec has 4"):
        codec.decode(mx.zeros((1, 5, 3), dtype=mx.int32))
    with pytest.raises(ValueError, match="no codes"):
        codec.decode(mx.zeros((1, 4, 0), dtype=mx.int32))


def test_bfloat16_weights_keep_bfloat16_state_and_give_float32_samples() -> None:
    samples, entries = random_codec(dtype=mx.bfloat16).decode_step(random_codes(1), {})
    assert samples.dtype == mx.float32
    assert entries.pop("frames").dtype == mx.float32
    assert {entry.dtype for entry in entries.values()} == {mx.bfloat16}


# ------------------------------------------------------------------------------------------------ encode
@pytest.mark.parametrize(("samples", "frames"), [(FRAME, 1), (3 * FRAME, 3), (3 * FRAME - 1, 2), (2 * FRAME + 700, 2)])
def test_encode_makes_whole_frames(samples: int, frames: int) -> None:
    codes = random_codec().encode(mx.zeros((1, 1, samples)))
    assert codes.shape == (1, 4, frames)


@pytest.mark.parametrize("shape", [(1, 0), (1, 1, 0), (1, 2, FRAME), (FRAME,)])
def test_encode_refuses_what_is_no_mono_waveform(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"one channel, not 2|\(batch, samples > 0\)"):
        random_codec().encode(mx.zeros(shape))


def test_quantizer_takes_the_nearest_vector_of_the_residual() -> None:
    quantizer = ResidualQuantizer(SMALL)
    rng = np.random.default_rng(3)
    books = [rng.normal(0, 0.5**q, (32, 16)).astype(np.float32) for q in range(4)]
    quantizer.mus_list = [mx.array(book) for book in books]
    quantizer.prepare()
    latents = rng.normal(size=(1, 5, 16)).astype(np.float32)
    codes = np.array(quantizer.encode(mx.array(latents)))
    residual = latents[0].astype(np.float64)
    for q, book in enumerate(books):
        nearest = ((residual[:, None] - book) ** 2).sum(-1).argmin(-1)
        assert np.array_equal(codes[0, q], nearest)
        residual = residual - book[nearest]
    decoded = np.array(quantizer.decode(mx.array(codes)))[0]
    assert np.allclose(decoded, latents[0] - residual, atol=1e-5)


# ------------------------------------------------------------------------------------------------ spectra
def test_features_are_windowed_spectra_of_the_padded_waveform() -> None:
    waveform = np.random.default_rng(1).normal(size=(2, 50)).astype(np.float32)
    features = np.array(spectral_features(mx.array(waveform), 16, 4))
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(16) / 16)
    padded = np.pad(waveform, ((0, 0), (6, 6)))
    spectra = [np.fft.rfft(padded[:, start : start + 16] * window) for start in range(0, 62 - 16 + 1, 4)]
    expected = np.stack([np.concatenate([s.real, s.imag], axis=-1) for s in spectra], axis=1)
    assert features.shape == expected.shape == (2, 12, 18)
    assert np.allclose(features, expected, atol=1e-5)


def test_short_waveforms_give_one_frame() -> None:
    assert spectral_features(mx.ones((1, 1)), 16, 4).shape == (1, 1, 18)


def test_inverse_restores_a_waveform() -> None:
    waveform = np.random.default_rng(2).uniform(-1, 1, (1, 64)).astype(np.float32)
    restored = np.array(InverseStft(16, 4)(spectral_features(mx.array(waveform), 16, 4)))
    assert restored.shape == (1, 64 + 12)
    assert np.allclose(restored[:, 6:-6], waveform, atol=1e-5)


def test_inverse_bounds_the_waveform() -> None:
    loud = mx.array(np.random.default_rng(2).choice([-9.0, 9.0], (1, 64)).astype(np.float32))
    restored = np.array(InverseStft(16, 4)(spectral_features(loud, 16, 4)))[:, 6:-6]
    assert np.allclose(restored, np.sign(np.array(loud)), atol=1e-5)


def test_polar_spectrum_saturates() -> None:
    features = np.zeros((1, 2, 18), dtype=np.float32)
    features[0, 0, :9] = np.linspace(-9, 9, 9)
    features[0, 1, :9] = 1e4
    features[..., 9:] = 1.0
    real, imag = np.split(np.array(polar_spectrum(mx.array(features))), 2, axis=-1)
    magnitude = 100 / (1 + 100 * np.exp(-np.linspace(-9, 9, 9)))
    assert np.allclose(real[0, 0], magnitude * np.cos(1.0), rtol=1e-4)
    assert np.allclose(imag[0, 0], magnitude * np.sin(1.0), rtol=1e-4)
    assert np.allclose(real[0, 1], 100 * np.cos(1.0), rtol=1e-4)


def test_inverse_equals_its_definition() -> None:
    """Inverse FFT, clamp to the window, window, overlap-add; imaginary parts of the outer bins count for nothing."""
    spectrum = np.random.default_rng(3).normal(0, 2, (1, 20, 18)).astype(np.float32)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(16) / 16)
    total, weight = np.zeros(19 * 4 + 16), np.zeros(19 * 4 + 16)
    for frame in range(20):
        signal = np.fft.irfft(spectrum[0, frame, :9] + 1j * spectrum[0, frame, 9:], 16)
        total[4 * frame : 4 * frame + 16] += np.clip(signal, -window, window) * window
        weight[4 * frame : 4 * frame + 16] += window**2
    inverse = InverseStft(16, 4)
    expected = total / np.maximum(weight, 1e-10)
    assert np.allclose(np.array(inverse(mx.array(spectrum)))[0], expected, atol=1e-5)
    inner = np.array(inverse.inner(inverse.frames(mx.array(spectrum))))[0]
    assert np.allclose(inner, expected[12:-12], atol=1e-5)


# ------------------------------------------------------------------------------------------------ cache
def test_cache_puts_the_past_before_the_states() -> None:
    cache = StreamCache()
    first = cache.update(mx.ones((1, 2, 3), dtype=mx.bfloat16), "a", 4)
    assert first.dtype == mx.bfloat16
    assert first[0, :, 0].tolist() == [0, 0, 0, 0, 1, 1]
    second = cache.update(mx.full((1, 3, 3), 2, dtype=mx.bfloat16), "a", 4)
    assert second[0, :, 0].tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert cache.entries["a"].shape == (1, 4, 3)
    assert cache.nbytes == 4 * 3 * 2
    cache.clear()
    assert cache.update(mx.ones((1, 1, 3)), "a", 1)[0, :, 0].tolist() == [0, 1]


def test_cache_flush_uses_and_drops_the_entry() -> None:
    cache = StreamCache()
    cache.update(mx.ones((1, 1, 2)), "a", 1)
    assert cache.update(mx.zeros((1, 1, 2)), "a", 1, flush=True)[0, :, 0].tolist() == [1, 0]
    assert cache.entries == {}


def test_cache_refuses_what_does_not_fit() -> None:
    cache = StreamCache()
    states = mx.ones((1, 2, 3))
    assert cache.update(states, "a", 0) is states
    assert cache.entries == {}
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        cache.update(states, "a", -1)
    cache.update(states, "a", 2)
    with pytest.raises(ValueError, match=r"'a' has shape \(1, 2, 3\), these states need \(2, 2, 3\)"):
        cache.update(mx.ones((2, 2, 3)), "a", 2)


# ------------------------------------------------------------------------------------------------ config
def test_config_reads_lists_and_ignores_the_unknown() -> None:
    config = CodecConfig.from_dict({"downsample_rates": [5, 3], "channel_multipliers": [1, 2], "frobnicate": 1})
    assert config.frame_samples == 60
    assert config.channels == (384, 768)
    assert CodecConfig().frame_samples == FRAME
    with pytest.raises(ConfigError, match="n_fft 18 must be a multiple of hop_length 4"):
        CodecConfig(n_fft=18)


# ------------------------------------------------------------------------------------------------ peer
@pytest.mark.parity
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        CodecConfig(base_channels=4, channel_multipliers=(1, 3), downsample_rates=(3, 5), blocks_per_stage=2,
                    block_kernel_size=5, latent_dim=8, n_fft=8, hop_length=2, num_quantizers=3, codebook_size=16),
        CodecConfig(base_channels=6, channel_multipliers=(2,), downsample_rates=(4,), blocks_per_stage=1,
                    block_kernel_size=3, latent_dim=8, n_fft=12, hop_length=4, num_quantizers=2, codebook_size=8),
    ],
    ids=["small", "two stages", "one stage"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_peer_gives_the_same_numbers(config: CodecConfig, dtype: mx.Dtype) -> None:
    peer_module = pytest.importorskip("mlx_audio.codec.models.nemotron_voicechat.codec")
    peer_config = pytest.importorskip("mlx_audio.codec.models.nemotron_voicechat.config")
    ours = random_codec(config, dtype=dtype, prepare=False)
    peer = peer_module.NemotronVoiceChatCodec(peer_config.NemotronVoiceChatCodecConfig(**asdict(config)))
    peer.load_weights(tree_flatten(ours.parameters()), strict=True)
    ours.prepare()
    tolerance = 1e-5 if dtype == mx.float32 else 3e-2

    rng = np.random.default_rng(4)
    waveform = mx.array(rng.uniform(-1, 1, (2, 1, 4 * config.frame_samples + 3)).astype(np.float32))
    assert np.array_equal(np.array(ours.encode(waveform)), np.array(peer.encode(waveform)))

    codes = random_codes(4, config)
    assert np.abs(np.array(ours.decode(codes)) - np.array(peer.decode(codes))).max() < tolerance

    entries: dict[str, mx.array] = {}
    cache = peer_module.CausalConv1dCache()
    for first, last, flush in ((0, 1, False), (1, 3, False), (3, 4, True)):
        samples, entries = ours.decode_step(codes[..., first:last], entries, flush=flush)
        expected = peer.decode_step(codes[..., first:last], cache, flush=flush)
        assert samples.shape == expected.shape
        assert np.abs(np.array(samples) - np.array(expected)).max() < tolerance
