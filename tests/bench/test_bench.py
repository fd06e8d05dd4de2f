"""The measurements on small models: every figure is there, ratios are what they say, bad input is one line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vcpipe.actors.checkpoint import load_tokenizer, read_config
from vcpipe.actors.stage import StageConfig
from vcpipe.bench.shapes import SHAPES, shape_config, write_checkpoint
from vcpipe.bench.soak import measure as measure_soak
from vcpipe.bench.target import Target
from vcpipe.bench.tensor_shapes import tensor_shapes
from vcpipe.schemas.geometry import STAGES

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "data" / "tiny" / "bf16"

SUMMARY = {"mean", "p50", "p95", "max", "first_tenth", "last_tenth"}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m vcpipe.bench ARGUMENTS``."""
    command = [sys.executable, "-m", "vcpipe.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def figures(*arguments: str) -> dict[str, Any]:
    done = bench(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(line)
    return result


# ------------------------------------------------------------------------------------------------ command line
def test_vcpipe_bench_hands_over() -> None:
    """Help, errors and exit codes are those of the measurements, under the name that was typed."""

    def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vcpipe", "bench", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = bench("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: vcpipe bench [OPTIONS] COMMAND")
    assert all(
        name in done.stdout for name in ("perception", "rnnt", "language", "tts", "codec", "pipeline", "hops", "soak")
    )
    done = bench("hops", "--frames", "many")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: vcpipe bench hops")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "a", "--shape", "tiny"), "not both"),
        (("--model", str(TINY), "--bits", "4"), "--bits belongs to --shape"),
        (("--shape", "tiny", "--bits", "5"), "cannot have 5 bits; accepted: 0, 4, 8"),
        (("--model", "no/such/folder/there"), "there is no folder"),
        (
            ("--plot", "/no/such/folder/a.png"),
            "--plot needs matplotlib" if not importlib.util.find_spec("matplotlib") else "cannot be written",
        ),
    ],
)
def test_a_users_mistake_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = bench("codec", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ------------------------------------------------------------------------------------------------ shapes
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_a_whole_config_with_its_tokenizer(shape: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shape, 4)
    config = read_config(tmp_path)
    vocabulary = load_tokenizer(tmp_path).get_vocab(with_added_tokens=True)
    assert sorted(vocabulary.values()) == list(range(config["text_config"]["vocab_size"]))
    assert sum(len(token) == 1 for token in vocabulary) == 256
    shapes = tensor_shapes(config)
    packed = {path: entry for path, entry in config["quantization"].items() if isinstance(entry, dict)}
    assert all(shapes[f"{path}.weight"][-1] % entry["group_size"] == 0 for path, entry in packed.items())
    matrices = [name for name, size in shapes.items() if name.startswith("stt_model.llm.") and len(size) == 2]
    assert {f"{path}.weight" for path in packed} == {
        *matrices,
        *(f"stt_model.{name}.weight" for name in ("embed_tokens", "lm_head", "function_head")),
    }


def test_the_full_shape_has_the_models_size() -> None:
    shapes = tensor_shapes(shape_config("11b", 0))
    count = 0
    for shape in shapes.values():
        size = 1
        for length in shape:
            size *= length
        count += size
    assert 10.5e9 < count < 11.5e9


def test_prompts_have_the_length_asked_for_and_differ() -> None:
    target = Target("tiny", TINY, random=False, device="cpu")
    (first, count), (second, _) = target.prompt(40, 0), target.prompt(40, 1)
    assert 40 <= count < 50
    assert first != second
    assert len(load_tokenizer(TINY).encode(first).ids) + 2 == count


@pytest.mark.parametrize("bits", [0, 4])
def test_random_weights_are_of_one_kind_and_finite(bits: int, tmp_path: Path) -> None:
    """Every stage is stepped by its warm-up; the language model's weights are packed as wanted."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    from vcpipe.bench import random_stage, random_weights

    write_checkpoint(tmp_path, "tiny", bits)
    config = read_config(tmp_path)
    made: dict[str, Any] = {}

    def keep(module: nn.Module, root: str, *rest: Any) -> None:
        random_weights.fill(module, root, *rest)
        made.update({root + name: value for name, value in tree_flatten(module.parameters())})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_stage, "fill", keep)
        for name in STAGES:
            stage = random_stage.load(StageConfig(name, tmp_path, "cpu"), lambda step, fraction: None)
            assert stage.warnings == []
    floats = {name: value for name, value in made.items() if mx.issubdtype(value.dtype, mx.floating)}
    assert {name for name, value in floats.items() if value.dtype != mx.bfloat16} == {
        name for name in made if name.endswith("A_log")
    }
    assert all(bool(mx.isfinite(value).all()) for value in floats.values())
    packed = {name.removesuffix(".scales") for name in made if name.endswith(".scales")}
    assert packed == {path for path, entry in (config["quantization"] or {}).items() if isinstance(entry, dict)}
    assert made["tts_model.control_codes"].tolist() == [64, 65, 66]


# ------------------------------------------------------------------------------------------------ measurements
@pytest.mark.process
def test_hops() -> None:
    result = figures("hops", "--frames", "20", "--warm", "2")
    assert result["frames"] == 20
    assert set(result["hop_ms"]) == {*STAGES, "coordinator"}
    assert 0 < result["min_ms"] <= result["p50_ms"] <= result["p95_ms"] <= result["max_ms"]
    assert result["mean_ms"] == pytest.approx(sum(hop["mean"] for hop in result["hop_ms"].values()), abs=0.01)
    assert 0 < result["floor_p50_ms"] <= result["floor_p95_ms"]
    # What is not a hop is the steps themselves, which do nothing.
    assert result["mean_ms"] < result["end_to_end_ms"]["mean"]


@pytest.mark.process
@pytest.mark.parametrize("part", ["rnnt", "tts"])
def test_a_stage(part: str) -> None:
    result = figures(part, "--shape", "tiny", "--frames", "8", "--warm", "1", "--rounds", "2", "--device", "cpu")
    assert (result["bench"], result["model"], result["device"], result["dtype"]) == (part, "tiny", "cpu", "bfloat16")
    assert set(result["frame_ms"]) == SUMMARY
    assert result["frame_ms"]["mean"] <= result["step_ms"]["mean"]
    assert result["frames_per_s"] == pytest.approx(1e3 / result["frame_ms"]["p50"], rel=1e-3)
    assert result["realtime_factor"] == pytest.approx(result["frame_ms"]["p50"] / 80, abs=1e-3)
    assert 0 < result["memory"]["mlx_mb"] <= result["memory"]["mlx_peak_mb"]


@pytest.mark.process
def test_a_checkpoint_without_a_transcript_has_no_rnnt(tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8")) | {"rnnt_vocabulary": []}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(TINY / name)
    done = bench("rnnt", "--model", str(tmp_path), "--frames", "2", "--rounds", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the checkpoint has no rnnt_vocabulary" in done.stderr


@pytest.mark.process
def test_a_long_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stages that compute nothing, to be quick."""
    monkeypatch.setattr("vcpipe.bench.target._RANDOM", "vcpipe.bench.null_stages")
    measured = measure_soak(Target("null", TINY, random=True, device="cpu"), 310)
    result = measured.result
    assert result["p95_ratio"] == pytest.approx(result["frame_p95_late_ms"] / result["frame_p95_early_ms"], rel=0.02)
    assert set(result["stages"]) == set(result["memory_mb"]) == set(result["memory_slope_kb_per_frame"]) == set(STAGES)
    assert all(0 < first <= 1.5 * last for first, last in result["memory_mb"].values())
    assert result["mlx_mb"].keys() <= set(STAGES)
    assert len(measured.frame_ms["all stages"]) == 310


@pytest.mark.process
def test_a_bounded_history_reaches_the_stage_and_its_figures() -> None:
    arguments = ("--model", str(TINY), "--frames", "20", "--warm", "1", "--rounds", "1", "--device", "cpu")
    bounded = figures("tts", *arguments, "--tts-history-frames", "8")
    unbounded = figures("tts", *arguments)
    assert bounded["tts_history_frames"] == 8 and "tts_history_frames" not in unbounded
    assert bounded["memory"]["mlx_mb"] < unbounded["memory"]["mlx_mb"]


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("tts", ("--tts-history-frames", "0"), "tts_history_frames must be an integer from 1 to 2147483647, not 0"),
        ("soak", ("--tts-history-frames", "-5"), "not -5"),
        ("pipeline", ("--tts-history-frames", "125", "--peer"), "--tts-history-frames does not go with --peer"),
        ("tts", ("--tts-history-frames", "125", "--peer"), "--tts-history-frames does not go with --peer"),
    ],
)
def test_a_bad_history_is_one_line(command: str, arguments: tuple[str, ...], words: str) -> None:
    done = bench(command, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.process
@pytest.mark.parity
def test_the_pipeline_beside_the_peer(tmp_path: Path) -> None:
    for package in ("mlx_vlm", "mlx_audio"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    arguments = [
        "pipeline",
        "--shape",
        "tiny",
        "--bits",
        "4",
        "--peer",
        "--frames",
        "6",
        "--warm",
        "2",
        "--rounds",
        "1",
    ]
    result = figures(*arguments, "--prompt-tokens", "5", "--device", "cpu")
    peer, wall = result["peer"], result["wall_clock"]
    assert (result["language_bits"], peer["device"], peer["mlx_vlm"]) == (4, "cpu", "0.7.10")
    assert result["frames_with_the_peers_codes"] == 1.0
    assert result["ratio_frames_per_s"] == pytest.approx(result["frames_per_s"] / peer["frames_per_s"], abs=1e-3)
    assert result["ratio_p95_latency"] == pytest.approx(wall["latency_ms"]["p95"] / peer["frame_ms"]["p95"], abs=1e-3)
    opened = result["session_open"]
    assert result["ratio_session_open"] == pytest.approx(opened["warm_ms"] / peer["session_open_ms"], abs=1e-3)
    assert opened["prompt_tokens"] >= 5
    assert set(result["stage_ms"]) == {*STAGES, "rnnt"}
    assert set(result["memory"]) == set(STAGES)
    assert all(memory["rss_mb"] > 0 for memory in result["memory"].values())
    assert 0 <= wall["late_frames"] <= 6


def test_without_the_peer_it_says_what_to_install(tmp_path: Path) -> None:
    """A package of that name that cannot be imported stands in for none."""
    (tmp_path / "mlx_vlm").mkdir()
    (tmp_path / "mlx_vlm" / "__init__.py").write_text("raise ImportError('not here')\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        done = bench("pipeline", "--shape", "tiny", "--peer")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--peer needs mlx-vlm" in done.stderr and "vcpipe[peer]" in done.stderr


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from vcpipe.bench.plot import draw
    from vcpipe.bench.report import Measured

    facts = {"bench": "pipeline", "model": "tiny", "device": "cpu", "mlx": "0"}
    draw(Measured(facts, {"tts": (10.0, 20.0)}, {"vcpipe": [9.0, 10.0, 20.0]}), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.process
def test_memory_does_not_grow_beside_the_caches() -> None:
    """Real stages over 1,500 frames; buffers of keys and values double in that time, by a few MB."""
    result = measure_soak(Target("tiny", TINY, random=False, device="cpu"), 1500).result
    grown_mb = {stage: last - first for stage, (first, last) in result["memory_mb"].items()}
    assert all(grown < 12 for grown in grown_mb.values()), grown_mb
