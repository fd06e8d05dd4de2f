"""FastConformer and RNN-T with random weights, against small formulas of their own."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from vcpipe.actors.perception import cache
from vcpipe.actors.perception.cache import EncoderStream, encode_whole
from vcpipe.actors.perception.config import EncoderConfig, PerceptionConfig, RnntConfig
from vcpipe.actors.perception.fastconformer import (
    FastConformer,
    RelativeAttention,
    shift_to_distances,
    sinusoids,
    subsampled_length,
    window_mask,
)
from vcpipe.actors.perception.rnnt import GreedyDecoder, JointNetwork, LstmLayer, PredictionNetwork, Recogniser
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
    return network


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

    window = mx.zeros((1, heads, left, dim))
    positions = attention.project_positions(sinusoids(left + frames - 1, 1 - frames, TINY.d_model))
    mask = window_mask(frames, left, 0)
    output, keys, _ = attention(mx.array(x)[None], window, window, positions, mask)
    np.testing.assert_allclose(np.array(output[0]), expected, atol=1e-5)
    np.testing.assert_allclose(np.array(keys[0]), k[-left:].transpose(1, 0, 2), atol=1e-5)


def test_window_mask_hides_the_future_the_far_past_and_what_never_was() -> None:
    visible = np.array(window_mask(2, 3, 1)) == 0
    np.testing.assert_array_equal(visible, [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]])
    assert np.array(window_mask(1, 3, 3)).max() == np.array(window_mask(1, 3, 3)).min() == 0


def test_streamed_encoder_matches_offline_chunked_limited(encoder: FastConformer) -> None:
    """64 mel frames: 8 at a time from mel frame 8j, as live (1, then 8), and in any portions."""
    mel = mel_frames(64)
    whole = encode_whole(encoder, mel)
    assert whole.shape == (1, 9, TINY.d_model)
    stream = EncoderStream(encoder)
    live = [stream.push(mel[:, :1], emit_partial=True)]
    live += [stream.push(mel[:, start : start + 8], emit_partial=True) for start in range(1, 57, 8)]
    assert [frames.shape[1] for frames in live] == [1] * 8
    assert difference(mx.concatenate(live, axis=1), whole[:, :8]) < 1e-5
    for portions in ([8] * 8, [64], [1] * 64, [5, 30, 0, 13, 16]):
        stream, outputs, start = EncoderStream(encoder), [], 0
        for portion in portions:
            outputs.append(stream.push(mel[:, start : start + portion]))
            start += portion
        outputs.append(stream.push(mel[:, :0], final=True))
        assert difference(mx.concatenate(outputs, axis=1), whole[:, : sum(o.shape[1] for o in outputs)]) < 1e-5


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 50, 61, 64, 65])
@pytest.mark.parametrize("chunk_frames", [1, 3])
def test_final_push_emits_every_frame_begun(encoder: FastConformer, length: int, chunk_frames: int) -> None:
    """Also where the tail holds two frames: neither sees the other's future."""
    mel = mel_frames(length)
    stream = EncoderStream(encoder, chunk_frames=chunk_frames)
    half = length // 2
    streamed = mx.concatenate([stream.push(mel[:, :half]), stream.push(mel[:, half:], final=True)], axis=1)
    assert difference(streamed, encode_whole(encoder, mel)) < 1e-5
    with pytest.raises(SessionClosedError):
        stream.push(mel)


def test_push_of_eight_mel_frames_emits_one_encoder_frame(encoder: FastConformer) -> None:
    stream = EncoderStream(encoder)
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
        stream, outputs = EncoderStream(encoder), []
        for seed in seeds:
            outputs.append(stream.push(mel_frames(8 * seed)))
            if other is not None:
                other.push(mel_frames(8))
        return mx.concatenate(outputs, axis=1)

    assert difference(run([1, 2, 3], None), run([1, 2, 3], EncoderStream(encoder))) == 0


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


def test_lstm_equals_formula() -> None:
    layer = LstmLayer(5, 4)
    randomise(layer, 3)
    rng = np.random.default_rng(4)
    wx, wh, bias = (np.array(layer[name], dtype=np.float64) for name in ("Wx", "Wh", "bias"))
    h, c, state = np.zeros(4), np.zeros(4), None

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    for _ in range(4):
        x = rng.normal(size=5).astype(np.float32)
        i, f, g, o = np.split(wx @ x + wh @ h + bias, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        state = layer(mx.array(x)[None, None], state)
        np.testing.assert_allclose(np.array(state[0])[0, 0], h, atol=1e-6)
        np.testing.assert_allclose(np.array(state[1])[0, 0], c, atol=1e-6)


def random_rnnt(seed: int) -> tuple[PredictionNetwork, JointNetwork]:
    predictor, joint = PredictionNetwork(RNNT), JointNetwork(RNNT)
    randomise(predictor, seed)
    randomise(joint, seed + 1)
    # Blank, pieces in between and the symbol cap must all occur.
    joint.joint_net[2].bias = joint.joint_net[2].bias + mx.array([0.0] * 7 + [0.8])
    return predictor, joint


def test_greedy_decoder_equals_search_without_a_kept_prediction() -> None:
    predictor, joint = random_rnnt(5)
    frames = mx.array(np.random.default_rng(6).normal(0, 2, (1, 60, 8)).astype(np.float32))
    decoder = GreedyDecoder(predictor, joint, RNNT)
    counts, last, states = [], None, None
    for index in range(60):
        encoded, expected = frames[:, index : index + 1], []
        while len(expected) < RNNT.max_symbols:
            proposed = predictor(last, states)
            token = int(mx.argmax(joint(joint.enc(encoded), joint.pred(proposed[-1][0]))))
            if token == RNNT.blank_id:
                break
            last, states = token, proposed
            expected.append(token)
        assert decoder.step(encoded) == expected
        counts.append(len(expected))
    assert {0, RNNT.max_symbols} <= set(counts)


def test_prediction_network_runs_once_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, joint = random_rnnt(5)
    calls = []
    run = PredictionNetwork.__call__

    def counting(self: PredictionNetwork, *args: object) -> object:
        calls.append(args)
        return run(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PredictionNetwork, "__call__", counting)
    decoder = GreedyDecoder(predictor, joint, RNNT)
    frames = np.random.default_rng(6).normal(0, 2, (40, 1, 1, 8)).astype(np.float32)
    pieces = sum(len(decoder.step(mx.array(frame))) for frame in frames)
    assert pieces <= len(calls) <= pieces + 1


def test_joint_evaluations_can_be_counted_out_one_by_one() -> None:
    """What a bounded step of a transcription session needs: the budget may end within a frame."""
    predictor, joint = random_rnnt(5)
    frames = np.random.default_rng(6).normal(0, 2, (30, 1, 1, 8)).astype(np.float32)
    whole, portioned = GreedyDecoder(predictor, joint, RNNT), GreedyDecoder(predictor, joint, RNNT)
    expected = [token for frame in frames for token in whole.step(mx.array(frame))]
    tokens = []
    for frame in frames:
        portioned.begin(mx.array(frame))
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
    predictor, joint = random_rnnt(5)
    decoder, spied = GreedyDecoder(predictor, joint, RNNT), GreedyDecoder(predictor, joint, RNNT)
    table = PieceTable(PIECES)
    recogniser = Recogniser(decoder, table)
    seen = set()
    for frame in np.random.default_rng(6).normal(0, 2, (80, 1, 1, 8)).astype(np.float32):
        kept = [token for token in spied.step(mx.array(frame)) if table.text(token) is not None]
        delta = recogniser.step(mx.array(frame))
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
