"""Whole sessions beside the public MLX code's, on random small checkpoints: equal ids, codes, texts and transcripts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from parity.chain import Chain
from parity.checkpoints import Recipe, write_checkpoint
from parity.compare import (
    GOLDEN,
    QUESTION_WAV,
    Heard,
    assert_same_sound,
    heard,
    noise_bursts,
    read_wav,
)

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.schemas.config import GenerateOptions, PipelineConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("mlx_audio")
    peer_utils = pytest.importorskip("mlx_vlm.utils")
    transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # the peer's own
]

WAVS = {
    "question": read_wav(QUESTION_WAV),
    "golden": read_wav(GOLDEN / "input.wav"),
    "bursts": noise_bursts(4, 6 * 16000),
}

RECIPES = [
    Recipe(1),
    Recipe(2, bits=4),
    Recipe(
        3,
        bits=8,
        changes=(("default_system_prompt", "speak quietly"), ("audio_config.encoder.att_context_size", [0, 0])),
    ),
    Recipe(4, dtype="float32", changes=(("text_config.mlp_bias", True), ("text_config.attention_bias", True))),
    Recipe(5, changes=(("text_config.time_step_limit", [0.05, 0.6]), ("rnnt_vocabulary", []))),
    Recipe(6, changes=(("text_config.vocab_size", 400),)),  # 16 ids that no token of the tokenizer has
    Recipe(7, bits=4, group_size=32),
    Recipe(9),
]

#: A speech decoder that is as quick as can be, for long timelines.
QUICK = Recipe(
    8,
    changes=(
        ("text_config.hybrid_override_pattern", "*M-*"),
        ("text_config.num_hidden_layers", 4),
        ("tts_config.num_hidden_layers", 2),
        ("tts_config.sliding_window", 60),
        ("tts_config.num_iterations", 2),
        ("tts_config.character_encoder.num_hidden_layers", 1),
        ("tts_config.mog_head.num_layers", 1),
        ("tts_config.sliding_window_pattern", 2),
        ("tts_config.num_quantizers", 2),
        ("codec_config.num_quantizers", 2),
        ("audio_config.encoder.att_context_size", [[8, 0]]),
    ),
)


@dataclass
class Pair:
    """One checkpoint, twice in this process: the peer's session maker, and our stages."""

    folder: Path
    peer: Any
    ours: Chain

    def stream(self, wav: np.ndarray, chunk: int, **options: Any) -> tuple[Heard, Heard]:
        """Ours and the peer's; the peer gets ``wav`` in chunks, our stages get frames, as the session cuts them."""
        session = self.peer.create_streaming_session(**options)
        events = []
        for start in range(0, len(wav), chunk):
            events += session.push_audio(wav[start : start + chunk])
        theirs = heard(events + session.flush())
        frames = len(theirs.codes)
        theirs.text_ids, theirs.function_ids = session._text_tokens[-frames:], session._function_tokens[-frames:]
        return self.ours.run(wav, **options), theirs

    def offline(self, wav: np.ndarray, **options: Any) -> tuple[Heard, Heard]:
        """Ours and the peer's over the whole of ``wav`` at once."""
        ours = self.ours.run(wav, offline=True, **{"use_language_cache": False, **options})
        return ours, from_result(self.peer.generate(mx.array(wav), **options))


def from_result(result: Any) -> Heard:
    """An offline result, the peer's or ours: the fields have the same names."""
    return Heard(
        events=[],
        codes=np.array(result.audio_codes),
        samples=np.array(result.audio),
        text=result.text,
        transcript=result.user_transcript,
        text_ids=np.array(result.text_tokens).tolist(),
        function_ids=np.array(result.function_tokens).tolist(),
    )


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    """Where both sides have the same kernels; uncompiled, as every size would need kernels of its own.

    Compiled steps are compared where processes are started: here below and with the goldens.
    """
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    yield
    mx.enable_compile()
    mx.set_default_device(device)


def make_pair(recipe: Recipe, factory: pytest.TempPathFactory) -> Pair:
    folder = factory.mktemp(recipe.name)
    write_checkpoint(recipe, folder)
    model = peer_utils.load_model(folder, lazy=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = Chain(folder)
    assert [line for stage in ours.stages.values() for line in stage.warnings] == []
    return Pair(folder, model.create_session(tokenizer), ours)


@pytest.fixture(scope="module", params=RECIPES, ids=lambda recipe: recipe.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, on_cpu: None) -> Pair:
    return make_pair(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory, on_cpu: None) -> Pair:
    return make_pair(QUICK, tmp_path_factory)


def digits(count: int) -> str:
    """A prompt of so many tokens: the tokenizer merges no digits."""
    return "".join(map(str, np.random.default_rng(count).integers(0, 10, count)))


def assert_equal_streams(ours: Heard, theirs: Heard) -> None:
    assert ours.text_ids == theirs.text_ids
    assert ours.function_ids == theirs.function_ids
    np.testing.assert_array_equal(ours.codes, theirs.codes)
    assert ours.events == theirs.events
    assert_same_sound(ours.samples, theirs.samples)
    # Both channels and the codes move, so that an error has something to show in.
    assert len(set(theirs.text_ids or [])) > 1
    assert len(set(theirs.function_ids or [])) > 1
    assert len(np.unique(theirs.codes, axis=0)) > 2


def assert_equal_offline(ours: Heard, theirs: Heard) -> None:
    assert ours.text_ids == theirs.text_ids
    assert ours.function_ids == theirs.function_ids
    np.testing.assert_array_equal(ours.codes, theirs.codes)
    assert (ours.text, ours.transcript) == (theirs.text, theirs.transcript)
    assert_same_sound(ours.samples, theirs.samples)


@pytest.mark.parametrize(
    ("wav", "chunk", "prompt", "seed"),
    [("question", 300, "", 3), ("bursts", 4096, "be concise", 11), ("golden", 1281, None, 2**40)],
)
def test_streaming(pair: Pair, wav: str, chunk: int, prompt: str | None, seed: int) -> None:
    assert_equal_streams(*pair.stream(WAVS[wav][2000:13000], chunk, system_prompt=prompt, seed=seed))


def test_streaming_without_caches(pair: Pair) -> None:
    """Long enough to fill the perception's window, except where it is 5.6 s."""
    options = {"use_language_cache": False, "use_perception_cache": False, "system_prompt": "hi", "seed": 1}
    assert_equal_streams(*pair.stream(WAVS["question"][5000:18000], 1280, **options))


@pytest.mark.parametrize(
    ("wav", "options"),
    [
        ("bursts", {"seed": 4, "system_prompt": ""}),
        ("question", {"seed": 9, "system_prompt": "answer me", "use_language_cache": True, "max_frames": 7}),
    ],
)
def test_offline(pair: Pair, wav: str, options: dict[str, Any]) -> None:
    assert_equal_offline(*pair.offline(WAVS[wav][-10345:], **options))


@pytest.mark.parametrize("tokens", [250, 508])
def test_streaming_after_a_long_prompt(quick: Pair, tokens: int) -> None:
    """The attention buffers grow by 256 positions: here in the midst of the audio, over a bfloat16 prompt."""
    assert_equal_streams(*quick.stream(WAVS["question"][8000:18000], 5000, system_prompt=digits(tokens), seed=tokens))


def test_offline_after_a_long_prompt(quick: Pair) -> None:
    options = {"system_prompt": digits(250), "seed": 1, "use_language_cache": True}
    assert_equal_offline(*quick.offline(WAVS["question"][8000:18000], **options))


def test_a_longer_conversation(quick: Pair) -> None:
    """Every window has rotated."""
    ours, theirs = quick.stream(WAVS["bursts"], 16000, system_prompt="be concise", seed=77)
    assert len(theirs.codes) == 75
    assert_equal_streams(ours, theirs)


@pytest.mark.process
@pytest.mark.parametrize("pair", [RECIPES[2]], ids=lambda recipe: recipe.name, indirect=True)
def test_real_processes(pair: Pair) -> None:
    """The same through four processes and the session that cuts frames; the prompt is the checkpoint's own."""
    wav = WAVS["bursts"][20000:33000]
    with Pipeline(PipelineConfig(pair.folder, device="cpu")) as pipeline:
        with pipeline.open_session(seed=19) as session:
            ours = heard(session.stream(np.array_split(wav, 23)))
        _, theirs = pair.stream(wav, 999, seed=19)
        assert ours.events == theirs.events
        np.testing.assert_array_equal(ours.codes, theirs.codes)
        assert_same_sound(ours.samples, theirs.samples)

        options = {"system_prompt": "and now", "seed": 20, "extra_decoding_seconds": 0.2}
        result = pipeline.generate(wav, GenerateOptions(**options))
        assert_equal_offline(from_result(result), from_result(pair.peer.generate(mx.array(wav), **options)))
