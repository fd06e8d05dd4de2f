"""The perception network that is trained, against the one that runs: same weights, same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from vcpipe.actors.checkpoint import read_config  # noqa: E402
from vcpipe.actors.perception.actor import PerceptionStage, load  # noqa: E402
from vcpipe.actors.perception.mel import MelStream  # noqa: E402
from vcpipe.actors.perception.rnnt import GreedyDecoder  # noqa: E402
from vcpipe.actors.stage import StageConfig  # noqa: E402
from vcpipe.bench.mini.nets.perception import LogMel, SpeechRecogniser  # noqa: E402
from vcpipe.bench.mini.shape import mini_config  # noqa: E402
from vcpipe.bench.mini.train.perception import Learner  # noqa: E402
from vcpipe.bench.mini.training import Run  # noqa: E402
from vcpipe.bench.tensor_shapes import tensor_shapes  # noqa: E402

FRAME = 1280
FRAMES = 90  # more than the attention's window
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return mini_config(300, [f"p{i}" for i in range(40)])


@pytest.fixture(scope="module")
def network(config: dict[str, Any]) -> SpeechRecogniser:
    """With weights that let every part be heard, and a blank that is best in most frames."""
    torch.manual_seed(0)
    network = SpeechRecogniser(config["audio_config"]).eval().requires_grad_(False)
    for name, weight in network.named_parameters():
        if "norm" in name:
            weight += 0.2 * torch.randn_like(weight)
        elif "pos_bias" in name or name.endswith("bias"):
            weight += 0.3 * torch.randn_like(weight)
    joint = network.rnnt_joint
    joint.enc.weight *= 3
    joint.pred.weight *= 5
    joint.joint_net[2].weight *= 10
    joint.joint_net[2].weight[-1] = 0
    joint.joint_net[2].bias[-1] = 13.0
    return network


@pytest.fixture(scope="module")
def folder(config: dict[str, Any], network: SpeechRecogniser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"stt_model.{name}": weight for name, weight in network.state_dict().items()}
    tensors["stt_model.perception.proj.weight"] = torch.randn(256, 160) / 16
    tensors["stt_model.perception.proj.bias"] = torch.zeros(256)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / "model.safetensors"))
    return folder


@pytest.fixture(scope="module")
def stage(folder: Path) -> PerceptionStage:
    return load(StageConfig("perception", folder), lambda step, fraction: None)


@pytest.fixture(scope="module")
def samples() -> np.ndarray:
    """Tones that come and go over noise, and a stretch of digital silence."""
    rng = np.random.default_rng(0)
    time = np.arange(FRAMES * FRAME) / 16000
    sound = 0.2 * np.sin(2 * np.pi * (200 + 300 * np.sin(3 * time)) * time) * (np.sin(2 * time) > 0)
    sound += 0.02 * rng.normal(size=time.size)
    sound[20 * FRAME : 30 * FRAME] = 0
    return sound.astype(np.float32)


@pytest.fixture(scope="module")
def streamed(stage: PerceptionStage, samples: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Encoded frames and (piece, frame) of a session."""
    perceive, decoder = stage.open_cached(), GreedyDecoder(stage.transducer)
    encoded, pieces = [], []
    for frame, chunk in enumerate(samples.reshape(FRAMES, FRAME)):
        heard = perceive(chunk, decoder.from_prediction)
        encoded.append(np.array(heard.encoded[0]))
        pieces += [(piece, frame) for piece in decoder.step(heard.scored)]
    return np.stack(encoded), pieces


def test_log_mel_is_that_of_the_stream(config: dict[str, Any], stage: PerceptionStage, samples: np.ndarray) -> None:
    stream = MelStream(stage.log_mel, lookahead_samples=FRAME)
    wanted = np.concatenate([np.array(stream.push(chunk)[0]) for chunk in samples.reshape(FRAMES, FRAME)])
    found = LogMel(config["audio_config"]["preprocessor"])(torch.from_numpy(samples)[None])[0].numpy()
    assert found.shape == wanted.shape == (8 * FRAMES - 7, 128)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)
    assert found.std() > 1


def test_features_are_the_frames_of_a_session(
    network: SpeechRecogniser, samples: np.ndarray, streamed: tuple[np.ndarray, list[tuple[int, int]]]
) -> None:
    found = network.encoder.features(torch.from_numpy(samples)[None])[0].numpy()
    assert found.shape == (FRAMES, 160)
    assert np.abs(found - streamed[0]).max() < TOLERANCE * np.abs(found).max()


def test_what_comes_after_changes_nothing_before(network: SpeechRecogniser, samples: np.ndarray) -> None:
    batch = torch.from_numpy(np.stack([samples, samples]))
    batch[1, 40 * FRAME :] = 0.3
    found = network.encoder.features(batch)
    # The frame before the change already hears half an FFT of it; the one before that does not.
    assert torch.allclose(found[0, :40], found[1, :40], atol=1e-4)
    assert float((found[0, 42:] - found[1, 42:]).abs().max()) > 0.1


def test_logits_are_equal(network: SpeechRecogniser, stage: PerceptionStage) -> None:
    rng = np.random.default_rng(1)
    encoded, pieces = rng.normal(size=(5, 160)).astype(np.float32), [3, 17, 39, 0]
    predicted = network.rnnt_decoder(torch.tensor([pieces]))
    found = network.rnnt_joint(torch.from_numpy(encoded)[None], predicted)[0].numpy()
    transducer, wanted = stage.transducer, []
    states, from_prediction = transducer.start
    for piece in [*pieces, None]:
        rows = [
            transducer._joint(transducer.score(mx.array(e[None]), from_prediction)[0], from_prediction) for e in encoded
        ]
        wanted.append(np.concatenate([np.array(row) for row in rows]))
        if piece is not None:
            states, from_prediction = transducer._predict(mx.array([piece]), states)
    assert np.abs(found - np.stack(wanted, 1)).max() < TOLERANCE * np.abs(found).max()


def test_greedy_pieces_and_their_frames_are_equal(
    network: SpeechRecogniser, samples: np.ndarray, streamed: tuple[np.ndarray, list[tuple[int, int]]]
) -> None:
    encoded = network.encoder.features(torch.from_numpy(np.stack([samples, np.roll(samples, 9 * FRAME)])))
    found = network.greedy(encoded, torch.tensor([FRAMES, 50]))
    assert found[0] == streamed[1]
    assert 20 < len(found[0]) < 10 * FRAMES
    assert found[1] and max(frame for _, frame in found[1]) < 50
    assert network.greedy(encoded, torch.tensor([0, 0])) == [[], []]


def test_what_training_saves_is_the_network_alone(
    config: dict[str, Any], network: SpeechRecogniser, tmp_path: Path
) -> None:
    learner = Learner(config["audio_config"], dropout=0.1)
    learner.load_state_dict(network.state_dict(), strict=False)
    Run(tmp_path, learner, seconds=1, peak_rate=1e-3, settings={}).save()
    loaded = SpeechRecogniser.load(config["audio_config"], tmp_path)
    assert all(torch.equal(weight, network.state_dict()[name]) for name, weight in loaded.state_dict().items())
    assert any(name.startswith("ctc.") for name, _ in learner.named_parameters())


def test_names_and_shapes_are_the_checkpoints(folder: Path, network: SpeechRecogniser) -> None:
    parts = ("stt_model.perception.encoder.", "stt_model.rnnt_")
    shapes = tensor_shapes(read_config(folder))
    wanted = {name.removeprefix("stt_model."): shape for name, shape in shapes.items() if name.startswith(parts)}
    assert {name: tuple(weight.shape) for name, weight in network.state_dict().items()} == wanted
