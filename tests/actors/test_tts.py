"""The tts stage on the tiny checkpoints, against the recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from collector import Collector

from vcpipe.actors.stage import StageConfig
from vcpipe.actors.tts import actor
from vcpipe.actors.tts.actor import TtsSession, TtsStage
from vcpipe.actors.tts.rng import next_key, session_key
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.messages import Codes, OpenSession, TextStep

DATA = Path(__file__).parents[1] / "data"
RUNS = sorted(path.stem for path in (DATA / "golden").glob("*_seed*.npz"))
PAD, EOS = 12, 2


class Run:
    """One recorded run: arrays, seed, prompt length and text ids of the audio frames."""

    def __init__(self, name: str) -> None:
        self.arrays = dict(np.load(DATA / "golden" / f"{name}.npz"))
        self.offline, self.kind, seed = name.split("_")[0] == "offline", name.split("_")[1], name.split("_")[2]
        self.seed = int(seed.removeprefix("seed"))
        self.frames = len(self.arrays["codes"])
        self.raw_codes = self.arrays["raw_codes"][0]
        self.prompt_positions = len(self.raw_codes) + 1 - self.frames
        self.text_ids = self.arrays["text_ids"][-self.frames :].tolist()

    def request(self) -> OpenSession:
        return OpenSession(
            offline=self.offline,
            seed=self.seed,
            prompt_positions=self.prompt_positions,
            prompt_codes=prompt_codes(self.kind),
        )


def prompt_columns(kind: str) -> np.ndarray:
    """The recorded prompt, (37, Q): silence between two columns of mask codes."""
    return np.load(DATA / "golden" / f"prompt_{kind}.npz")["codes"][0].astype(np.int32)


def prompt_codes(kind: str) -> np.ndarray:
    """What the codec made of silence, (38, Q); the columns that were recorded as masks, or not at all, may hold anything."""
    codes = np.full((38, 31), 7, np.int32)
    codes[1:36] = prompt_columns(kind)[1:36]
    return codes


def load(folder: Path) -> TtsStage:
    return actor.load(StageConfig("tts", folder), lambda step, fraction: None)


@pytest.fixture(scope="module")
def stages() -> dict[str, TtsStage]:
    return {kind: load(DATA / "tiny" / kind) for kind in ("bf16", "q4")}


@pytest.fixture
def stage(stages: dict[str, TtsStage]) -> TtsStage:
    return stages["bf16"]


def say(session: TtsSession, text_ids: list[int]) -> np.ndarray:
    """Codes (frames, Q) of the text ids."""
    emit = Collector()
    for text_id in text_ids:
        session.step(TextStep(text_id), emit)
    session.end(emit)
    assert not emit.reported
    assert emit.spans == ["tts"] * len(text_ids)
    messages = [message for _, message in emit.sent]
    assert all(isinstance(message, Codes) and message.codes.dtype == np.int32 for message in messages)
    return np.stack([message.codes for message in messages])


def open_session(stage: TtsStage, seed: int = 0, **request: Any) -> TtsSession:
    session, _ = stage.open(OpenSession(seed=seed, prompt_codes=prompt_codes("bf16"), **request))
    session.prefill()
    return session


# ------------------------------------------------------------------------------------------------ recorded runs
@pytest.mark.parametrize("name", RUNS)
def test_recorded_runs(stages: dict[str, TtsStage], name: str) -> None:
    """The stage as it is used, its step compiled: codes exactly."""
    run = Run(name)
    assert EOS in run.text_ids
    session, _ = stages[run.kind].open(run.request())
    session.prefill()
    codes = say(session, run.text_ids)
    if run.prompt_positions:
        np.testing.assert_array_equal(codes, run.raw_codes[run.prompt_positions - 1 :])
    else:
        np.testing.assert_array_equal(codes[1:], run.raw_codes)
        silence = np.load(DATA / "golden" / f"prompt_{run.kind}.npz")["silence"]
        np.testing.assert_array_equal(codes[0], np.zeros(31) if run.offline else silence)


def test_hidden_activations_and_the_uncompiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run, stage = Run("stream_bf16_seed0_prompt"), load(DATA / "tiny" / "bf16")
    prefills, hiddens = record_hidden(stage, monkeypatch)
    monkeypatch.setattr(actor, "compiled", lambda function: function)
    session, _ = stage.open(run.request())
    session.prefill()
    np.testing.assert_array_equal(say(session, run.text_ids), run.raw_codes[run.prompt_positions - 1 :])
    ((columns, warmup_hidden),) = prefills
    np.testing.assert_array_equal(columns[0], prompt_columns(run.kind))
    np.testing.assert_allclose(warmup_hidden, run.arrays["warmup_hidden"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(np.stack(hiddens), run.arrays["tts_hidden"], atol=1e-4, rtol=0)


def record_hidden(
    stage: TtsStage, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[np.ndarray]]:
    """Lists that fill with (prompt columns, hidden) of every voice prompt and the hidden (2, H) of every step."""
    model = stage._model
    prefill, refine = model.prefill, model.refine
    prefills: list[tuple[np.ndarray, np.ndarray]] = []
    hiddens: list[np.ndarray] = []

    def recorded_prefill(columns: mx.array, *inputs: mx.array) -> Any:
        hidden, entries = prefill(columns, *inputs)
        prefills.append((np.array(columns), np.array(hidden).reshape(2, 37, -1)))
        return hidden, entries

    def recorded_refine(hidden: mx.array, key: mx.array) -> Any:
        hiddens.append(np.array(hidden[0]))
        return refine(hidden, key)

    monkeypatch.setattr(model, "prefill", recorded_prefill)
    monkeypatch.setattr(model, "refine", recorded_refine)
    return prefills, hiddens


# ------------------------------------------------------------------------------------------------ one session
def test_a_step_draws_ten_times_and_the_prompt_not_at_all(stage: TtsStage) -> None:
    session = open_session(stage, seed=5)
    key = session_key(5)
    np.testing.assert_array_equal(session.state.key, key)
    say(session, [40, 41, 42])  # frame 0 makes no step
    for _ in range(2 * 10):
        key, _ = next_key(key)
    np.testing.assert_array_equal(session.state.key, key)


def test_prompt_positions_are_steps_with_pad(stage: TtsStage) -> None:
    with_prompt = say(open_session(stage, prompt_positions=4), [50, 51])
    without = say(open_session(stage), [99, PAD, PAD, PAD, 50, 51])
    np.testing.assert_array_equal(with_prompt, without[4:])


def test_end_of_speech_feeds_back_silence(stage: TtsStage) -> None:
    session = open_session(stage)
    say(session, [40, 60, 61])
    session.state.code_sum = stage.silence_sum
    wanted = say(session, [EOS, 62])
    other = open_session(stage)
    np.testing.assert_array_equal(say(other, [40, 60, 61, EOS, 62])[3:], wanted)


def test_the_code_sum_carried_on_is_that_of_the_codes(stage: TtsStage) -> None:
    session = open_session(stage, seed=11)
    last_codes = say(session, [40, *range(60, 65)])[-1]
    np.testing.assert_array_equal(session.state.code_sum, stage._model.code_sum(mx.array(last_codes)[None, None]))


def test_a_step_writes_into_the_buffers_it_was_given(stage: TtsStage) -> None:
    session = open_session(stage)
    say(session, [40, 60])
    before, held = [np.array(buffer) for buffer in session.state.caches], mx.get_active_memory()
    mx.reset_peak_memory()
    say(session, [61])
    buffers = sum(array.nbytes for array in before)
    assert mx.get_peak_memory() - held < buffers / 2
    for after, array in zip(session.state.caches, before, strict=True):
        changed = (np.array(after) != array).any(axis=(0, 1, 3))
        assert changed.sum() == 1  # the ring has wrapped or not: one slot


def test_growing_buffers_are_traced_before_the_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = load(DATA / "tiny" / "bf16")
    traced: list[int] = []
    step = stage._model.guided_step
    monkeypatch.setattr(stage._model, "guided_step", lambda *inputs: traced.append(1) or step(*inputs))
    stage.warm_up()
    assert len(traced) == 6  # 256 slots, doubled five times
    session = open_session(stage)
    for position in (255, 256, 512, 1024, 2048, 4096, 8191):
        session.state.position = position
        session.state.caches = stage._model.backbone.layout.make_room(session.state.caches, position)
        stage.advance(session.state, 60)
    assert len(traced) == 6


# ------------------------------------------------------------------------------------------------ many sessions
def test_the_same_seed_gives_the_same_codes_in_the_last_session(stage: TtsStage) -> None:
    ids = [40, 70, PAD, 71, EOS, 72]
    first = say(open_session(stage, seed=3), ids)
    for seed in range(10, 13):
        assert not np.array_equal(say(open_session(stage, seed=seed), ids), first)
    np.testing.assert_array_equal(say(open_session(stage, seed=3), ids), first)


def test_interleaved_sessions_do_not_disturb_each_other(stage: TtsStage) -> None:
    ids = [[40, *range(60 + i, 120 + i, 10)] for i in range(3)]
    alone = [say(open_session(stage, seed=i), ids[i]) for i in range(3)]
    sessions = [open_session(stage, seed=i) for i in range(3)]
    emits = [Collector() for _ in sessions]
    for frame in range(len(ids[0])):
        mx.random.seed(frame)  # another user of MLX's own generator
        for i, session in enumerate(sessions):
            session.step(TextStep(ids[i][frame]), emits[i])
    for emit, wanted in zip(emits, alone, strict=True):
        np.testing.assert_array_equal(np.stack([message.codes for _, message in emit.sent]), wanted)


def test_a_second_session_of_the_same_prompt_begins_without_a_step(
    stage: TtsStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [50, 51, EOS, *range(60, 70)]  # past the turn of the ring
    steps: list[int] = []
    advance = stage.advance
    monkeypatch.setattr(stage, "advance", lambda state, text_id: steps.append(text_id) or advance(state, text_id))
    first = open_session(stage, seed=21, prompt_positions=4)
    assert steps == [PAD] * 3
    wanted = say(first, ids)
    del steps[:]
    # Two sessions at once, each past the point where the other stands: neither writes into what both began with.
    second, third = (open_session(stage, seed=21, prompt_positions=4) for _ in range(2))
    assert not steps
    np.testing.assert_array_equal(say(second, ids), wanted)
    np.testing.assert_array_equal(say(third, ids), wanted)
    for other in ({"seed": 22, "prompt_positions": 4}, {"seed": 21, "prompt_positions": 5}):
        del steps[:]
        assert not np.array_equal(say(open_session(stage, **other), ids[:3]), wanted[:3])
        assert steps[0] == PAD
    changed = prompt_codes("bf16")
    changed[35] += 1 - 2 * (changed[35] > 0)
    del steps[:]
    session, _ = stage.open(OpenSession(seed=21, prompt_positions=4, prompt_codes=changed))
    session.prefill()
    assert steps == [PAD] * 3


def test_only_a_few_states_are_kept(stage: TtsStage) -> None:
    for seed in range(30, 36):
        open_session(stage, seed=seed, prompt_positions=2)
    assert len(stage._snapshots._held) == 4
    assert [name[0] for name in stage._snapshots._held] == [32, 33, 34, 35]
    open_session(stage, seed=32, prompt_positions=2)
    open_session(stage, seed=36, prompt_positions=2)
    assert [name[0] for name in stage._snapshots._held] == [34, 35, 32, 36]


def test_text_rows_are_made_once_for_each_id(stage: TtsStage) -> None:
    say(open_session(stage), [40, 80, 81])
    before = dict(stage._text_rows)
    say(open_session(stage), [40, 81, 80, 81])
    assert {80, 81} <= before.keys() and stage._text_rows.keys() == before.keys()
    assert all(stage._text_rows[token_id] is rows for token_id, rows in before.items())


def test_ids_beyond_the_tables_use_the_padding_rows(stage: TtsStage) -> None:
    model = stage._model
    flags = model.embed_subword.subword_flag_emb, model.embed_subword.bos_eos_emb
    for table in flags:
        np.testing.assert_array_equal(
            table(mx.array([[10**6]])).astype(mx.float32), table(table.pad_tensor[None, None]).astype(mx.float32)
        )
    np.testing.assert_array_equal(model.text_rows([131072], [[]]), model.text_rows([10**6], [[]]))


def test_warm_up_leaves_nothing_behind(stage: TtsStage) -> None:
    wanted = say(open_session(stage, seed=1), [40, 60])
    stage.warm_up()
    assert not stage._snapshots._held
    np.testing.assert_array_equal(say(open_session(stage, seed=1), [40, 60]), wanted)
    assert stage.prompt_codes is None and stage.warnings == []


# ------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("codes", "complaint"),
    [
        (None, "got none"),
        (np.zeros((37, 31), np.int32), r"shape \(38, 31\).*got shape \(37, 31\)"),
        (np.zeros((38, 30), np.int32), r"shape \(38, 31\).*got shape \(38, 30\)"),
        (np.full((38, 31), 32, np.int32), "32 to 32; accepted: 0 to 31"),
    ],
)
def test_prompt_codes_of_another_form_are_refused(stage: TtsStage, codes: np.ndarray | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        stage.open(OpenSession(prompt_codes=codes))


@pytest.mark.parametrize("seed", [-1, 2**64, True])
def test_seeds_that_mlx_refuses_are_refused(stage: TtsStage, seed: int) -> None:
    with pytest.raises(ConfigError, match="seed must be an integer from 0 to"):
        stage.open(OpenSession(seed=seed, prompt_codes=prompt_codes("bf16")))


@pytest.mark.parametrize("seed", [2**32 + 1, 2**64 - 1])
def test_large_seeds_are_seeds_of_their_own(stage: TtsStage, seed: int) -> None:
    codes = say(open_session(stage, seed=seed), [40, 60])
    assert not np.array_equal(codes, say(open_session(stage, seed=seed % 2**32), [40, 60]))


def test_a_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    for file in (DATA / "tiny" / "bf16").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 384, "content": "\u732b"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="257 single-character tokens.*257 rows"):
        load(tmp_path)
