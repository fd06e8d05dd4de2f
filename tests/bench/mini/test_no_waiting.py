"""Steps of training never wait for the device: a wait costs a step its speed, and a CUDA graph cannot hold one.

Here the device is a CPU, on which nothing waits; so what would make a GPU be waited for is caught as it is called.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

from vcpipe.bench.mini.material import Line, Material, Sounds, SpokenReply  # noqa: E402
from vcpipe.bench.mini.nets.codec import Codec  # noqa: E402
from vcpipe.bench.mini.nets.discriminators import Discriminators  # noqa: E402
from vcpipe.bench.mini.nets.perception import SpeechRecogniser  # noqa: E402
from vcpipe.bench.mini.nets.tts import SpeechDecoder  # noqa: E402
from vcpipe.bench.mini.replay import Replayed  # noqa: E402
from vcpipe.bench.mini.shape import CODEBOOKS, mini_config  # noqa: E402
from vcpipe.bench.mini.sound import Bank, Clip  # noqa: E402
from vcpipe.bench.mini.timeline import REPLY_RATE, USER_RATE, Reply  # noqa: E402
from vcpipe.bench.mini.tokens import TextTokens, write_tokenizer  # noqa: E402
from vcpipe.bench.mini.train import codec as codec_training  # noqa: E402
from vcpipe.bench.mini.train import language, tts  # noqa: E402
from vcpipe.bench.mini.train.language_sound import Stage  # noqa: E402
from vcpipe.bench.mini.training import Run  # noqa: E402

STEPS = 3
WORDS = (("It", 0.02, 0.2), ("is", 0.2, 0.4), ("eleven.", 0.41, 0.8))
CPU = torch.device("cpu")

#: Their results, or the shapes of these, have to be known to the host.
WAITING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_consecutive"),
    *("_unique", "_unique2", "unique_dim", "bincount", "histc"),
}


class CommonChance(TorchDispatchMode):
    """AssertionError for random numbers of a generator of their own, which a graph would not know of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert (kwargs or {}).get("generator") is None, f"{func} in a graph has its own generator"
        return func(*args, **(kwargs or {}))


class NoWaiting(TorchDispatchMode):
    """AssertionError for what would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, keywords = func.overloadpacket.__name__, kwargs or {}
        by_mask = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in _flat(args[1:2])
        )
        unsized = name == "repeat_interleave" and keywords.get("output_size") is None
        # A tensor of numbers that the host has. A single one, to set entries to, is no copy on a GPU.
        made = name == "lift_fresh" and args[0].ndim > 0
        assert not (name in WAITING or by_mask or unsized or made), f"{func} waits for the device"
        return func(*args, **keywords)


def _flat(value: Any) -> list[Any]:
    return [each for some in value for each in _flat(some)] if isinstance(value, (list, tuple)) else [value]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Runs end after some steps, of which all but the first must not wait. How many steps were seen, at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mode, seen = NoWaiting(), [0]
    watched: list[Run] = []
    entered: list[NoWaiting] = []
    begin, event, whole = Run.__init__, Run.event, Replayed._whole

    def made(run: Run, *arguments: Any, **options: Any) -> None:
        begin(run, *arguments, **options)
        for group in run._optimizer.param_groups:
            group["fused"] = True  # as on a GPU
        watched.append(run)

    def going(run: Run) -> bool:
        if run is not watched[0]:  # the discriminators' goes along
            return True
        if run.steps > 1:
            left()
            seen[0] += 1
        if run.steps and run.steps < STEPS:
            mode.__enter__()
            entered.append(mode)
        return run.steps < STEPS

    def left() -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    def told(run: Run, **numbers: Any) -> None:
        with _disable_current_modes():  # now and then numbers are wanted
            event(run, **numbers)

    def captured(step: Replayed, *inputs: Tensor) -> dict[str, Tensor]:
        with CommonChance():
            return whole(step, *inputs)

    monkeypatch.setattr(Replayed, "_whole", captured)
    for name, stand_in in (("__init__", made), ("going", going), ("event", told), ("finish", lambda run: None)):
        monkeypatch.setattr(Run, name, stand_in)
    yield seen
    left()
    torch.set_num_threads(threads)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """Of the embedded checkpoint's kind, and smaller."""
    write_tokenizer(tmp_path, ["It is eleven."])
    config = mini_config(TextTokens(tmp_path).size, ["<unk>"])
    config["text_config"] |= {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "hidden_size": 64}
    config["text_config"] |= {"mamba_head_dim": 16, "ssm_state_size": 16, "head_dim": 16, "intermediate_size": 96}
    config["audio_config"]["encoder"]["n_layers"] = 1
    speech = config["tts_config"]
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    speech |= {**small, "num_hidden_layers": 2, "character_encoder": speech["character_encoder"] | small}
    config["codec_config"]["base_channels"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def bank() -> Bank:
    """Three replies of noise, a second each."""
    sound = np.random.default_rng(0).integers(-9000, 9000, 3 * REPLY_RATE).astype(np.int16)
    places = [(i * REPLY_RATE, REPLY_RATE) for i in range(3)]
    clips = [
        Clip(str(i), "It is eleven.", "", WORDS, "", "", "train", "answer", "", 1.0, *place)
        for i, place in enumerate(places)
    ]
    return Bank(sound, REPLY_RATE, clips)


def elsewhere(batches: Iterator[Any]) -> Iterator[Any]:
    """As if other processes drew them."""
    while True:
        with _disable_current_modes():
            batch = next(batches)
        yield batch


def settings(start: Path, **more: Any) -> argparse.Namespace:
    common = {"corpus": start, "start": start, "out": start / "run", "seconds": 1e6, "rate": 1e-3, "seed": 0}
    return argparse.Namespace(**common, warm_up=2, resume=None, graph=True, **more)


def test_the_language_model(steps: list[int], start: Path) -> None:
    config, tokens = json.loads((start / "config.json").read_text()), TextTokens(start)
    sounds = Sounds()
    echo, question = (sounds.add(np.full(USER_RATE, 900, np.int16), 0.06) for _ in range(2))
    sounds.close()
    reply = SpokenReply("It is eleven.", Reply.lay(WORDS, REPLY_RATE, tokens, 0), echo)
    lines = [Line("Five plus six?", "test", 0, (1, 2, 3), (5, 6), 11, [question])]
    material = Material(sounds, [reply], lines, [], [], np.ones(1), ["five", "plus", "six"])
    sizes = {"rows": 3, "frames": 60, "long_rows": 2, "long_frames": 90, "long_every": 3, "workers": 0}
    weights = {"recall": 0.2, "numbers": 1.0, "result": 1.0}
    options = settings(start, **sizes, **weights, encoder_apart=False, check_seconds=1e6)
    network = language.Learner(config, 3, dropout=0.1)
    run = Run(options.out, network, seconds=1e6, peak_rate=1e-3, settings={})
    recogniser = SpeechRecogniser(config["audio_config"]).eval().requires_grad_(False)
    stage, drawn = Stage(sounds.sound, CPU, 0), elsewhere(language.batches(material, tokens.size, options))
    language.train(run, drawn, stage, recogniser.encoder.features, None, options)
    assert steps == [STEPS - 1]


def test_the_speech_decoder(steps: list[int], start: Path, bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tts, "Evaluation", lambda *arguments: lambda *more: {})
    config, tokens = json.loads((start / "config.json").read_text()), TextTokens(start)
    codec = Codec(config["codec_config"]).eval().requires_grad_(False)
    data = tts.prepare(bank, bank.clips, tokens, codec, [0, 1, 2, 5, 9], offsets=2, seed=0)
    decoder = SpeechDecoder(config["tts_config"], tokens, 0.1)
    decoder.set_codebooks(codec.books, data.frames.silence)
    run = Run(start / "run", decoder, seconds=1e6, peak_rate=1e-3, settings={})
    options = settings(start, speak_every=1, rehearse_every=0, evaluate_every=1e6)
    tts.train(decoder, data, codec, run, tts.Settings(batch=4, frames=40), options)
    assert steps == [STEPS - 1]


@pytest.mark.parametrize("with_speech", [False, True])
def test_the_codec(
    steps: list[int], start: Path, bank: Bank, monkeypatch: pytest.MonkeyPatch, with_speech: bool
) -> None:
    config = json.loads((start / "config.json").read_text())
    codec, spoken = Codec(config["codec_config"]), start / "tts"
    codec.prvq.set_books(codec.books.bfloat16().float())
    speaker = SpeechDecoder(config["tts_config"], TextTokens(start))
    speaker.set_codebooks(codec.books, torch.zeros(CODEBOOKS, dtype=torch.long))
    for run, tensors in ((start / "codec", codec.state_dict()), (spoken, speaker.state_dict())):
        run.mkdir()
        save_file(tensors, str(run / "weights.safetensors"))
    monkeypatch.setattr(codec_training, "load_answers", lambda corpus: bank)
    monkeypatch.setattr(codec_training, "is_dev", lambda clip: clip is bank.clips[0])
    monkeypatch.setattr(codec_training, "Evaluation", lambda *arguments: lambda *more: {})
    monkeypatch.setattr(codec_training, "Discriminators", lambda: Discriminators((2,), (256,)))
    monkeypatch.setattr(codec_training, "SAID_OFFSETS", 2)
    losses = {"discriminator_rate": 1e-3, "adversarial_from": 0.5, "bfloat16_from": 2.0, "head_start": 0}
    options = settings(start, **losses, batch=4, tts=spoken if with_speech else None, tts_share=0.5, clips=None)
    options.resume, options.freeze_codes = start / "codec", True
    codec_training.train(options)
    assert steps == [STEPS - 1]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: float(x.sum()),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0, 2.0]) + x[:2],
        lambda x: torch.repeat_interleave(x, (x > 0).long()),
    ],
)
def test_what_would_wait_is_caught(step: Any) -> None:
    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        step(torch.arange(3.0))
