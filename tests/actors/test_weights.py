"""Loading a stage: only its own tensors, in either layout and either naming, quantised or not, and checked."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from vcpipe.actors import weights as weights_module
from vcpipe.actors.shards import list_tensors, runtime_name, unclaimed_names
from vcpipe.actors.stage import StageConfig
from vcpipe.actors.weights import LoadReport, load_stage
from vcpipe.schemas.errors import ConfigError, WeightsError

TINY = Path(__file__).parents[1] / "data" / "tiny"
STAGES = ("perception", "language", "tts", "codec")


def quiet(step: str, fraction: float) -> None:
    pass


def edited(tmp_path: Path, edit: Callable[[dict[str, mx.array]], None], source: str = "bf16") -> Path:
    """A copy of a tiny checkpoint, in one file, after ``edit`` of its tensors."""
    folder = tmp_path / "edited"
    shutil.copytree(TINY / source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, mx.array] = {}
    for file in sorted((TINY / source).glob("*.safetensors")):
        tensors |= mx.load(str(file))
    edit(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


class Heads(nn.Module):
    """The two vocabulary heads of the tiny model."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(64, 384, bias=False)
        self.function_head = nn.Linear(64, 384, bias=False)


def load_heads(folder: Path, **options: Any) -> tuple[Heads, LoadReport]:
    module = Heads()
    names = ("lm_head.", "function_head.")
    report = load_stage(
        module, folder, stage="heads", root="stt_model.", names=names, kernels={}, progress=quiet, **options
    )
    return module, report


class Prediction(nn.Module):
    """The recurrent part of the RNN-T prediction network."""

    def __init__(self) -> None:
        super().__init__()
        self.rnnt_decoder = {"prediction": {"dec_rnn": {"lstm": [nn.LSTM(16, 16), nn.LSTM(16, 16)]}}}


def load_prediction(folder: Path) -> dict[str, mx.array]:
    module = Prediction()
    names = ("rnnt_decoder.prediction.dec_rnn.",)
    load_stage(module, folder, stage="lstm", root="stt_model.", names=names, kernels={}, progress=quiet)
    return {name.rpartition("lstm.")[2]: value for name, value in tree_flatten(module.parameters())}


# ---------------------------------------------------------------------------------------------- whole stages
@pytest.mark.parametrize("checkpoint", ["bf16", "q4"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_loads_both_tiny_checkpoints(stage: str, checkpoint: str) -> None:
    steps: list[float] = []
    actor = importlib.import_module(f"vcpipe.actors.{stage}.actor")
    loaded = actor.load(StageConfig(stage, TINY / checkpoint), lambda step, fraction: steps.append(fraction))
    assert loaded.name == stage
    assert loaded.warnings == []
    assert steps[0] == 0.0 and steps[-1] == 1.0 and steps == sorted(steps)


def test_every_name_belongs_to_a_stage() -> None:
    names = list(list_tensors(TINY / "q4"))
    assert unclaimed_names(names) == []
    assert unclaimed_names(["stt_model.asr.weight", *names, "visual.proj"]) == ["stt_model.asr.weight", "visual.proj"]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count bytes read")
def test_only_the_stage_is_read() -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    stored = list_tensors(TINY / "bf16")
    file = TINY / "bf16" / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    own = sum(info.nbytes for name, info in stored.items() if "_head." in name)
    others = sum(info.nbytes for info in stored.values()) - own
    before = bytes_read()
    load_heads(TINY / "bf16")
    read = bytes_read() - before
    # The header is read twice (by us and by MLX), config.json once; nothing else.
    assert own <= read <= own + 2 * header + 64_000
    assert read < others / 3


def test_weights_are_evaluated_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_BATCH_BYTES", 50_000)  # a head has 49152
    steps: list[tuple[str, float]] = []
    load_stage(
        Heads(),
        TINY / "bf16",
        stage="heads",
        root="stt_model.",
        names=("lm_head.", "function_head."),
        kernels={},
        progress=lambda step, fraction: steps.append((step, fraction)),
    )
    assert [fraction for _, fraction in steps] == [0.0, 0.5, 1.0]


def test_dtypes_stay_and_bytes_are_counted() -> None:
    module, report = load_heads(TINY / "bf16")
    stored = mx.load(str(TINY / "bf16" / "model.safetensors"))
    assert module.lm_head.weight.dtype == mx.bfloat16
    assert mx.array_equal(module.lm_head.weight, stored["stt_model.lm_head.weight"])
    assert report == LoadReport([], 2 * 384 * 64 * 2)


# ---------------------------------------------------------------------------------------------- names
def test_lstm_biases_are_summed_and_both_namings_load(tmp_path: Path) -> None:
    stem = "stt_model.rnnt_decoder.prediction.dec_rnn.lstm."
    stored = mx.load(str(TINY / "bf16" / "model.safetensors"))
    renamed = load_prediction(TINY / "bf16")
    assert mx.array_equal(renamed["1.Wx"], stored[stem + "weight_ih_l1"])
    assert mx.array_equal(renamed["0.Wh"], stored[stem + "weight_hh_l0"])
    assert mx.array_equal(renamed["1.bias"], stored[stem + "bias_ih_l1"] + stored[stem + "bias_hh_l1"])

    def to_runtime(tensors: dict[str, mx.array]) -> None:
        for name in [name for name in tensors if name.startswith(stem)]:
            del tensors[name]
        tensors.update({stem + name: value for name, value in renamed.items()})

    again = load_prediction(edited(tmp_path, to_runtime))
    assert all(mx.array_equal(again[name], renamed[name]) for name in renamed)


def test_half_a_bias_is_an_error(tmp_path: Path) -> None:
    lost = "stt_model.rnnt_decoder.prediction.dec_rnn.lstm.bias_hh_l1"
    with pytest.raises(WeightsError, match=r"lstm: .*lstm.1.bias cannot be made of .*bias_ih_l1"):
        load_prediction(edited(tmp_path, lambda tensors: tensors.pop(lost)))


@pytest.mark.parametrize(
    ("stored", "running"),
    [
        ("tts_model._control_codes", "tts_model.control_codes"),
        (
            "tts_model.audio_codec.prvq._variance_list.3.variance",
            "tts_model.audio_codec.prvq.variance_list.3.variance",
        ),
        ("backbone.layers.4.mixer.D", "stt_model.llm.layers.4.mixer.D"),
        ("backbone.embeddings.weight", "stt_model.embed_tokens.weight"),
        ("stt_model.llm.backbone.norm_f.weight", "stt_model.llm.norm_f.weight"),
        ("lm_head.scales", "stt_model.lm_head.scales"),
        ("tts_model.tts_model.backbone.norm.weight", "tts_model.tts_model.backbone.norm.weight"),
        ("stt_model.perception.encoder.layers.0.self_attn.pos_bias_u", None),
    ],
)
def test_known_renames(stored: str, running: str | None) -> None:
    assert runtime_name(stored) == (running or stored)


def test_language_loads_from_flat_names_of_its_base_model(tmp_path: Path) -> None:
    def flatten(tensors: dict[str, mx.array]) -> None:
        for name in list(tensors):
            flat = name.replace("stt_model.llm.", "backbone.").replace(
                "stt_model.embed_tokens.", "backbone.embeddings."
            )
            flat = flat.replace("stt_model.lm_head.", "lm_head.")
            tensors[flat] = tensors.pop(name)

    actor = importlib.import_module("vcpipe.actors.language.actor")
    assert actor.load(StageConfig("language", edited(tmp_path, flatten)), quiet).warnings == []


def test_error_lists_a_few_missing_unexpected_and_homeless_names(tmp_path: Path) -> None:
    def rename(tensors: dict[str, mx.array]) -> None:
        for name in [name for name in tensors if name.startswith("stt_model.llm.")]:
            tensors[name.replace("stt_model.llm.", "language_model.")] = tensors.pop(name)
        tensors["stt_model.lm_head.bias"] = mx.zeros((384,))

    actor = importlib.import_module("vcpipe.actors.language.actor")
    with pytest.raises(WeightsError) as caught:
        actor.load(StageConfig("language", edited(tmp_path, rename)), quiet)
    message = str(caught.value)
    assert message.startswith("language: ")
    assert "missing (stt_model.llm.layers.0.mixer.A_log, " in message and "more)" in message
    assert "1 unexpected (stt_model.lm_head.bias)" in message
    assert "of no stage (language_model.layers.0.mixer.A_log, " in message
    assert len(message) < 700


def test_tensors_of_no_stage_are_told_once(tmp_path: Path) -> None:
    folder = edited(tmp_path, lambda tensors: tensors.update({"vision.weight": mx.ones((2, 2))}))
    warnings = []
    for stage in ("language", "codec"):
        actor = importlib.import_module(f"vcpipe.actors.{stage}.actor")
        warnings += actor.load(StageConfig(stage, folder), quiet).warnings
    assert warnings == ["language: ignored tensors of no stage: vision.weight"]


# ---------------------------------------------------------------------------------------------- kernels
class Kernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv1d(4, 6, 3)  # (6, 3, 4)
        self.image = nn.Conv2d(2, 6, 3)  # (6, 3, 3, 2)
        self.up = nn.ConvTranspose1d(4, 6, 5)  # (6, 5, 4)
        self.square = nn.Conv1d(3, 6, 3)  # (6, 3, 3): both layouts fit
        self.low_mat = mx.zeros((6, 3, 4))


@pytest.mark.parametrize("layout", ["pytorch", "mlx"])
def test_kernels_in_either_layout(tmp_path: Path, layout: str) -> None:
    wanted = Kernels()
    wanted.low_mat = mx.random.normal((6, 3, 4))
    runtime = dict(tree_flatten(wanted.parameters()))
    stored = dict(runtime)
    if layout == "pytorch":
        stored["plain.weight"] = runtime["plain.weight"].transpose(0, 2, 1)
        stored["image.weight"] = runtime["image.weight"].transpose(0, 3, 1, 2)
        stored["up.weight"] = runtime["up.weight"].transpose(2, 0, 1)
    stored["square.weight"] = runtime["square.weight"].transpose(0, 2, 1)  # PyTorch's wins where both fit
    shutil.copy(TINY / "bf16" / "config.json", tmp_path)
    mx.save_safetensors(
        str(tmp_path / "x.safetensors"), {f"root.net.{name}": mx.contiguous(v) for name, v in stored.items()}
    )
    module = nn.Module()
    module.net = Kernels()
    load_stage(
        module,
        tmp_path,
        stage="kernels",
        root="root.",
        names=("net.",),
        kernels={"net.up.weight": "conv_transpose1d", "net.image.*": "conv2d", "net.[ps]*.weight": "conv1d"},
        progress=quiet,
    )
    for name, value in tree_flatten(module.net.parameters()):
        assert mx.array_equal(value, runtime[name]), name


def test_another_shape_is_named(tmp_path: Path) -> None:
    def crop(tensors: dict[str, mx.array]) -> None:
        tensors["stt_model.lm_head.weight"] = tensors["stt_model.lm_head.weight"][:100]
        tensors["stt_model.function_head.weight"] = mx.zeros((384, 64), mx.int32)

    with pytest.raises(WeightsError) as caught:
        load_heads(edited(tmp_path, crop))
    assert "stt_model.lm_head.weight (100, 64), expected (384, 64)" in str(caught.value)
    assert "stt_model.function_head.weight of mlx.core.int32, expected mlx.core.float32" in str(caught.value)


# ---------------------------------------------------------------------------------------------- quantised modules
def test_modules_with_scales_are_quantised() -> None:
    module, report = load_heads(TINY / "q4")
    assert isinstance(module.lm_head, nn.QuantizedLinear)
    assert (module.lm_head.bits, module.lm_head.group_size) == (4, 64)
    assert module.lm_head.scales.dtype == mx.bfloat16 and module.lm_head.weight.dtype == mx.uint32
    assert report.warnings == []


def quantise_head(bits: int, group_size: int = 64) -> Callable[[dict[str, mx.array]], None]:
    def edit(tensors: dict[str, mx.array]) -> None:
        path = "stt_model.function_head"
        packed = mx.quantize(tensors[f"{path}.weight"], group_size=group_size, bits=bits)
        tensors.update(
            {f"{path}.{part}": value for part, value in zip(("weight", "scales", "biases"), packed, strict=True)}
        )

    return edit


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (4, 32), (6, 32), (3, 64)])
def test_bits_and_groups_come_from_the_shapes(tmp_path: Path, bits: int, group_size: int) -> None:
    module, report = load_heads(edited(tmp_path, quantise_head(bits, group_size)))
    assert (module.function_head.bits, module.function_head.group_size) == (bits, group_size)
    assert type(module.lm_head) is nn.Linear
    assert report.warnings == []
    x = mx.random.normal((2, 64))
    exact = x @ mx.load(str(TINY / "bf16" / "model.safetensors"))["stt_model.function_head.weight"].T
    assert mx.abs(module.function_head(x) - exact).max() < 3.5 * 2.0 ** (4 - bits)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"bits": 4, "group_size": 64}, "{'bits': 4, 'group_size': 64}"),
        ({"bits": 4, "group_size": 64, "stt_model.function_head": False}, "not quantised"),
        ({"bits": 8, "group_size": 64, "stt_model.function_head": {"bits": 4}}, "{'bits': 4, 'group_size': 64}"),
        ({"bits": 4, "group_size": 64, "stt_model.function_head": {"bits": 8}}, None),
        ({"bits": 8, "group_size": 64, "stt_model.lm_head": False}, None),
    ],
)
def test_what_is_stored_holds_and_a_contradiction_is_told(
    tmp_path: Path, said: dict[str, Any], told: str | None
) -> None:
    folder = edited(tmp_path, quantise_head(8))
    config = json.loads((folder / "config.json").read_text()) | {"quantization": said}
    (folder / "config.json").write_text(json.dumps(config))
    module, report = load_heads(folder)
    assert module.function_head.bits == 8
    stored = "heads: stt_model.function_head is stored as {'bits': 8, 'group_size': 64}, which holds; the config says "
    assert report.warnings == ([] if told is None else [stored + told])


def test_a_weight_that_is_read_raw_is_dequantised(tmp_path: Path) -> None:
    folder = edited(tmp_path, quantise_head(8))
    module, report = load_heads(folder, dense=("function_head.*",))
    stored = mx.load(str(folder / "model.safetensors"))
    packed = [stored[f"stt_model.function_head.{part}"] for part in ("weight", "scales", "biases")]
    assert type(module.function_head) is nn.Linear
    assert mx.array_equal(module.function_head.weight, mx.dequantize(*packed, group_size=64, bits=8))
    assert report.warnings == ["heads: dequantised, as the network reads them raw: stt_model.function_head"]


def test_one_more_quantised_module_in_another_stage(tmp_path: Path) -> None:
    """A converter that packed a projection of perception, too: it loads and runs."""

    def quantise(tensors: dict[str, mx.array]) -> None:
        path = "stt_model.perception.encoder.layers.1.feed_forward1.linear2"
        packed = mx.quantize(tensors[f"{path}.weight"], group_size=64, bits=4)
        tensors.update(
            {f"{path}.{part}": value for part, value in zip(("weight", "scales", "biases"), packed, strict=True)}
        )

    actor = importlib.import_module("vcpipe.actors.perception.actor")
    stage = actor.load(StageConfig("perception", edited(tmp_path, quantise)), quiet)
    assert stage.warnings == []
    stage.warm_up()


@pytest.mark.parametrize("lost", ["weight", "biases"])
def test_scales_alone_are_an_error(tmp_path: Path, lost: str) -> None:
    folder = edited(tmp_path, lambda tensors: tensors.pop(f"stt_model.lm_head.{lost}"), "q4")
    with pytest.raises(WeightsError, match="stt_model.lm_head.scales lacks the weight or the biases"):
        load_heads(folder)


# ---------------------------------------------------------------------------------------------- broken values
def test_a_zeroed_layer_is_a_warning_naming_it(tmp_path: Path) -> None:
    path = "stt_model.llm.layers.1.mixer.up_proj.weight"
    folder = edited(tmp_path, lambda tensors: tensors.update({path: mx.zeros_like(tensors[path])}))
    actor = importlib.import_module("vcpipe.actors.language.actor")
    stage = actor.load(StageConfig("language", folder), quiet)
    assert stage.warnings == [f"language: tensors that are zero throughout: {path}"]


def test_a_quantised_zero_layer_is_a_warning_too(tmp_path: Path) -> None:
    def zero(tensors: dict[str, mx.array]) -> None:
        tensors["stt_model.function_head.weight"] = mx.zeros((384, 64), mx.bfloat16)
        quantise_head(4)(tensors)

    _, report = load_heads(edited(tmp_path, zero))
    assert report.warnings == ["heads: tensors that are zero throughout: stt_model.function_head.biases"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_an_error_naming_the_tensor(tmp_path: Path, value: float) -> None:
    def poison(tensors: dict[str, mx.array]) -> None:
        weight = np.array(tensors["stt_model.function_head.weight"].astype(mx.float32))
        weight[200, 33] = value
        tensors["stt_model.function_head.weight"] = mx.array(weight).astype(mx.bfloat16)

    with pytest.raises(WeightsError, match="heads: NaN or infinite values in stt_model.function_head.weight"):
        load_heads(edited(tmp_path, poison))


# ---------------------------------------------------------------------------------------------- files
def test_index_names_the_files_and_a_consolidated_copy_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY / "q4", folder)
    (folder / "other.safetensors").write_bytes(b"not read")
    load_heads(folder)
    (folder / "other.safetensors").unlink()
    (folder / "consolidated.safetensors").write_bytes(b"not read")
    (folder / "model.safetensors.index.json").unlink()
    load_heads(folder)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY / "q4", folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks model-00002-of-00002.safetensors, .* the download is not complete"):
        load_heads(folder)


@pytest.mark.parametrize(("size", "words"), [(3_000_000, "is cut short: 3000000 bytes"), (5, "or only its beginning")])
def test_a_cut_file_is_named(tmp_path: Path, size: int, words: str) -> None:
    shutil.copytree(TINY / "bf16", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(WeightsError, match=words):
        load_heads(tmp_path / "model")
