"""FastConformer and RNN-T with random weights, against small formulas of their own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from vcpipe.actors.perception import cache
from vcpipe.actors.perception.cache import EncoderStream, Positions, encode_whole
from vcpipe.actors.perception.config import EncoderConfig, PerceptionConfig, RnntConfig
from vcpipe.actors.perception.dense import make_dense
from vcpipe.actors.perception.fastconformer import (
    FastConformer,
    RelativeAttention,
    shift_to_distances,
    sinusoids,
    subsampled_length,
    window_mask,
)
from vcpipe.actors.perception.rnnt import GreedyDecoder, JointNetwork, PredictionNetwork, Recogniser, Transducer
from vcpipe.actors.perception.transcript import PieceTable, TranscriptText
from vcpipe.schemas.errors import ConfigError, SessionClosedError

TINY = EncoderConfig(
    feat_in=16, n_layers=2, d_model=24, n_heads=3, subsampling_conv_channels=6, conv_kernel_size=5, left_context=3
)


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Normal weights of unit gain, norms about 1."""
    rng = np.random.default_rng(seed)

    def draw(name: str, array: mx.array) -> mx.array:
        values = rng.normal(0, 1, array.shape)
        if array.ndim == 1 and name.endswith("weight"):
            return mx.array(1 + 0.1 * values, dtype=mx.float32)
        return mx.array(values / max(array.size / array.shape[0], 1) ** 0.5, dtype=mx.float32)

    module.update(tree_unflatten([(name, draw(name, array)) for name, array in tree_flatten(module.parameters())]))


@pytest.fixture(scope="module")
def encoder() -> FastConformer:
    network = FastConformer(TINY)
    randomise(network)
    network.prepare()
    return network


def open_stream(encoder: FastConformer) -> EncoderStream:
    return EncoderStream(encoder, Positions(encoder.config))


def mel_frames(count: int) -> mx.array:
    return mx.array(np.random.default_rng(count).normal(0, 1, (1, count, TINY.feat_in)).astype(np.float32))


def difference(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape
    return float(mx.abs(a - b).max())


# ------------------------------------------------------------------------------------------------ encoder
@pytest.mark.parametrize(
    ("mel_length", "frames"), [(1, 1), (2, 2), (8, 2), (9, 2), (16, 3), (17, 3), (25, 4), (26, 5), (246, 32)]
)
def test_subsampled_length_is_what_the_convolutions_give(encoder: FastConformer, mel_length: int, frames: int) -> None:
    assert subsampled_length(mel_length) == frames
    assert encoder.pre_encode(mel_frames(mel_length)).shape == (1, frames, TINY.d_model)


def test_encoder_frame_j_depends_on_mel_frames_8j_minus_14_to_8j(encoder: FastConformer) -> None:
    mel = mel_frames(41)
    frames = np.array(encoder.pre_encode(mel))
    for touched in range(41):
        changed = np.array(encoder.pre_encode(mel.at[:, touched].add(1.0)))
        moved = np.flatnonzero(np.abs(changed - frames).max(axis=(0, 2)) > 0)
        assert moved.tolist() == [j for j in range(6) if 8 * j - 14 <= touched <= 8 * j]


def test_shift_to_distances_equals_indexing() -> None:
    for chunk, keys in [(1, 7), (3, 3), (4, 10)]:
        scores = np.random.default_rng(keys).normal(size=(2, 3, chunk, keys + chunk - 1)).astype(np.float32)
        i, j = np.arange(chunk)[:, None], np.arange(keys)
        expected = scores[:, :, i, chunk - 1 - i + j]
        np.testing.assert_array_equal(np.array(shift_to_distances(mx.array(scores), keys)), expected)


def test_attention_equals_formula() -> None:
    """Every score by its own definition: content with bias u, distance with bias v, softmax over the visible window."""
    attention = RelativeAttention(TINY)
    randomise(attention, 1)
    frames, left, heads, dim = 7, TINY.left_context, TINY.n_heads, TINY.head_dim
    x = np.random.default_rng(2).normal(size=(frames, TINY.d_model)).astype(np.float32)
    weights = {name: np.array(array, dtype=np.float64) for name, array in tree_flatten(attention.parameters())}
    q, k, v = ((x @ weights[f"linear_{name}.weight"].T).reshape(frames, heads, dim) for name in ("q", "k", "v"))
    mixed = np.zeros((frames, heads, dim))
    for i in range(frames):
        for h in range(heads):
            visible = range(max(0, i - left), i + 1)
            scores = []
            for j in visible:
                rates = np.exp(np.arange(0, TINY.d_model, 2) * -np.log(10000) / TINY.d_model)
                wave = np.stack([np.sin((i - j) * rates), np.cos((i - j) * rates)], axis=-1).reshape(-1)
                position = (weights["linear_pos.weight"] @ wave).reshape(heads, dim)[h]
                content = (q[i, h] + weights["pos_bias_u"][h]) @ k[j, h]
                scores.append((content + (q[i, h] + weights["pos_bias_v"][h]) @ position) / np.sqrt(dim))
            share = np.exp(scores - np.max(scores))
            mixed[i, h] = (share / share.sum()) @ v[visible, h]
    expected = mixed.reshape(frames, -1) @ weights["linear_out.weight"].T

    attention.prepare()
    window = mx.zeros((1, 2 * heads, left, dim))
    positions = attention.project_positions(sinusoids(left + frames - 1, 1 - frames, TINY.d_model))
    mask = window_mask(frames, left, 0)
    output, window = attention(mx.array(x)[None], window, positions, mask)
    np.testing.assert_allclose(np.array(output[0]), expected, atol=1e-5)
    kept = np.concatenate([k[-left:], v[-left:]], axis=1).transpose(1, 0, 2)
    np.testing.assert_allclose(np.array(window[0]), kept, atol=1e-5)


def test_window_mask_hides_the_future_the_far_past_and_what_never_was() -> None:
    visible = np.array(window_mask(2, 3, 1)) == 0
    np.testing.assert_array_equal(visible, [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]])
    assert np.array(window_mask(1, 3, 3)).max() == np.array(window_mask(1, 3, 3)).min() == 0


def test_streamed_encoder_matches_offline_chunked_limited(encoder: FastConformer) -> None:
    """64 mel frames: 8 at a time from mel frame 8j, as live (1, then 8), and in any portions."""
    mel = mel_frames(64)
    whole = encode_whole(encoder, mel)
    assert whole.shape == (1, 9, TINY.d_model)
    stream = open_stream(encoder)
    live = [stream.push(mel[:, :1], emit_partial=True)]
    live += [stream.push(mel[:, start : start + 8], emit_partial=True) for start in range(1, 57, 8)]
    assert [frames.shape[1] for frames in live] == [1] * 8
    assert difference(mx.concatenate(live, axis=1), whole[:, :8]) < 1e-5
    for portions in ([8] * 8, [64], [1] * 64, [5, 30, 0, 13, 16]):
        stream, outputs, start = open_stream(encoder), [], 0
        for portion in portions:
            outputs.append(stream.push(mel[:, start : start + portion]))
            start += portion
        outputs.append(stream.push(mel[:, :0], final=True))
        assert difference(mx.concatenate(outputs, axis=1), whole[:, : sum(o.shape[1] for o in outputs)]) < 1e-5


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 50, 61, 64, 65])
def test_final_push_emits_every_frame_begun(encoder: FastConformer, length: int) -> None:
    """Also where the tail holds two frames: neither sees the other's future."""
    mel = mel_frames(length)
    stream = open_stream(encoder)
    half = length // 2
    streamed = mx.concatenate([stream.push(mel[:, :half]), stream.push(mel[:, half:], final=True)], axis=1)
    assert difference(streamed, encode_whole(encoder, mel)) < 1e-5
    with pytest.raises(SessionClosedError):
        stream.push(mel)


def test_push_of_eight_mel_frames_emits_one_encoder_frame(encoder: FastConformer) -> None:
    stream = open_stream(encoder)
    assert stream.push(mel_frames(8)).shape == (1, 1, TINY.d_model)
    assert stream.push(mel_frames(7)).shape == (1, 0, TINY.d_model)
    assert stream.push(mel_frames(1)).shape == (1, 1, TINY.d_model)
    assert stream.push(mel_frames(24)).shape == (1, 3, TINY.d_model)


def test_long_waveforms_are_encoded_in_chunks_alike(encoder: FastConformer, monkeypatch: pytest.MonkeyPatch) -> None:
    mel = mel_frames(8 * 40 + 3)
    at_once = encode_whole(encoder, mel)
    monkeypatch.setattr(cache, "WHOLE_CHUNK_FRAMES", 7)
    assert difference(encode_whole(encoder, mel), at_once) < 1e-5


def test_streams_of_one_encoder_do_not_meet(encoder: FastConformer) -> None:
    def run(seeds: list[int], other: EncoderStream | None) -> mx.array:
        stream, outputs = open_stream(encoder), []
        for seed in seeds:
            outputs.append(stream.push(mel_frames(8 * seed)))
            if other is not None:
                other.push(mel_frames(8))
        return mx.concatenate(outputs, axis=1)

    assert difference(run([1, 2, 3], None), run([1, 2, 3], open_stream(encoder))) == 0


# ------------------------------------------------------------------------------------------------ RNN-T
PIECES = ("<unk>", "<en-US>", "\u2581the", "\u2581cat", "s", "\u2581", "?")
RNNT = RnntConfig(
    encoder_hidden=8,
    pred_hidden=6,
    pred_rnn_layers=2,
    joint_hidden=10,
    embeddings=8,
    classes=8,
    blank_id=7,
    max_symbols=3,
    pieces=PIECES,
)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_prediction_equals_formula() -> None:
    """Two LSTM layers over pieces, after no piece at all: gates in the order input, forget, cell, output."""
    network = PredictionNetwork(RNNT)
    randomise(network, 3)
    weights = {name: np.array(array, dtype=np.float64) for name, array in tree_flatten(network.parameters())}
    network.prepare()
    h, c, states = np.zeros((2, 6)), np.zeros((2, 6)), network.empty_states()
    for token in (network.none, 3, 3, 0, 6):
        x = np.zeros(6) if token == network.none else weights["prediction.embed.weight"][token]
        for layer in range(2):
            wx, wh, bias = (weights[f"prediction.dec_rnn.lstm.{layer}.{name}"] for name in ("Wx", "Wh", "bias"))
            i, f, g, o = np.split(wx @ x + wh @ h[layer] + bias, 4)
            c[layer] = sigmoid(f) * c[layer] + sigmoid(i) * np.tanh(g)
            x = h[layer] = sigmoid(o) * np.tanh(c[layer])
        states = network(mx.array([token]), states)
        np.testing.assert_allclose(np.concatenate([np.array(hidden) for hidden, _ in states]), h, atol=1e-6)
        np.testing.assert_allclose(np.concatenate([np.array(cell) for _, cell in states]), c, atol=1e-6)


def random_transducer(seed: int) -> Transducer:
    predictor, joint = PredictionNetwork(RNNT), JointNetwork(RNNT)
    randomise(predictor, seed)
    randomise(joint, seed + 1)
    # Blank, pieces in between and the symbol cap must all occur.
    joint.joint_net[2].bias = joint.joint_net[2].bias + mx.array([0.0] * 7 + [0.8])
    predictor.prepare()
    make_dense(joint)
    return Transducer(predictor, joint, RNNT)


def random_frames(count: int) -> list[mx.array]:
    return [mx.array(frame) for frame in np.random.default_rng(6).normal(0, 2, (count, 1, 8)).astype(np.float32)]


def test_greedy_decoder_equals_search_without_a_kept_prediction() -> None:
    transducer = random_transducer(5)
    decoder = GreedyDecoder(transducer)
    counts, emitted = [], []
    for frame in random_frames(25):
        expected = []
        while len(expected) < RNNT.max_symbols:
            states, from_prediction = transducer.start
            for token in emitted:
                states, from_prediction, _ = transducer.advance(mx.array([token], mx.uint32), states, mx.zeros((1, 10)))
            token = int(transducer.score(frame, from_prediction)[1])
            if token == RNNT.blank_id:
                break
            emitted = [*emitted, token]
            expected.append(token)
        assert decoder.step(transducer.score(frame, decoder.from_prediction)) == expected
        counts.append(len(expected))
    assert {0, RNNT.max_symbols} <= set(counts)


def test_a_frame_without_a_piece_needs_nothing_but_its_score() -> None:
    transducer = random_transducer(5)
    calls, advance = [], transducer.advance

    def counting(*arguments: Any) -> Any:
        calls.append(arguments)
        return advance(*arguments)

    transducer.advance = counting
    decoder = GreedyDecoder(transducer)
    pieces = sum(len(decoder.step(transducer.score(frame, decoder.from_prediction))) for frame in random_frames(40))
    assert len(calls) == pieces > 0


def test_pieces_can_be_counted_out_one_by_one() -> None:
    """What a bounded step of a transcription session needs: the budget may end within a frame."""
    transducer = random_transducer(5)
    whole, portioned = GreedyDecoder(transducer), GreedyDecoder(transducer)
    expected, tokens = [], []
    for frame in random_frames(30):
        expected += whole.step(transducer.score(frame, whole.from_prediction))
        portioned.begin(transducer.score(frame, portioned.from_prediction))
        while not portioned.finished:
            token = portioned.evaluate()
            tokens += [] if token is None else [token]
    assert tokens == expected and tokens


def test_transcript_equals_stripped_join_at_every_frame() -> None:
    table = PieceTable(PIECES)
    rng = np.random.default_rng(8)
    text, shown, kept = TranscriptText(), "", []
    for _ in range(300):
        tokens = rng.integers(0, 9, rng.integers(0, 4)).tolist()  # 7 and 8 are outside the vocabulary
        new = [piece for token in tokens if (piece := table.text(token)) is not None]
        kept += new
        shown += text.append("".join(new))
        assert shown == "".join(kept).strip()
    assert "  " in shown


def test_special_pieces_and_language_tags_are_dropped_and_unknown_ids_spell_nothing() -> None:
    table = PieceTable(["<unk>", "<pad>", "<s>", "</s>", "<en-US>", "<yue-Hant>", "<a-US>", "<b>", "\u2581a\u2581b"])
    assert [table.text(i) for i in range(9)] == [None] * 6 + ["<a-US>", "<b>", " a b"]
    assert table.text(9) == table.text(-1) == ""


def test_recogniser_reports_frames_that_kept_a_piece() -> None:
    transducer, table = random_transducer(5), PieceTable(PIECES)
    spied, recogniser = GreedyDecoder(transducer), Recogniser(transducer, table)
    seen = set()
    for frame in random_frames(80):
        scored = transducer.score(frame, spied.from_prediction)
        kept = [token for token in spied.step(scored) if table.text(token) is not None]
        delta = recogniser.recognise(frame)
        assert (delta is not None) == bool(kept)
        seen.add(type(delta))
    assert seen == {str, type(None)}


# ------------------------------------------------------------------------------------------------ config
def test_networks_of_another_kind_are_refused(tiny_config: dict) -> None:
    assert PerceptionConfig.from_dict(tiny_config).encoder.left_context == 6
    tiny_config["audio_config"]["encoder"]["conv_norm_type"] = "batch_norm"
    with pytest.raises(ConfigError, match="conv_norm_type 'batch_norm' is not supported; accepted: 'layer_norm'"):
        PerceptionConfig.from_dict(tiny_config)


@pytest.fixture
def tiny_config() -> dict:
    from pathlib import Path

    from vcpipe.actors.checkpoint import read_config

    return read_config(Path(__file__).parents[1] / "data" / "tiny" / "bf16")
