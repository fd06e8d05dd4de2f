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
from vcpipe.actors.language.cache import KV_ROWS, Caches
from vcpipe.actors.language.model import LanguageModel
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
    """(fused, hidden) of every position that runs through the network."""
    seen: list[tuple[mx.array, mx.array]] = []
    step, over_history = LanguageModel.step, LanguageModel.over_history

    def recording_step(self, row, ids, caches):
        after, hidden = step(self, row, ids, caches)
        seen.append((self.fuse(row, ids), hidden))
        return after, hidden

    def recording_history(self, fused):
        after, hidden = over_history(self, fused)
        seen.append((fused[:, -1:], hidden))
        return after, hidden

    monkeypatch.setattr(LanguageModel, "step", recording_step)
    monkeypatch.setattr(LanguageModel, "over_history", recording_history)
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
    stage = stage_of(info["checkpoint"])
    stage.prompt_states.clear()
    session, passed_on = stage.open(request)
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
        stage.prompt_states.clear()
        session, request = stage.open(OpenSession(system_prompt="be concise", offline=offline))
        session.prefill()
        feed(session, frame)
        assert [x.dtype for x, _ in rows] == [dtype] * request.prompt_positions + [mx.float32]


@pytest.mark.parametrize(("prompt", "positions"), [(None, 0), ("", 0), (" \n\t", 0), ("be concise", 5), (" x ", 5)])
def test_blank_prompts_take_no_position(prompt, positions):
    _, request = stage_of("bf16").open(OpenSession(system_prompt=prompt, seed=3))
    assert request == OpenSession(system_prompt=prompt, seed=3, prompt_positions=positions)


def test_sessions_interleaved_on_one_network():
    """Every session steps in turn through the same compiled function, beside warm-ups, and none hears of another."""
    stage = stage_of("bf16")
    names = ("stream_bf16_seed0_prompt", "stream_bf16_seed7_noprompt", "offline_bf16_seed7_cached_extra")
    runs = []
    for name in names:
        info, arrays = golden(name)
        offline = info["mode"] == "offline"
        session, request = stage.open(OpenSession(offline=offline, system_prompt=info["system_prompt"]))
        session.prefill()
        runs.append((session, arrays, request.prompt_positions * (not offline), Collector()))
    other, _ = stage.open(OpenSession())
    for frame in range(12):
        for session, arrays, _, emit in runs:
            row = arrays["projected"][:, frame : frame + 1]
            session.step(Projected(row), emit)
            other.step(Projected(row[..., ::-1].copy()), Collector())
        if frame % 5 == 0:
            stage.warm_up()
    for _, arrays, prompt, emit in runs:
        wanted = np.stack([arrays["text_ids"], arrays["function_ids"]], 1)[prompt:][:12]
        assert np.array_equal(ids(emit), wanted)


def test_ids_go_back_as_an_array():
    """The ids that a step returned are its next input as they are; the numbers read out of them do the same."""
    stage = stage_of("q4")
    _, arrays = golden("stream_q4_seed0_prompt")
    fed_back, read_out = (Caches.empty(stage.config, mx.float32) for _ in range(2))
    array, numbers = stage.no_ids, stage.no_ids.tolist()
    for frame in range(6):
        row = mx.array(arrays["projected"][:, frame : frame + 1])
        array, _ = stage.model.step(row, array, fed_back)
        mx.eval(array, fed_back.blocks)
        numbers = stage.model.step(row, mx.array(numbers, mx.uint32), read_out)[0].tolist()
        assert array.tolist() == numbers


# ------------------------------------------------------------------------------------------------ prompt states
def test_a_second_session_with_a_prompt_opens_at_once(rows):
    stage = stage_of("q4")
    stage.prompt_states.clear()
    projected = golden("stream_q4_seed0_prompt")[1]["projected"]
    outcomes = []
    for steps in (5, 0, 0):  # positions of the prompt that run through the network
        rows.clear()
        session, request = stage.open(OpenSession(system_prompt="be concise"))
        session.prefill()
        assert request.prompt_positions == 5
        assert len(rows) == steps
        emit = feed(session, projected)
        outcomes.append((ids(emit), [np.array(hidden) for _, hidden in rows[steps:]]))
    for later in outcomes[1:]:
        assert later[0] == outcomes[0][0]
        assert np.array_equal(later[1], outcomes[0][1])


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [
        ({}, {"offline": True}, 5),  # a prompt in bfloat16 and one in float32 are two
        ({}, {"use_language_cache": False}, 0),  # which keeps rows, no states
        ({"use_language_cache": False}, {}, 5),
        ({"system_prompt": "be brief"}, {}, 5),
    ],
)
def test_prompt_states_are_told_apart(rows, first, second, steps):
    stage = stage_of("bf16")
    stage.prompt_states.clear()
    for options in (first, second):
        rows.clear()
        session, _ = stage.open(OpenSession(**{"system_prompt": "be concise"} | options))
        session.prefill()
        if not options.get("use_language_cache", True):
            assert session._history.shape == (1, 5, stage.config.hidden_size)
    assert len(rows) == steps


def test_two_prompts_are_remembered(rows):
    stage = stage_of("bf16")
    stage.prompt_states.clear()
    taken_in = []
    for prompt in ("a", "b", "a", "c", "a", "b"):
        rows.clear()
        stage.open(OpenSession(system_prompt=prompt))[0].prefill()
        taken_in.append(bool(rows))
    assert taken_in == [True, True, False, True, False, True]


# ------------------------------------------------------------------------------------------------ compilation
@pytest.mark.parametrize(
    ("checkpoint", "run"), [("bf16", "stream_bf16_seed0_prompt"), ("q4", "stream_q4_seed0_prompt")]
)
def test_compiled_steps_equal_plain_ones(checkpoint, run, rows, request):
    stage = stage_of(checkpoint)

    def outcome():
        stage.prompt_states.clear()
        rows.clear()
        session, _ = stage.open(OpenSession(system_prompt="be concise"))
        session.prefill()
        emit = feed(session, golden(run)[1]["projected"])
        return ids(emit), as_float32([hidden for _, hidden in rows])

    compiled = outcome()
    request.getfixturevalue("uncompiled")
    plain = outcome()
    assert compiled[0] == plain[0]
    np.testing.assert_allclose(compiled[1], plain[1], atol=1e-5)


def test_without_a_compiler_steps_are_plain(monkeypatch, caplog):
    def compile_in_vain(function):
        def call(*inputs):
            if not disabled:
                raise RuntimeError("[Compile::eval_cpu] Failed to compile function X\nwith this code")
            return function(*inputs)

        return call

    disabled = []
    monkeypatch.setattr(mx, "compile", compile_in_vain)
    monkeypatch.setattr(mx, "disable_compile", lambda: disabled.append(True))
    monkeypatch.setattr("vcpipe.actors.compiled._refused", False)
    stage = load(StageConfig("language", DATA / "tiny" / "bf16"), lambda step, fraction: None)
    stage.warm_up()
    assert [record.getMessage() for record in caplog.records] == [
        "steps run uncompiled, which is slower: [Compile::eval_cpu] Failed to compile function X"
    ]
    info, arrays = golden("stream_bf16_seed0_prompt")
    session, _ = stage.open(OpenSession(system_prompt="be concise"))
    session.prefill()
    emit = feed(session, arrays["projected"][:, :8])
    assert [t for t, _ in ids(emit)] == arrays["text_ids"][info["prompt_positions"] :][:8].tolist()


def test_nothing_is_traced_after_warm_up(monkeypatch):
    stage = load(StageConfig("language", DATA / "tiny" / "bf16"), lambda step, fraction: None)
    stage.warm_up()
    monkeypatch.setattr(ssm, "step", None)  # tracing would call it
    row = mx.zeros((1, 1, stage.config.hidden_size))
    for request in (
        OpenSession(system_prompt="be concise"),
        OpenSession(),
        OpenSession(system_prompt="x", offline=True),
    ):
        session, _ = stage.open(request)
        session.prefill()
        for _ in range(3 if request.system_prompt else KV_ROWS + 3):
            session.advance(row)


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
def test_caches_keep_the_dtypes_of_a_prompt_until_a_multiple_of_256():
    stage = stage_of("bf16")
    caches = Caches.empty(stage.config, mx.bfloat16)
    attention = stage.config.hybrid_override_pattern.index("*")
    narrow, wide = (mx.random.normal((1, 1, stage.config.hidden_size), key=mx.random.key(1)).astype(dtype)
                    for dtype in (mx.bfloat16, mx.float32))  # fmt: skip
    seen = []
    for position in range(2 * KV_ROWS + 2):
        ids, hidden = stage.model.step(narrow if position < 3 else wide, stage.no_ids, caches)
        mx.eval(ids, caches.blocks)
        (buffer,), raw = caches.blocks[attention], caches.blocks[0][:-1]
        assert hidden.dtype == (mx.bfloat16 if position < 3 else mx.float32)
        assert {row.dtype for row in raw} == {hidden.dtype}
        assert caches.blocks[0][-1].dtype == mx.float32
        seen.append((buffer.dtype, buffer.shape[2]))
    assert seen == (
        [(mx.bfloat16, KV_ROWS)] * KV_ROWS + [(mx.float32, 2 * KV_ROWS)] * KV_ROWS + [(mx.float32, 4 * KV_ROWS)] * 2
    )
    rounded = buffer.astype(mx.bfloat16) == buffer
    assert mx.all(rounded[:, :, :KV_ROWS]).item()  # rounded for good
    assert not mx.all(rounded[:, :, KV_ROWS : 2 * KV_ROWS]).item()
    assert mx.all(buffer[:, :, caches.length :] == 0).item()


def test_a_step_does_not_copy_the_buffers():
    stage = stage_of("bf16")
    caches = Caches.empty(stage.config, mx.float32)
    row = mx.zeros((1, 1, stage.config.hidden_size))
    for _ in range(8):
        caches.length = caches.rows
        caches.make_ready(mx.float32)
    mx.eval(caches.blocks)
    size = sum(block[0].nbytes for block in caches.blocks if len(block) == 1)
    assert size > 20 << 20
    ids = stage.no_ids
    for peak_of in range(4):
        ids, _ = stage.model.step(row, ids, caches)
        mx.eval(ids, caches.blocks)
        if peak_of == 0:  # the first traces
            mx.reset_peak_memory()
            before = mx.get_active_memory()
    # Scores and mask are of the buffers' length, keys and values are not.
    assert mx.get_peak_memory() - before < size / 4
