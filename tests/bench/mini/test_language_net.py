"""The trained network against the language actor's: the same weights have to give the same numbers."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from vcpipe.actors.checkpoint import read_config
from vcpipe.actors.language.cache import Caches
from vcpipe.actors.language.config import LanguageConfig
from vcpipe.actors.language.model import LanguageModel
from vcpipe.actors.language.parameters import LanguageParameters
from vcpipe.bench.mini.shape import PAD, mini_config
from vcpipe.bench.tensor_shapes import tensor_shapes

torch = pytest.importorskip("torch")
from vcpipe.bench.mini.augment import Segments  # noqa: E402
from vcpipe.bench.mini.conversations import RECALLED_WORDS, RESULT_LATER, Batch  # noqa: E402
from vcpipe.bench.mini.nets.language import Language  # noqa: E402
from vcpipe.bench.mini.train.language import Learner, Noise, Objective, shown  # noqa: E402
from vcpipe.bench.mini.train.language_batch import Asked, Packed  # noqa: E402
from vcpipe.bench.mini.train.language_check import rounded  # noqa: E402

VOCABULARY, ENCODER, POSITIONS = 60, 160, 270  # more positions than a block of the state space

PARTS = ("llm.", "embed_tokens.", "lm_head.", "function_head.", "perception.proj.")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, Any]:
    """The embedded checkpoint's, with fewer and narrower blocks: every position is a step of its own here."""
    config = mini_config(VOCABULARY, [str(i) for i in range(8)])
    config["text_config"] |= {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "hidden_size": 64}
    config["text_config"] |= {"mamba_head_dim": 16, "ssm_state_size": 16, "head_dim": 16, "intermediate_size": 96}
    config["audio_config"]["output_dim"] = 64
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


@pytest.fixture(scope="module")
def network(config) -> Language:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = Language(config).eval().requires_grad_(False)
    for name, weight in network.named_parameters():
        if weight.ndim == 1 and "A_log" not in name:  # norms that are all 1 would hide which weight goes where
            weight.add_(0.2 * torch.randn_like(weight))
    network.embed_tokens.weight[PAD].normal_(std=0.3)
    return network


@pytest.fixture(scope="module")
def actor(config, network) -> LanguageModel:
    sizes = LanguageConfig.from_runtime(config)
    stored = LanguageParameters(sizes)
    weights = {name: mx.array(weight.numpy()) for name, weight in network.state_dict().items()}
    ours = {name: w.swapaxes(1, 2) if w.ndim == 3 else w for name, w in weights.items() if "perception" not in name}
    assert {name for name, _ in tree_flatten(stored.parameters())} == set(ours)
    stored.update(tree_unflatten(list(ours.items())))
    return LanguageModel(sizes, stored)


@pytest.fixture(scope="module")
def encoded() -> Any:
    return torch.randn(2, POSITIONS, ENCODER, generator=torch.Generator().manual_seed(1))


def test_names_and_shapes_are_the_checkpoints(config, network):
    wanted = {name.removeprefix("stt_model."): shape for name, shape in tensor_shapes(config).items()}
    wanted = {name: shape for name, shape in wanted.items() if name.startswith(PARTS)}
    assert {name: tuple(weight.shape) for name, weight in network.state_dict().items()} == wanted


def test_free_running_ids_are_the_actors(network, actor, encoded):
    texts, functions = network.run(encoded)
    projected = network.perception.proj(encoded[1:]).numpy()
    caches, ids, found = Caches.empty(actor.config, mx.float32), mx.full((2,), PAD, mx.uint32), []
    for at in range(POSITIONS):
        ids, _ = actor.step(mx.array(projected[:, at : at + 1]), ids, caches)
        mx.eval(ids, caches.blocks)
        found.append(np.array(ids).tolist())
    assert found == torch.stack([texts[1], functions[1]], 1).tolist()
    assert len(set(texts.flatten().tolist())) > 10  # a network that always says the same would prove little


def test_hidden_states_of_a_sequence_are_the_actors(network, actor, encoded):
    text = torch.randint(0, VOCABULARY, (2, POSITIONS), generator=torch.Generator().manual_seed(2))
    fused = network.fuse(encoded, text)
    (ours,) = network.hidden(fused)
    for row in range(2):
        theirs = np.array(actor._wide.backbone(mx.array(fused[row : row + 1].numpy())))
        np.testing.assert_allclose(ours[row : row + 1].numpy(), theirs, atol=1e-4, rtol=1e-4)


def test_step_by_step_logits_are_those_of_the_sequence(network, encoded):
    text = torch.randint(0, VOCABULARY, (2, POSITIONS), generator=torch.Generator().manual_seed(3))
    together = network(encoded, text)
    states, pad = network.empty(2, POSITIONS), torch.full((2,), PAD)
    for at in range(POSITIONS):
        *logits, states = network.step(encoded[:, at], text[:, at], pad, states, at)
        for stepped, whole in zip(logits, together, strict=True):
            torch.testing.assert_close(stepped, whole[:, at], atol=1e-4, rtol=1e-4)


def test_gradients_are_finite_and_reach_every_weight(config):
    network = Language(config, dropout=0.1)
    text, prompt = torch.randint(0, VOCABULARY, (2, 1, 20))
    logits = network(torch.randn(1, 20, ENCODER), text)
    loss = sum(part.logsumexp(-1).mean() for part in logits)
    (loss + network.fuse(torch.randn(1, 20, ENCODER), text, prompt - 1).square().mean()).backward()
    for name, weight in network.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any(), name


# ------------------------------------------------------------------------------------------------ training
def batch(weight: np.ndarray) -> Batch:
    """Two rows of 48 frames; what the text holds is the weight's affair. 5 and 11 are to be known in frame 4, 16 later."""
    pad = np.full((2, 48), PAD)
    text, nothing = np.where(weight > 0.5, 20, pad), np.full_like(pad, -1)
    words, numbers = np.full((1, RECALLED_WORDS), 3), np.array([[5, 11]])
    speech, echo = [(0, 160, 20, 1.0, 0.5), (1000, 80, 500, 1.1, 1.0)], [(7, 90, 800, 1.0, 2.0)]
    at, weight = np.array([[1, 4]]), weight.astype(np.float32)
    return Batch(speech, echo, text, pad, weight, nothing, at, words, numbers, np.array([16]), [])


def unpacked(weight: np.ndarray) -> Asked:
    ids, weights, _, _ = Packed.of(batch(weight)).to(torch.device("cpu"))
    return Asked.of(ids, weights)


def test_a_batch_travels_as_it_is():
    weight = np.zeros((2, 48))
    weight[0, 3] = 1
    sent = batch(weight)
    packed = Packed.of(sent)
    ids, weights, *stretches = packed.to(torch.device("cpu"))
    asked = Asked.of(ids, weights)
    for name in ("text", "previous", "prompt", "weight"):
        np.testing.assert_array_equal(getattr(asked, name).numpy(), getattr(sent, name))
    assert asked.recall[0].tolist() == [1, 4, *[3] * RECALLED_WORDS, 5, 11, 16]
    assert len(asked.recall) == 8 and (asked.recall[1:, 2:] < 0).all()
    for arrived, laid in zip(stretches, (sent.speech, sent.echo), strict=True):
        expected = Segments.of(laid)
        assert arrived.total == expected.total
        assert all(torch.equal(one, other) for one, other in zip(arrived[:-1], expected[:-1], strict=True))


def test_more_recalls_than_there_is_room_for_are_left_out():
    sent = batch(np.zeros((2, 48)))
    for name in ("recall_at", "recall_words", "recall_numbers", "recall_results"):
        setattr(sent, name, np.repeat(getattr(sent, name), 20, axis=0))
    assert len(Packed.of(sent).whole) == len(Packed.of(batch(np.zeros((2, 48)))).whole)


def test_frames_without_weight_do_not_count(config):
    torch.manual_seed(0)
    learner, encoded, weight = Learner(config, 5, dropout=0.0), torch.randn(2, 48, ENCODER), np.zeros((2, 48))
    weight[0, 3] = 1
    text_logits, _ = learner(encoded, torch.full((2, 48), PAD))
    parts = Objective(learner, 0.2, 1.5, 0.7)(encoded, unpacked(weight))
    expected = torch.nn.functional.cross_entropy(text_logits[0, 3], torch.tensor(20))
    torch.testing.assert_close(parts["text"], expected)
    told = 0.2 * parts["recall"] + 1.5 * parts["numbers"] + 0.7 * parts["result"]
    torch.testing.assert_close(parts["loss"], expected + 0.05 * parts["function"] + told)


def test_only_what_is_to_be_recalled_counts(config):
    torch.manual_seed(0)
    learner, encoded = Learner(config, 5, dropout=0.0), torch.randn(2, 48, ENCODER)
    asked = unpacked(np.ones((2, 48)))
    parts = Objective(learner, 0.2, 1.0, 1.0)(encoded, asked)
    fused = learner.fuse(encoded, asked.previous, asked.prompt)
    _, inside, late = learner.hidden(fused, learner.middle, learner.late)
    words = torch.nn.functional.cross_entropy(
        learner.recall(inside[1, 4]).view(RECALLED_WORDS, 6), torch.full((10,), 3)
    )
    torch.testing.assert_close(parts["recall"], words)
    numbers = (learner.numbers(inside[1, 4]).view(2, -1) - shown(torch.tensor([5.0, 11.0]))).square().mean()
    torch.testing.assert_close(parts["numbers"], numbers)
    result = (learner.result(late[1, 4 + RESULT_LATER]) - shown(torch.tensor(16.0))).square().mean()
    torch.testing.assert_close(parts["result"], result)


def test_numbers_are_shown_by_size_and_digits():
    found = shown(torch.arange(100.0))
    assert found.shape == (100, 22)
    torch.testing.assert_close(found[:, 0], torch.arange(100.0) / 20)
    torch.testing.assert_close(found[:, 1].exp(), 1 + torch.arange(100.0))
    torch.testing.assert_close(found[3, [7, 17]], found[73, [7, 17]])  # the circle of ten tells the last digit


def test_the_heads_of_training_are_not_saved(config, network, tmp_path):
    from safetensors.torch import save_file

    learner = Learner(config, 5, dropout=0.1)
    assert learner.state_dict().keys() == network.state_dict().keys()
    save_file(network.state_dict(), str(tmp_path / "weights.safetensors"))
    learner.resume(tmp_path)
    assert all(torch.equal(weight, network.state_dict()[name]) for name, weight in learner.state_dict().items())
    learner.save_heads(tmp_path)
    others = Learner(config, 5, dropout=0.1), Learner(config, 6, dropout=0.1)  # the last with more words to tell
    for other in others:
        other.resume(tmp_path)
        assert torch.equal(other.numbers.weight, learner.numbers.weight)
        assert (other.recall.weight.shape == learner.recall.weight.shape) == (other is others[0])


def test_noise_hides_short_stretches():
    torch.manual_seed(0)
    hidden = (Noise(dropped=0.0, masked=0.02)(torch.ones(64, 200, 4)) == 0).all(-1)
    assert 0.02 < hidden.float().mean() < 0.06
    runs = [len(run) for row in hidden.int().tolist() for run in "".join(map(str, row)).split("0") if run]
    assert {1, 2, 3} <= set(runs) and np.mean(runs) == pytest.approx(2, abs=0.3)


def test_weights_are_rounded_for_evaluation(network):
    copied = rounded(network)
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in copied.parameters())
    assert not torch.equal(copied.lm_head.weight, network.lm_head.weight)
