"""The trained speech decoder computes what the actor computes: same weights, same hidden states, same codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from vcpipe.actors.checkpoint import read_config  # noqa: E402
from vcpipe.actors.tts.actor import TextIds, TtsStage  # noqa: E402
from vcpipe.actors.tts.char_encoder import Spelling  # noqa: E402
from vcpipe.actors.tts.config import TtsConfig  # noqa: E402
from vcpipe.actors.tts.ear_tts import SpeechDecoder as ActorDecoder  # noqa: E402
from vcpipe.actors.tts.rng import draws, session_key  # noqa: E402
from vcpipe.bench.mini.nets import tts, tts_mixture  # noqa: E402
from vcpipe.bench.mini.shape import CODEBOOKS, CODES, EOS, LATENT, PAD, PROMPT_FRAMES, mini_config  # noqa: E402
from vcpipe.bench.mini.tokens import TextTokens, write_tokenizer  # noqa: E402
from vcpipe.bench.tensor_shapes import tensor_shapes  # noqa: E402
from vcpipe.schemas.messages import OpenSession  # noqa: E402

ROOT = "tts_model."
SILENCE = np.arange(CODEBOOKS) * 4


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config and tokenizer."""
    folder = tmp_path_factory.mktemp("start")
    size = write_tokenizer(folder, ["It is eleven.", "Hello! How can I help?", "My name is Aria."])
    (folder / "config.json").write_text(json.dumps(mini_config(size, ["<unk>", "a"])))
    return folder


@pytest.fixture(scope="module")
def tokens(start: Path) -> TextTokens:
    return TextTokens(start)


@pytest.fixture(scope="module")
def config(start: Path) -> dict[str, Any]:
    return read_config(start)


@pytest.fixture(scope="module")
def decoder(config: dict[str, Any], tokens: TextTokens) -> Any:
    """With random weights of every tensor that is trained, norms and gates included."""
    torch.manual_seed(3)
    decoder = tts.SpeechDecoder(config["tts_config"], tokens)
    with torch.no_grad():
        for weight in filter(lambda weight: weight.requires_grad, decoder.parameters()):
            weight.add_(torch.randn_like(weight) * (0.1 if weight.ndim < 2 else 0.3 * float(weight.std())))
    decoder.set_codebooks(
        torch.randn(CODEBOOKS, CODES, LATENT) * 0.92 ** torch.arange(CODEBOOKS)[:, None, None],
        torch.from_numpy(SILENCE),
    )
    return decoder.eval()


@pytest.fixture(scope="module")
def stage(config: dict[str, Any], tokens: TextTokens, decoder: Any) -> TtsStage:
    """The actor with the same weights in float32, and codes of silence."""
    sizes = TtsConfig.from_dict(config["tts_config"])
    module = ActorDecoder(sizes)
    module.update(tree_unflatten([(name, mx.array(value.numpy())) for name, value in decoder.state_dict().items()]))
    module.codec_silence_tokens = mx.array(SILENCE, mx.int32)
    subword = module.tts_model.embed_subword
    flags = np.zeros(131073, np.int32)
    flags[: tokens.size] = tokens.continuations()
    subword.subword_flag_emb.is_continuation = mx.array(flags)
    special = np.zeros(131072, np.int32)
    special[[1, 2]] = [1, 2]
    subword.bos_eos_emb.special_flags = mx.array(special)
    vocabulary = tokens.tokenizer.get_vocab(with_added_tokens=True)
    return TtsStage(module, Spelling(vocabulary, 257), TextIds(pad=PAD, eos=EOS), [])


@pytest.fixture(scope="module")
def text(tokens: TextTokens) -> list[int]:
    """A short reply between silences, with a word that is spelled."""
    said = [i for word in ("Hello!", "My", "zebra.") for i in tokens.word(word)]
    return [PAD, PAD, *said, PAD, EOS, PAD, PAD]


def record(stage: TtsStage, text: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """What the actor's backbone and codes are for ``text``: hidden (T, 2, H), codes (T, Q)."""
    model, hiddens = stage._model, []
    refine = model.refine

    def recorded(hidden: mx.array, key: mx.array) -> Any:
        hiddens.append(np.array(hidden[0]))
        return refine(hidden, key)

    monkeypatch.setattr(model, "refine", recorded)
    monkeypatch.setattr("vcpipe.actors.tts.actor.compiled", lambda function: function)
    codes = np.tile(SILENCE, (PROMPT_FRAMES + 1, 1)).astype(np.int32)
    session, _ = stage.open(OpenSession(seed=4, prompt_codes=codes))
    session.prefill()
    said = np.stack([stage.advance(session.state, token) for token in text])
    return np.stack(hiddens), said


def test_names_and_shapes_are_the_checkpoints(config: dict[str, Any], decoder: Any) -> None:
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if name.startswith(ROOT)}
    wanted = {name: shape for name, shape in shapes.items() if not name.startswith(ROOT + "audio_codec.")}
    assert {ROOT + name: tuple(value.shape) for name, value in decoder.state_dict().items()} == wanted


def test_the_passes_begin_with_the_actors_known_codebooks(config: dict[str, Any]) -> None:
    assert tts_mixture.codebooks_per_pass(config["tts_config"]) == [1, 1, 3, 4, 22]
    assert tts_mixture.known_counts(config["tts_config"]) == [0, 1, 2, 5, 9]


def test_hidden_states_and_codes_of_a_session(
    stage: TtsStage, decoder: Any, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, codes = record(stage, text, monkeypatch)
    ids = torch.tensor([text, text])
    sums = tts.code_sum(decoder.tts_model.rvq_embs, torch.from_numpy(codes.astype(np.int64)))
    with torch.no_grad():
        found = decoder(sums.expand(2, -1, -1), ids, torch.tensor([False, True]))
        key, refined = session_key(4), []
        for frame in range(len(text)):
            key, drawn = draws(key, 5, 64, 64)
            numbers = [tuple(torch.from_numpy(np.array(x)[0]) for x in pair) for pair in drawn]
            refined.append(decoder.tts_model.refine(found[:1, frame], found[1:, frame], numbers)[0])
    np.testing.assert_allclose(found.numpy(), hidden.swapaxes(0, 1), atol=3e-4, rtol=1e-4)
    np.testing.assert_array_equal(torch.cat(refined).numpy(), codes)
    assert len(np.unique(codes[:, 0])) > 3


def test_generation_feeds_back_what_it_says(decoder: Any, text: list[int]) -> None:
    """Teacher-forced with its own code sums, a generated session has the hidden states that it was drawn from."""
    ids = torch.tensor([text * 2, [PAD] * 2 * len(text)])
    numbers = torch.Generator().manual_seed(5)
    sums = tts.generate(decoder, ids, generator=numbers)
    with torch.no_grad():
        hidden = [decoder(sums, ids, torch.full((2,), value)) for value in (False, True)]
        numbers.manual_seed(5)
        for frame in range(ids.shape[1]):
            rows = (part[:, frame] for part in hidden)
            _, again = decoder.tts_model.refine(*rows, decoder.tts_model.draws(2, numbers))
            torch.testing.assert_close(again, sums[:, frame])


def test_generation_past_the_window_sees_the_window_alone(config: dict[str, Any], tokens: TextTokens) -> None:
    """In one layer, what lies before the window has no part in a frame: other text there leads to the same frame."""
    torch.manual_seed(0)
    one_layer = config["tts_config"] | {"sliding_window": 45, "num_hidden_layers": 1}
    decoder = tts.SpeechDecoder(one_layer, tokens).eval()
    decoder.set_codebooks(torch.randn(CODEBOOKS, CODES, LATENT), torch.from_numpy(SILENCE))
    with torch.no_grad():
        decoder.tts_model.embed_code.weight.zero_()  # nothing but text to go by
    ids = torch.full((2, 60), PAD)
    ids[1, 5] = tokens.word("Hello!")[0]
    # Both rows draw the same numbers.
    drawn = decoder.tts_model.draws(1)
    decoder.tts_model.draws = lambda rows, generator=None: [tuple(x.expand(rows, -1) for x in pair) for pair in drawn]
    first, second = tts.generate(decoder, ids)
    is_same = torch.isclose(first, second, atol=1e-4).all(dim=-1)
    assert not is_same[5]
    # Frame 5 is seen for the last time by frame 5 + 44.
    assert is_same[:5].all() and is_same[50:].all()


def test_likelihood_is_that_of_the_mixture(decoder: Any) -> None:
    """Against the densities written out, with a spread below the floor too."""
    head, x, residual = decoder.tts_model.mog_head, torch.randn(5, 192), torch.randn(5, 64)
    with torch.no_grad():
        found = head.likelihood(x, residual)
        spread = head.proj_logs(x).clamp(min=-4.0).exp()
        low = head.proj_mus.weight.unflatten(0, (64, 16))
        means = torch.stack([x @ low[k].T @ head.low_mat[k].T * spread + head.proj_else(x) for k in range(64)], dim=1)
        density = torch.distributions.Normal(means, spread[:, None]).log_prob(residual[:, None]).sum(dim=-1)
        wanted = -(head.proj_logits(x).log_softmax(dim=-1) + density).logsumexp(dim=-1)
    torch.testing.assert_close(found.nll, wanted, rtol=1e-4, atol=1e-3)


def test_every_weight_is_the_actors(stage: TtsStage, decoder: Any) -> None:
    names = dict(tree_flatten(ActorDecoder(stage._model.config).parameters()))
    tables = {
        "codec_silence_tokens",
        *(name for name in names if name.endswith(("pad_tensor", "_flags", "is_continuation"))),
    }
    assert set(names) - tables == set(decoder.state_dict())
