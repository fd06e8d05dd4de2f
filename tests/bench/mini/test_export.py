"""Parts of several runs become one checkpoint, or an error that names what does not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from vcpipe.actors.checkpoint import is_random, load_tokenizer, read_config
from vcpipe.actors.shards import list_tensors
from vcpipe.bench.mini.apart import take_apart
from vcpipe.bench.mini.export import ROOTS, check, export, part_of
from vcpipe.bench.mini.peer_check import compare
from vcpipe.bench.mini.tokens import write_tokenizer
from vcpipe.bench.shapes import shape_config
from vcpipe.bench.tensor_shapes import Shapes, tensor_shapes
from vcpipe.schemas.errors import WeightsError

REPLIES = ["It is eleven.", "After Monday comes Tuesday."]
NO_RUNS: dict[str, Path | None] = dict.fromkeys(ROOTS)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    folder = tmp_path / "start"
    folder.mkdir()
    config = shape_config("tiny", write_tokenizer(folder, REPLIES))
    del config["vcpipe"]  # which calls it random
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def shapes(start: Path) -> Shapes:
    return tensor_shapes(read_config(start))


def write_run(folder: Path, part: str, shapes: Shapes, **changes: mx.array | None) -> Path:
    """A run of ``part``, names below its first root: every tensor holds small random numbers."""
    root = ROOTS[part][0]
    mx.random.seed(len(part))
    tensors = {
        name.removeprefix(root): mx.random.normal(shape) * 0.1
        for name, shape in shapes.items()
        if part_of(name) == part
    }
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    folder.mkdir()
    mx.save_safetensors(str(folder / "weights.safetensors"), tensors)
    return folder


def values(folder: Path) -> dict[str, np.ndarray]:
    stored = mx.load(str(folder / "model.safetensors"))
    return {name: np.array(value.astype(mx.float32)) for name, value in stored.items()}


def test_a_checkpoint_without_runs_is_complete_and_random(start: Path, shapes: Shapes, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = export(NO_RUNS, start, out)
    assert check(out) == []
    floats = {name: info.shape for name, info in list_tensors(out).items() if info.dtype == "BF16"}
    assert floats == shapes
    assert sizes["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert is_random(read_config(out))
    assert "license: apache-2.0" in (out / "README.md").read_text()


def test_every_tensor_belongs_to_one_part(shapes: Shapes) -> None:
    names = {part: [name for name in shapes if part_of(name) == part] for part in (*ROOTS, None)}
    assert sum(map(len, names.values())) == len(shapes)
    assert all(name.startswith(ROOTS[part][0]) for part in ROOTS for name in names[part])
    assert "stt_model.perception.proj.weight" in names["language"]
    assert "tts_model.audio_prompt_latents.Aria" in names["tts"]
    assert [name for name in names[None] if "featurizer" not in name] == []


def test_weights_of_runs_arrive_rounded_to_bfloat16(start: Path, shapes: Shapes, tmp_path: Path) -> None:
    runs = NO_RUNS | {part: write_run(tmp_path / part, part, shapes) for part in ("language", "perception")}
    export(runs, start, tmp_path / "out")
    stored = values(tmp_path / "out")
    for part in ("language", "perception"):
        for name, value in mx.load(str(tmp_path / part / "weights.safetensors")).items():
            rounded = np.array(value.astype(mx.bfloat16).astype(mx.float32))
            np.testing.assert_array_equal(stored[ROOTS[part][0] + name], rounded, err_msg=name)
    assert is_random(read_config(tmp_path / "out"))  # the other parts are


def test_signs_and_bytes_are_marked_as_continuations(start: Path, tmp_path: Path) -> None:
    export(NO_RUNS, start, tmp_path / "out")
    stored = values(tmp_path / "out")
    subword = "tts_model.tts_model.embed_subword."
    flags = stored[subword + "subword_flag_emb.is_continuation"]
    tokenizer = load_tokenizer(start)
    eleven, stop = tokenizer.encode(" eleven.", add_special_tokens=False).ids
    assert flags.shape == (131073,)
    assert (flags[eleven], flags[stop], flags[2], flags[12]) == (0, 1, 0, 0)
    assert stored[subword + "bos_eos_emb.special_flags"].nonzero()[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"llm.norm_f.weight": None}, "missing: stt_model.llm.norm_f.weight"),
        ({"llm.extra": mx.zeros(2)}, "unknown: llm.extra"),
        ({"llm.norm_f.weight": mx.zeros(3)}, "not of their shape: stt_model.llm.norm_f.weight"),
        ({"llm.norm_f.weight": mx.full(64, float("nan"))}, "not finite: stt_model.llm.norm_f.weight"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(
    start: Path, shapes: Shapes, tmp_path: Path, change: dict[str, mx.array | None], told: str
) -> None:
    run = write_run(tmp_path / "run", "language", shapes, **change)
    with pytest.raises(WeightsError, match=told):
        export(NO_RUNS | {"language": run}, start, tmp_path / "out")


def test_speech_decoder_and_codec_must_share_their_codebooks(start: Path, shapes: Shapes, tmp_path: Path) -> None:
    runs = NO_RUNS | {part: write_run(tmp_path / part, part, shapes) for part in ("codec", "tts")}
    with pytest.raises(WeightsError, match="not those of the codec's run"):
        export(runs, start, tmp_path / "out")


def test_a_part_without_a_run_takes_the_codebooks_of_the_other(start: Path, shapes: Shapes, tmp_path: Path) -> None:
    export(NO_RUNS | {"tts": write_run(tmp_path / "tts", "tts", shapes)}, start, tmp_path / "out")
    stored = values(tmp_path / "out")
    np.testing.assert_array_equal(
        stored["tts_model.tts_model.rvq_embs"][3], stored["tts_model.audio_codec.prvq.mus_list.3"]
    )


def test_a_checkpoint_taken_apart_and_joined_is_the_same(start: Path, shapes: Shapes, tmp_path: Path) -> None:
    export(NO_RUNS, start, tmp_path / "out")
    sizes = take_apart(tmp_path / "out", tmp_path / "runs")
    export({part: tmp_path / "runs" / part for part in ROOTS}, start, tmp_path / "again")
    assert sum(sizes.values()) == sum(math.prod(shape) for name, shape in shapes.items() if part_of(name))
    assert not is_random(read_config(tmp_path / "again"))
    before, after = values(tmp_path / "out"), values(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


@pytest.mark.parity
@pytest.mark.process
def test_the_public_code_gives_the_same(start: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm")
    export(NO_RUNS, start, tmp_path / "out")
    assert "equal to mlx-vlm" in compare(tmp_path / "out", frames=20)
