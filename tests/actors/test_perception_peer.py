"""The perception networks beside the published model's own code, on random weights and sizes."""

from __future__ import annotations

import warnings

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from vcpipe.actors.perception.cache import EncoderStream, Positions, encode_whole
from vcpipe.actors.perception.config import EncoderConfig, MelConfig, RnntConfig
from vcpipe.actors.perception.dense import make_dense
from vcpipe.actors.perception.fastconformer import FastConformer
from vcpipe.actors.perception.mel import LogMel, MelStream
from vcpipe.actors.perception.rnnt import GreedyDecoder, JointNetwork, PredictionNetwork, Transducer

pytestmark = pytest.mark.parity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("mlx_audio")
    audio = pytest.importorskip("mlx_audio.stt.models.nemotron_asr.audio")
    peer_config = pytest.importorskip("mlx_audio.stt.models.nemotron_asr.config")
    conformer = pytest.importorskip("mlx_audio.stt.models.nemotron_asr.conformer")
    peer_rnnt = pytest.importorskip("mlx_audio.stt.models.nemotron_asr.rnnt")
    streaming = pytest.importorskip("mlx_audio.stt.models.nemotron_asr.streaming")


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[0]).normal(0, 0.1, shape).astype(np.float32)


def copy_weights(peer: nn.Module, ours: nn.Module, dtype: mx.Dtype = mx.float32) -> None:
    """Random weights for both. Strict: the parameter names and shapes are the same."""
    rng = np.random.default_rng(1)

    def disturb(array: mx.array) -> mx.array:
        return (array + mx.array(rng.normal(0, 0.05, array.shape), dtype=mx.float32)).astype(dtype)

    peer.update(tree_map(disturb, peer.parameters()))
    ours.load_weights(tree_flatten(peer.parameters()))


@pytest.mark.parametrize("samples", [172, 230, 256, 257, 1280, 5003])
def test_whole_log_mel(samples: int) -> None:
    theirs = audio.log_mel_spectrogram(mx.array(noise(samples)), peer_config.PreprocessArgs())
    np.testing.assert_array_equal(np.array(LogMel(MelConfig()).whole(noise(samples))), np.array(theirs))


@pytest.mark.parametrize("lookahead", [256, 1280])
@pytest.mark.parametrize("sizes", [[1280] * 6, [256, 300, 1, 5, 2000, 159], [100], [5000]])
def test_streamed_log_mel(lookahead: int, sizes: list[int]) -> None:
    theirs = audio.StreamingLogMelSpectrogram(peer_config.PreprocessArgs(), lookahead_samples=lookahead)
    ours = MelStream(LogMel(MelConfig()), lookahead_samples=lookahead)
    for index, size in enumerate(sizes):
        final = index == len(sizes) - 1
        expected = np.array(theirs.push(mx.array(noise(size)), final=final))
        np.testing.assert_array_equal(np.array(ours.push(noise(size), final=final)), expected)


ENCODERS = [
    {"n_layers": 1, "d_model": 16, "n_heads": 1, "left_context": 0, "conv_kernel_size": 3},
    {"n_layers": 3, "d_model": 48, "n_heads": 6, "left_context": 5, "conv_kernel_size": 9},
    {"n_layers": 2, "d_model": 40, "n_heads": 4, "left_context": 70, "conv_kernel_size": 7, "use_bias": True},
    {"n_layers": 2, "d_model": 32, "n_heads": 2, "left_context": 11, "conv_kernel_size": 1, "ff_expansion_factor": 2},
]


@pytest.mark.parametrize("sizes", ENCODERS, ids=lambda sizes: f"left{sizes['left_context']}")
def test_encoder(sizes: dict[str, int]) -> None:
    sizes = {**sizes, "feat_in": 20, "subsampling_conv_channels": 6}
    ours = FastConformer(EncoderConfig(**sizes))
    args = {key: value for key, value in sizes.items() if key != "left_context"}
    context = [sizes["left_context"], 0]
    theirs = conformer.Conformer(peer_config.ConformerArgs(**args, att_context_size=[context]))
    copy_weights(theirs, ours)
    ours.prepare()
    mel = mx.array(noise(1, 8 * 20 + 1, 20) * 10)
    expected = np.array(theirs(mel, att_context_size=context)[0])
    np.testing.assert_allclose(np.array(encode_whole(ours, mel)), expected, atol=1e-5)

    # The peer keeps a convolution cache only for kernels above 1: its slice [-0:] would keep everything.
    if sizes["conv_kernel_size"] == 1:
        return
    for pushes, options in (([1] + [8] * 20, {"emit_partial": True}), ([7] + [8] * 19, {}), ([30, 3, 50, 77], {})):
        peer_stream = streaming.ConformerStreamingState(theirs, chunk_frames=1, att_context_size=context)
        stream, start = EncoderStream(ours, Positions(ours.config)), 0
        for size in pushes:
            chunks = peer_stream.push(mel[:, start : start + size], **options)
            encoded = stream.push(mel[:, start : start + size], **options)
            assert encoded.shape[1] == len(chunks)
            if chunks:
                np.testing.assert_allclose(np.array(encoded), np.concatenate(chunks, axis=1), atol=1e-5)
            start += size


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("layers", "seed"), [(1, 0), (2, 1), (3, 2)])
def test_rnnt(dtype: mx.Dtype, layers: int, seed: int) -> None:
    blank, max_symbols = 20, 4
    mx.random.seed(seed)
    decoder = peer_rnnt.PredictNetwork(
        peer_config.PredictArgs(pred_hidden=12, pred_rnn_layers=layers, vocab_size=blank, blank_as_pad=True)
    )
    joint = peer_rnnt.JointNetwork(
        peer_config.JointArgs(joint_hidden=14, encoder_hidden=10, pred_hidden=12, num_classes=blank)
    )
    config = RnntConfig(
        encoder_hidden=10,
        pred_hidden=12,
        pred_rnn_layers=layers,
        joint_hidden=14,
        embeddings=blank + 1,
        classes=blank + 1,
        blank_id=blank,
        max_symbols=max_symbols,
    )
    predictor, our_joint = PredictionNetwork(config), JointNetwork(config)
    joint.joint_net[2].bias = joint.joint_net[2].bias + mx.array([0.0] * blank + [1.0])
    copy_weights(decoder, predictor, dtype)
    copy_weights(joint, our_joint, dtype)
    make_dense(our_joint)  # as the stage does
    predictor.prepare()
    transducer = Transducer(predictor, our_joint, config)
    ours = GreedyDecoder(transducer)
    last, hidden, counts = blank, None, set()
    for frame in noise(50, 1, 1, 10) * 30:
        encoded, expected = mx.array(frame), []
        while len(expected) < max_symbols:
            token = mx.array([[last]]) if last != blank else None
            prediction, proposed = decoder(token, hidden)
            best = int(mx.argmax(joint(encoded, prediction.astype(encoded.dtype))))
            if best == blank:
                break
            last, hidden = best, tuple(value.astype(encoded.dtype) for value in proposed)
            expected.append(best)
        assert ours.step(transducer.score(encoded[0], ours.from_prediction)) == expected
        counts.add(len(expected))
    assert len(counts) > 1
