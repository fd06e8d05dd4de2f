"""The language stage over the tiny checkpoints, against recorded runs of the reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from collector import Collector

from vcpipe.actors.checkpoint import load_tokenizer
from vcpipe.actors.language import ssm
from vcpipe.actors.language.actor import LanguageSession, LanguageStage, load
from vcpipe.actors.language.cache import KV_STEP, KVCache
from vcpipe.actors.language.nemotron_h import Backbone
from vcpipe.actors.language.text import TokenBytes
from vcpipe.actors.stage import StageConfig
from vcpipe.schemas.errors import ConfigError, ProtocolError
from vcpipe.schemas.messages import OpenSession, Projected, TextStep
from vcpipe.schemas.reports import Tokens

DATA = Path(__file__).parents[1] / "data"
RUNS = sorted(path.stem for path in (DATA / "golden").glob("*_*_seed*.json"))
PAD = 12


@cache
def stage_of(checkpoint: str) -> LanguageStage:
    return load(StageConfig("language", DATA / "tiny" / checkpoint), lambda step, fraction: None)


@pytest.fixture(scope="module", autouse=True)
def free_stages() -> Iterator[None]:
    yield
    stage_of.cache_clear()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[mx.array, mx.array]]:
    """(fused, hidden) of every position that runs through the backbone."""
    seen: list[tuple[mx.array, mx.array]] = []
    step, call = Backbone.step, Backbone.__call__

    def recording_step(self, x, caches):
        hidden, caches = step(self, x, caches)
        seen.append((x, hidden))
        return hidden, caches

    def recording_call(self, x):
        hidden = call(self, x)
        seen.append((x[:, -1:], hidden[:, -1:]))
        return hidden

    monkeypatch.setattr(Backbone, "step", recording_step)
    monkeypatch.setattr(Backbone, "__call__", recording_call)
    return seen


def golden(run: str) -> tuple[dict, np.lib.npyio.NpzFile]:
    folder = DATA / "golden"
    return json.loads((folder / f"{run}.json").read_text()), np.load(folder / f"{run}.npz")


def feed(session: LanguageSession, projected: np.ndarray) -> Collector:
    """Step once a row of ``projected`` (1, frames, hidden)."""
    emit = Collector()
    for emit.frame_index in range(projected.shape[1]):
        session.step(Projected(projected[:, emit.frame_index : emit.frame_index + 1]), emit)
    session.end(emit)
    return emit


def ids(emit: Collector) -> list[tuple[int, int]]:
    return [(tokens.text_id, tokens.function_id) for _, tokens in emit.reported]


def events(emit: Collector) -> list[dict]:
    """The events a coordinator would make of the reports."""
    texts = {"text": "", "function": ""}
    made = []
    for frame_index, tokens in emit.reported:
        for channel, kind in (("text", "assistant_text_delta"), ("function", "function_delta")):
            delta = getattr(tokens, f"{channel}_delta")
            if delta is None:
                continue
            kept = len(texts[channel]) - getattr(tokens, f"{channel}_erase")
            texts[channel] = texts[channel][:kept] + getattr(tokens, f"{channel}_append")
            token_id = getattr(tokens, f"{channel}_id")
            made.append(
                {"kind": kind, "frame_index": frame_index, "token_id": token_id, "delta": delta, "text": texts[channel]}
            )
    return made


def as_float32(arrays: list[mx.array]) -> np.ndarray:
    return np.concatenate([np.array(array.astype(mx.float32)) for array in arrays], axis=1)


@pytest.mark.parametrize("run", RUNS)
def test_recorded_runs(run, rows):
    info, arrays = golden(run)
    offline, frames = info["mode"] == "offline", info["frames"]
    cached = info["options"].get("use_language_cache", not offline)
    request = OpenSession(offline=offline, system_prompt=info["system_prompt"], use_language_cache=cached)
    session, passed_on = stage_of(info["checkpoint"]).open(request)
    session.prefill()
    emit = feed(session, arrays["projected"][:, :frames])

    prompt = arrays["fused"].shape[1] - frames
    assert passed_on.prompt_positions == prompt
    assert [m for _, m in emit.sent] == [TextStep(int(t)) for t in arrays["text_ids"][-frames:]]
    assert np.array_equal(ids(emit), np.stack([arrays["text_ids"], arrays["function_ids"]], 1)[-frames:])
    assert set(emit.spans) == {"language"}

    shown = len(rows)  # the uncached way does not run the prompt on its own
    assert shown == (prompt if cached else 0) + frames
    fused, hidden = (as_float32(list(column)) for column in zip(*rows, strict=True))
    np.testing.assert_array_equal(fused, arrays["fused"][:, -shown:])
    np.testing.assert_allclose(hidden, arrays["hidden"][:, -shown:], atol=1e-4)
    if not offline:
        assert events(emit) == [e for e in info["events"] if e["kind"] in ("assistant_text_delta", "function_delta")]


def test_prompt_is_bfloat16_in_streams_and_float32_offline(rows):
    stage = stage_of("bf16")
    frame = np.zeros((1, 1, stage.config.hidden_size), np.float32)
    for offline, dtype in ((False, mx.bfloat16), (True, mx.float32)):
        rows.clear()
        session, request = stage.open(OpenSession(system_prompt="be concise", offline=offline))
        session.prefill()
        feed(session, frame)
        assert [x.dtype for x, _ in rows] == [dtype] * request.prompt_positions + [mx.float32]


@pytest.mark.parametrize(("prompt", "positions"), [(None, 0), ("", 0), (" \n\t", 0), ("be concise", 5), (" x ", 5)])
def test_blank_prompts_take_no_position(prompt, positions):
    _, request = stage_of("bf16").open(OpenSession(system_prompt=prompt, seed=3))
    assert request == OpenSession(system_prompt=prompt, seed=3, prompt_positions=positions)


def test_sessions_do_not_touch_each_other():
    info, arrays = golden("stream_bf16_seed0_prompt")
    stage = stage_of("bf16")
    alone = stage.open(OpenSession(system_prompt="be concise"))[0]
    other = stage.open(OpenSession())[0]
    alone.prefill()
    emit = Collector()
    for frame in range(8):
        row = arrays["projected"][:, frame : frame + 1]
        other.step(Projected(row[..., ::-1].copy()), Collector())
        stage.warm_up()
        alone.step(Projected(row), emit)
    assert [t for t, _ in ids(emit)] == arrays["text_ids"][info["prompt_positions"] :][:8].tolist()


def test_special_ids_leave_no_text():
    """The recorded runs hold frames of PAD: their reports carry ids only."""
    info, arrays = golden("stream_bf16_seed7_noprompt")
    session, _ = stage_of("bf16").open(OpenSession())
    reports = [tokens for _, tokens in feed(session, arrays["projected"]).reported]
    special = [t for t in reports if t.text_id in (1, 2, 11, PAD)]
    assert special
    assert all((t.text_delta, t.text_erase, t.text_append) == (None, 0, "") for t in special)
    assert all(t.text_delta is not None for t in reports if t not in special)
    assert all(isinstance(t, Tokens) for t in reports)


def test_row_of_another_width_is_refused():
    session, _ = stage_of("bf16").open(OpenSession())
    with pytest.raises(ProtocolError, match="has 1 channels, expected 64"):
        session.step(Projected(np.zeros((1, 1, 1), np.float32)), Collector())


# ------------------------------------------------------------------------------------------------ config
def write_checkpoint(folder: Path, **text_config) -> Path:
    """The tiny bfloat16 checkpoint under another text_config."""
    source = DATA / "tiny" / "bf16"
    config = json.loads((source / "config.json").read_text())
    config["text_config"].update(text_config)
    config["text_config"] = {key: value for key, value in config["text_config"].items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(source / name)
    return folder


@pytest.mark.parametrize(
    "text_config",
    [
        {"hybrid_override_pattern": list("M-M*-M*-")},
        {
            "hybrid_override_pattern": None,
            "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "attention", "mlp"],
        },
        {"time_step_limit": [0.0, float("inf")]},
        {"time_step_limit": [{"__float__": "0.0"}, {"__float__": "Infinity"}]},
        {"time_step_min": 0.001, "time_step_max": 0.1, "num_hidden_layers": None},
    ],
)
def test_spellings_of_one_config(tmp_path, text_config):
    stage = load(StageConfig("language", write_checkpoint(tmp_path, **text_config)), lambda step, fraction: None)
    assert stage.config == stage_of("bf16").config
    assert stage.config.hybrid_override_pattern == "M-M*-M*-"


@pytest.mark.parametrize(
    ("text_config", "message"),
    [
        ({"hybrid_override_pattern": "M-?"}, r"'\?'"),
        ({"hybrid_override_pattern": "M-E"}, "'E'"),
        ({"hybrid_override_pattern": None, "layers_block_type": ["mamba", "moe"]}, "'moe'"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, which is no multiple of num_key_value_heads"),
        ({"n_groups": 3}, "mamba_num_heads is 8, which is no multiple of n_groups"),
        ({"conv_kernel": 0}, "conv_kernel must be at least 1, not 0"),
        ({"vocab_size": 12}, "pad_token_id is 12; the vocabulary has 12 ids"),
    ],
)
def test_configs_that_cannot_be(tmp_path, text_config, message):
    with pytest.raises(ConfigError, match=message):
        load(StageConfig("language", write_checkpoint(tmp_path, **text_config)), lambda step, fraction: None)


def test_prompt_ids_beyond_the_vocabulary_are_refused():
    tokenizer = load_tokenizer(DATA / "tiny" / "bf16")
    tiny = stage_of("bf16")
    small = LanguageStage(replace(tiny.config, vocab_size=40), tiny.model, tokenizer, TokenBytes(tokenizer), [])
    with pytest.raises(ConfigError, match="the checkpoint has 40 ids"):
        small.open(OpenSession(system_prompt="hello"))


# ------------------------------------------------------------------------------------------------ parts
def kv_row(value: float, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    return mx.full((1, 2, 1, 4), value, dtype), mx.full((1, 2, 1, 4), -value, dtype)


def test_kv_buffer_keeps_the_dtype_of_its_first_row_until_it_grows():
    cache = KVCache()
    for _ in range(3):
        cache = cache.extend(*kv_row(1.0, mx.bfloat16))
    for length in range(3, KV_STEP + 2):
        cache = cache.extend(*kv_row(1.001, mx.float32))
        assert cache.keys.dtype == (mx.bfloat16 if length < KV_STEP else mx.float32)
        assert cache.keys.shape[2] == (KV_STEP if length < KV_STEP else 2 * KV_STEP)
        mx.eval(cache)
    keys, values = cache.filled()
    assert keys.shape == (1, 2, KV_STEP + 2, 4)
    column = np.array(keys[0, 0, :, 0])
    assert column[KV_STEP - 1] == 1.0  # rounded to bfloat16 for good
    assert column[KV_STEP] == np.float32(1.001)
    np.testing.assert_array_equal(np.array(values), -np.array(keys))


def test_kv_step_does_not_copy_the_buffer():
    big = mx.zeros((1, 2, 1 << 16, 16))
    cache = KVCache(big, mx.zeros(big.shape), 1)
    size = big.nbytes
    del big
    mx.eval(cache)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(5):
        cache = cache.extend(mx.ones((1, 2, 1, 16)), mx.ones((1, 2, 1, 16)))
        mx.eval(cache)
    assert mx.get_peak_memory() - before < size / 8
    assert cache.length == 6


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 1e-5), (mx.bfloat16, 3e-2)])
def test_state_space_in_blocks_equals_the_recurrence(dtype, tolerance):
    """scan over more than one block, step by step, and the defining recurrence in numpy agree."""
    rng = np.random.default_rng(1)
    positions, heads, size, groups, columns = ssm.BLOCK + 9, 4, 3, 2, 8
    x = mx.array(rng.normal(size=(1, positions, heads, size))).astype(dtype)
    b, c = (mx.array(rng.normal(size=(1, positions, groups, columns)) / 3).astype(dtype) for _ in range(2))
    skip = mx.array(rng.normal(size=heads)).astype(dtype)
    decay = ssm.decay_rate(mx.array(rng.normal(size=heads)).astype(dtype))
    dt = ssm.step_size(mx.array(rng.normal(size=(1, positions, heads)) - 2), mx.zeros(heads), (0.0, float("inf")))
    assert decay.dtype == dt.dtype == mx.float32

    wanted = recurrence(x, dt, decay, b, c, skip)
    scanned = ssm.scan(x, dt, decay, b, c, skip)
    assert scanned.dtype == dtype
    np.testing.assert_allclose(np.array(scanned.astype(mx.float32)), wanted, atol=tolerance * np.abs(wanted).max())

    state, stepped = mx.zeros((1, heads, size, columns)), []
    for t in range(positions):
        now = slice(t, t + 1)
        y, state = ssm.step(x[:, now], dt[:, now], decay, b[:, now], c[:, now], skip, state)
        mx.eval(y, state)
        stepped.append(y)
    assert state.dtype == mx.float32
    np.testing.assert_allclose(as_float32(stepped), wanted, atol=tolerance * np.abs(wanted).max())

    first = slice(0, 1)
    alone = ssm.scan(x[:, first], dt[:, first], decay, b[:, first], c[:, first], skip)
    assert mx.array_equal(alone, stepped[0])  # one position: the same bits either way


def recurrence(x, dt, decay, b, c, skip) -> np.ndarray:
    x, dt, decay, b, c, skip = (np.array(a.astype(mx.float32), np.float64) for a in (x, dt, decay, b, c, skip))
    _, positions, heads, size = x.shape
    share = heads // b.shape[2]
    state, y = np.zeros((heads, size, b.shape[3])), np.zeros(x.shape)
    for t in range(positions):
        for h in range(heads):
            state[h] = np.exp(dt[0, t, h] * decay[h]) * state[h] + dt[0, t, h] * np.outer(
                x[0, t, h], b[0, t, h // share]
            )
            y[0, t, h] = state[h] @ c[0, t, h // share] + skip[h] * x[0, t, h]
    return y


def test_step_size_is_clipped_after_softplus():
    dt = ssm.step_size(mx.array([[[-50.0, 0.0, 50.0]]]), mx.zeros(3), (0.1, 5.0))
    np.testing.assert_allclose(np.array(dt[0, 0]), [0.1, np.log(2), 5.0], rtol=1e-6)
