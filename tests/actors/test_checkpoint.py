"""Checkpoint folders: what is found, what is filled in, and what is said about a wrong one."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nemo_source import nemo_config

from vcpipe.actors.checkpoint import geometry, is_random, load_tokenizer, read_config, resolve_checkpoint
from vcpipe.actors.defaults import DEFAULTS
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.geometry import FrameGeometry

TINY = Path(__file__).parents[1] / "data" / "tiny" / "bf16"


@pytest.fixture
def tiny() -> dict[str, Any]:
    return json.loads((TINY / "config.json").read_text(encoding="utf-8"))


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def put(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    node = config
    for key in parents:
        node = node[key]
    node[last] = value
    return config


# ---------------------------------------------------------------------------------------------- runtime configs
def test_tiny_config_keeps_its_own_values(tiny: dict[str, Any]) -> None:
    config = read_config(TINY)
    assert config["text_config"]["hidden_size"] == 64
    assert config["audio_config"]["encoder"] | tiny["audio_config"]["encoder"] == config["audio_config"]["encoder"]
    assert config["tts_config"]["mog_head"]["num_predictions"] == 24
    assert config["rnnt_blank_id"] == 40
    assert config["rnnt_vocabulary"] == tiny["rnnt_vocabulary"]
    assert config["tts_config"]["num_iterations"] == 8  # not in the file
    assert config["audio_config"]["preprocessor"]["log_zero_guard_value"] == 2.0**-24
    assert geometry(config) == FrameGeometry() and not is_random(config)


def test_missing_sections_take_the_values_of_voicechat(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {"model_type": "nemotron_voicechat", "text_config": None, "unknown": [1]}))
    assert config["audio_config"]["decoder"]["vocab_size"] == 1024
    assert config["audio_config"]["joint"]["num_classes"] == 1024
    assert config["audio_config"]["encoder"]["att_context_size"] == [[70, 0]]
    assert config["text_config"]["hybrid_override_pattern"].count("M") == 27
    assert config["unknown"] == [1]
    assert {key: config[key] for key in DEFAULTS} == DEFAULTS


def test_defaults_are_not_shared_between_configs(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model_type": "nemotron_voicechat"})
    read_config(folder)["codec_config"]["downsample_rates"].append(2)
    assert read_config(folder)["codec_config"]["downsample_rates"] == [7, 7, 9]


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("{}", [0.0, math.inf]),
        ('{"time_step_min": 0.001, "time_step_max": 0.1}', [0.0, math.inf]),
        ('{"time_step_limit": [0.0, Infinity]}', [0.0, math.inf]),
        ('{"time_step_limit": [0.0, {"__float__": "Infinity"}]}', [0.0, math.inf]),
        ('{"time_step_limit": [0.01, 10]}', [0.01, 10.0]),
    ],
)
def test_time_step_limit_in_every_spelling(tmp_path: Path, text: str, limit: list[float]) -> None:
    folder = write(tmp_path, f'{{"model_type": "nemotron_voicechat", "text_config": {text}}}')
    assert read_config(folder)["text_config"]["time_step_limit"] == limit


@pytest.mark.parametrize(
    "given",
    [
        {"hybrid_override_pattern": "M-*M-"},
        {"hybrid_override_pattern": list("M-*M-")},
        {"layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"]},
    ],
)
def test_pattern_in_every_spelling(tmp_path: Path, given: dict[str, Any]) -> None:
    text = read_config(write(tmp_path, {"model_type": "nemotron_voicechat", "text_config": given}))["text_config"]
    assert text["hybrid_override_pattern"] == "M-*M-"
    assert text["num_hidden_layers"] == 5


def test_alternative_names_of_state_sizes(tmp_path: Path, tiny: dict[str, Any]) -> None:
    text = tiny["text_config"]
    text["mamba_state_dim"], text["mamba_num_groups"] = text.pop("ssm_state_size"), text.pop("n_groups")
    filled = read_config(write(tmp_path, tiny))["text_config"]
    assert (filled["ssm_state_size"], filled["n_groups"]) == (32, 2)


def test_flat_context_and_identical_quantization_config(tmp_path: Path, tiny: dict[str, Any]) -> None:
    put(tiny, "audio_config.encoder.att_context_size", [6, 0])
    tiny["quantization_config"] = {"bits": 8, "group_size": 64, "stt_model.lm_head": False}
    config = read_config(write(tmp_path, tiny))
    assert config["audio_config"]["encoder"]["att_context_size"] == [[6, 0]]
    assert config["quantization"] == tiny["quantization_config"]


@pytest.mark.parametrize("pieces", [["<unk>", "a", "b"], {"b": 2, "<unk>": 0, "a": 1}])
def test_transcript_vocabulary_from_its_own_file(tmp_path: Path, tiny: dict[str, Any], pieces: Any) -> None:
    del tiny["rnnt_vocabulary"]
    write(tmp_path, tiny)
    (tmp_path / "rnnt_tokenizer").mkdir()
    (tmp_path / "rnnt_tokenizer" / "vocab.json").write_text(json.dumps(pieces))
    assert read_config(tmp_path)["rnnt_vocabulary"] == ["<unk>", "a", "b"]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model_type", "nemotron_h", "model_type 'nemotron_h'; accepted: 'nemotron_voicechat'"),
        ("text_config.hybrid_override_pattern", "M-M?-M*-", "block 3 .* is '?'; accepted: M (Mamba-2), * (attention)"),
        ("text_config.hybrid_override_pattern", ["M", "E"], "block 1 .* is 'E'"),
        ("text_config.layers_block_type", 5, None),
        ("text_config.time_step_limit", [1], "time_step_limit must be two numbers"),
        ("text_config.hidden_size", "64", "text_config.hidden_size must be an integer, not '64'"),
        ("text_config", [], "text_config must be an object"),
        ("text_config.hidden_size", 32, "audio_config.output_dim is 64 and text_config.hidden_size is 32"),
        ("codec_config.sample_rate", 24000, "output_sample_rate is 22050 Hz, codec_config.sample_rate 24000 Hz"),
        ("codec_config.downsample_rates", [7, 7, 8], "makes 1568 samples .* 0.08 s at 22050 Hz are 1764"),
        ("codec_config.num_quantizers", 30, "tts_config.num_quantizers is 31 and codec_config.num_quantizers is 30"),
        ("frame_duration", 0.1, "one encoder frame takes 1280 samples .* has 1600"),
        ("frame_duration", 0, "must be positive"),
        ("input_sample_rate", 8000, "input_sample_rate is 8000 Hz, audio_config.preprocessor.sample_rate 16000 Hz"),
        ("audio_config.preprocessor.window_stride", 0.02, "one encoder frame takes 2560 samples"),
        ("audio_config.encoder.subsampling_factor", 4, "one encoder frame takes 640 samples"),
        ("audio_config.encoder.att_context_size", [[70, 6]], "must look at no later frame"),
        ("audio_config.encoder.att_context_size", [["a"]], "must be pairs of integers"),
        ("speaker", "Bob", "speaker 'Bob' is unknown; accepted: Aria"),
        ("quantization", 4, "quantization must be an object"),
        ("quantization", {"bits": 7, "group_size": 64}, "has bits 7; accepted: 2, 3, 4, 5, 6, 8"),
        ("quantization", {"bits": 4}, "has group_size None; accepted: 32, 64, 128"),
        ("quantization", {"bits": 4, "group_size": 64, "x": {"mode": "mxfp4"}}, "x is quantised with mode 'mxfp4'"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, tiny: dict[str, Any], path: str, value: Any, words: str | None) -> None:
    folder = write(tmp_path, put(tiny, path, value))
    if words is None:  # a second spelling that the first one makes superfluous
        assert read_config(folder)["text_config"]["hybrid_override_pattern"] == "M-M*-M*-"
        return
    pattern = ".*".join(part.translate({ord(c): "\\" + c for c in "()*?[]."}) for part in words.split(" .* "))
    with pytest.raises(ConfigError, match=pattern):
        read_config(folder)


@pytest.mark.parametrize(("text", "words"), [("{}", "is empty"), ("[1]", "is empty"), ("{", "is not JSON")])
def test_an_empty_or_broken_config_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(write(tmp_path, text))


# ---------------------------------------------------------------------------------------------- NeMo configs
def test_nemo_config_says_the_same(tmp_path: Path, tiny: dict[str, Any]) -> None:
    put(tiny, "tts_config.sliding_window_pattern", 6)  # a constant of the model, in no NeMo config
    put(tiny, "audio_config.max_symbols", 10)
    config = read_config(write(tmp_path, nemo_config(tiny)))
    wanted = read_config(write(tmp_path / "runtime", tiny))
    for key in DEFAULTS:
        assert config[key] == wanted[key] or key == "tts_config", key
    assert {key: config["tts_config"][key] for key in DEFAULTS["tts_config"]} == {
        key: wanted["tts_config"][key] for key in DEFAULTS["tts_config"]
    }
    assert "_target_" not in config["audio_config"]["encoder"]


def test_nemo_config_without_text_config_takes_the_base_model(tmp_path: Path, tiny: dict[str, Any]) -> None:
    source = nemo_config(tiny)
    del source["text_config"]
    put(source, "model.stt.model.perception.output_dim", 4480)
    assert read_config(write(tmp_path, source))["text_config"] == DEFAULTS["text_config"]


def test_nemo_config_of_an_early_mlx_conversion(tmp_path: Path, tiny: dict[str, Any]) -> None:
    source = nemo_config(tiny)
    entry = {"group_size": 64, "bits": 8}
    source["mlx_conversion"] = {"quantization": {**entry, "mode": "affine", "modules": {"stt_model.lm_head": entry}}}
    assert read_config(write(tmp_path, source))["quantization"] == {**entry, "stt_model.lm_head": entry}


def test_nemo_vocabulary_from_its_own_file(tmp_path: Path, tiny: dict[str, Any]) -> None:
    source = nemo_config(tiny)
    del source["_rnnt_merge_info"]["joint_config"]["vocabulary"]
    write(tmp_path, source)
    (tmp_path / "rnnt_tokenizer").mkdir()
    (tmp_path / "rnnt_tokenizer" / "vocab.json").write_text('["x", "y"]')
    assert read_config(tmp_path)["rnnt_vocabulary"] == ["x", "y"]


def test_an_incomplete_nemo_config_is_named(tmp_path: Path, tiny: dict[str, Any]) -> None:
    source = nemo_config(tiny)
    del source["model"]["speech_generation"]["model"]["codec_config"]["rates"]
    with pytest.raises(ConfigError, match="no model.speech_generation.model.codec_config.rates"):
        read_config(write(tmp_path, source))


# ---------------------------------------------------------------------------------------------- folders and names
def test_a_complete_folder_is_itself() -> None:
    assert resolve_checkpoint(str(TINY)) == TINY


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json; copy it there from nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
        ("model.safetensors", "no weights: expected"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, lost: str, words: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / lost).unlink()
    with pytest.raises(ConfigError, match=words):
        resolve_checkpoint(str(folder))
    if lost == "tokenizer.json":
        assert resolve_checkpoint(str(folder), needs_tokenizer=False) == folder
        with pytest.raises(ConfigError, match=words):
            load_tokenizer(folder)


@pytest.mark.parametrize(
    "name", ["./model", "/no/such/model", "../a/b", "model", "a/b/c", "~/nothing/here", "", "a/b/"]
)
def test_a_mistyped_path_is_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcpipe.actors.checkpoint._download", lambda name: pytest.fail(f"asked for {name}"))
    with pytest.raises(ConfigError, match="there is no folder .*; accepted: a checkpoint folder or a Hub name"):
        resolve_checkpoint(name)


def test_a_file_is_not_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match="is a file"):
        resolve_checkpoint(str(TINY / "config.json"))


def test_offline_and_not_in_the_cache(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads the environment when it is imported."""
    code = (
        "from vcpipe.actors.checkpoint import resolve_checkpoint\n"
        "from vcpipe.schemas.errors import ConfigError\n"
        "import sys\n"
        "assert not {'huggingface_hub', 'tokenizers', 'mlx.core'} & set(sys.modules), 'imported too early'\n"
        "try:\n    resolve_checkpoint('some/model')\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "there is no folder some/model, and some/model is not in the Hub's cache" in done.stdout


# ---------------------------------------------------------------------------------------------- tokenizer
def test_tokenizer_ids_and_text() -> None:
    tokenizer = load_tokenizer(TINY)
    ids = tokenizer.encode("be concise", add_special_tokens=False).ids
    assert ids == [324, 252, 331]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "be concise"
    assert tokenizer.get_vocab()["<SPECIAL_12>"] == 12


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json is not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parity
def test_ids_equal_those_of_transformers_whatever_the_regex_flag_says(
    tmp_path: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag of the public folders matters to transformers only above 100000 tokens, so the vocabulary is padded."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    data = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"]
    vocabulary.update({f"unused-{i}": i for i in range(len(vocabulary), 100_001)})
    write(tmp_path, tiny)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    settings = json.loads((TINY / "tokenizer_config.json").read_text()) | {"fix_mistral_regex": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    peer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = load_tokenizer(tmp_path)
    for text in ("Be concise!\n\nDon't  sayMore than 123.5 words, Übermensch 한국어 🙂", " leading", "<s>x</s>", ""):
        assert ours.encode(text, add_special_tokens=False).ids == peer.encode(text, add_special_tokens=False)
        ids = [*range(3, 60), *ours.encode(text, add_special_tokens=False).ids]
        assert ours.decode(ids, skip_special_tokens=False) == peer.decode(ids, skip_special_tokens=False)
