"""Converting folders: a NeMo-like source becomes one that every stage loads, with equal numbers."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from nemo_source import nemo_config

from vcpipe.actors import convert as convert_module
from vcpipe.actors.checkpoint import read_config, resolve_checkpoint
from vcpipe.actors.convert import convert
from vcpipe.actors.shards import INDEX_NAME, shard_files
from vcpipe.actors.stage import StageConfig
from vcpipe.schemas.errors import ConfigError

TINY = Path(__file__).parents[1] / "data" / "tiny"


def quiet(step: str, fraction: float) -> None:
    pass


def tensors_of(folder: Path) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for file in shard_files(folder):
        tensors |= mx.load(str(file))
    return tensors


@pytest.fixture
def nemo_source(tmp_path: Path) -> Path:
    """A folder as NVIDIA publishes it: NeMo config, one float32 file, no tokenizer."""
    folder = tmp_path / "nemo"
    folder.mkdir()
    runtime = json.loads((TINY / "bf16" / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(nemo_config(runtime)))
    wide = {
        name: value.astype(mx.float32) if value.dtype == mx.bfloat16 else value
        for name, value in tensors_of(TINY / "bf16").items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), wide)
    return folder


def load_every_stage(folder: Path) -> None:
    for stage in ("perception", "language", "tts", "codec"):
        actor = importlib.import_module(f"vcpipe.actors.{stage}.actor")
        assert actor.load(StageConfig(stage, folder), quiet).warnings == []


def test_a_nemo_folder_becomes_a_runtime_folder(tmp_path: Path, nemo_source: Path) -> None:
    steps: list[float] = []
    target = tmp_path / "out" / "converted"
    convert(nemo_source, target, tokenizer=TINY / "bf16", progress=lambda step, fraction: steps.append(fraction))
    converted, original = tensors_of(target), tensors_of(TINY / "bf16")
    assert converted.keys() == original.keys()
    for name, value in original.items():
        assert converted[name].dtype == value.dtype and mx.array_equal(converted[name], value), name
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "nemotron_voicechat" and "quantization" not in config
    assert read_config(target) == read_config(nemo_source)
    assert resolve_checkpoint(str(target)) == target
    assert steps[-1] == 1.0 and steps == sorted(steps)
    assert [path.name for path in target.parent.iterdir()] == ["converted"]
    load_every_stage(target)


def test_shards_are_bounded_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_module, "_SHARD_BYTES", 700_000)
    target = tmp_path / "converted"
    convert(TINY / "bf16", target, progress=quiet)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 1
    index = json.loads((target / INDEX_NAME).read_text())
    original = tensors_of(TINY / "bf16")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in original.values())
    for name, file in index["weight_map"].items():
        assert name in mx.load(str(target / file))
    assert index["weight_map"].keys() == original.keys()
    for file in files:
        large = [value.nbytes for value in mx.load(str(target / file)).values()]
        assert sum(large) <= 700_000 or len(large) == 1


def test_quantising_packs_the_language_model_only(tmp_path: Path) -> None:
    """The tiny 4-bit folder was quantised by the public tools: names, codes and config map must be the same."""
    target = tmp_path / "converted"
    convert(TINY / "bf16", target, bits=4, progress=quiet)
    converted, wanted = tensors_of(target), tensors_of(TINY / "q4")
    assert converted.keys() == wanted.keys()
    for name in wanted:
        if name.endswith(".scales"):
            for part in ("weight", "scales", "biases"):
                part_name = name.replace("scales", part)
                assert mx.array_equal(converted[part_name], wanted[part_name]), part_name
    written = json.loads((target / "config.json").read_text())
    wanted_config = json.loads((TINY / "q4" / "config.json").read_text())
    assert written["quantization"] == written["quantization_config"] == wanted_config["quantization"]
    load_every_stage(target)


def test_float32_stays_exact(tmp_path: Path, nemo_source: Path) -> None:
    target = tmp_path / "converted"
    convert(nemo_source, target, tokenizer=TINY / "bf16", dtype="float32", progress=quiet)
    converted = tensors_of(target)
    for name, value in tensors_of(nemo_source).items():
        assert converted[name].dtype == value.dtype and mx.array_equal(converted[name], value), name


def test_a_quantised_source_is_copied_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "converted"
    convert(TINY / "q4", target, progress=quiet)
    converted = tensors_of(target)
    for name, value in tensors_of(TINY / "q4").items():
        assert mx.array_equal(converted[name], value.astype(converted[name].dtype)), name
    assert read_config(target)["quantization"] == read_config(TINY / "q4")["quantization"]


def test_a_missing_tokenizer_is_named(tmp_path: Path, nemo_source: Path) -> None:
    for tokenizer in (None, tmp_path):
        with pytest.raises(ConfigError, match="no tokenizer.json; .* from nvidia/NVIDIA-Nemotron-Nano-9B-v2"):
            convert(nemo_source, tmp_path / "converted", tokenizer=tokenizer, progress=quiet)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("bf16", {"dtype": "int8"}, "dtype 'int8' is unknown; accepted: bfloat16, float32"),
        ("bf16", {"bits": 5}, "5 bits are not supported; accepted: 4, 8"),
        ("q4", {"bits": 8}, "is quantised already"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, source: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(TINY / source, tmp_path / "converted", progress=quiet, **options)


def test_an_existing_folder_is_refused_and_an_empty_one_taken(tmp_path: Path) -> None:
    target = tmp_path / "converted"
    target.mkdir()
    convert(TINY / "bf16", target, progress=quiet)
    before = sorted(path.name for path in target.iterdir())
    with pytest.raises(ConfigError, match="exists already; give a new or an empty folder"):
        convert(TINY / "q4", target, progress=quiet)
    assert sorted(path.name for path in target.iterdir()) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_aborted_run_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def stop(step: str, fraction: float) -> None:
        if fraction > 0.5:
            raise error

    with pytest.raises(error):
        convert(TINY / "bf16", tmp_path / "converted", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(ConfigError, match=r"has 0.0 GB free; the converted checkpoint takes 0.0 GB"):
        convert(TINY / "bf16", tmp_path / "converted", progress=quiet)
    assert list(tmp_path.iterdir()) == []
