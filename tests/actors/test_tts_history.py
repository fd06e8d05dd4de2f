"""The speech decoder with a bounded history: the last N positions alone, in every layer and however long the session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from collector import Collector

from vcpipe.actors.checkpoint import read_config
from vcpipe.actors.stage import StageConfig
from vcpipe.actors.tts import actor
from vcpipe.actors.tts.actor import TtsSession, TtsStage
from vcpipe.actors.tts.config import TtsConfig
from vcpipe.schemas.messages import OpenSession, TextStep

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "tiny" / "bf16"
VOICE_PROMPT = 37
IDS = [int(text_id) for text_id in np.random.default_rng(3).integers(3, 380, 120)]


def load(history: int | None) -> TtsStage:
    return actor.load(StageConfig("tts", TINY, tts_history_frames=history), lambda step, fraction: None)


def open_session(stage: TtsStage, **request: Any) -> TtsSession:
    columns = np.load(DATA / "golden" / "prompt_bf16.npz")["codes"][0]
    codes = np.zeros((38, columns.shape[1]), np.int32)
    codes[1:36] = columns[1:36]
    session, _ = stage.open(OpenSession(prompt_codes=codes, **request))
    session.prefill()
    return session


def say(session: TtsSession, text_ids: list[int]) -> np.ndarray:
    """Codes (frames, Q) of the text ids."""
    emit = Collector()
    for text_id in text_ids:
        session.step(TextStep(text_id), emit)
    return np.stack([message.codes for _, message in emit.sent])


def slots(session: TtsSession) -> list[int]:
    """Slots of each layer's buffer."""
    return [buffer.shape[2] for buffer in session.state.caches]


@pytest.fixture(scope="module")
def unbounded_codes() -> np.ndarray:
    return say(open_session(load(None)), IDS)


# ------------------------------------------------------------------------------------------------ wide enough
def test_a_history_that_is_never_full_changes_nothing() -> None:
    """The recorded run, with a bound of exactly the positions it comes to."""
    run = np.load(DATA / "golden" / "stream_bf16_seed0_prompt.npz")
    frames, steps = len(run["codes"]), run["raw_codes"].shape[1]
    prompt_positions = steps + 1 - frames
    session = open_session(load(VOICE_PROMPT + steps), prompt_positions=prompt_positions)
    codes = say(session, run["text_ids"][-frames:].tolist())
    np.testing.assert_array_equal(codes, run["raw_codes"][0, prompt_positions - 1 :])


# ------------------------------------------------------------------------------------------------ narrower
def masked_codes(history: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """What the stage says when each step attends anew over all positions, those behind the last ``history`` masked."""
    stage = load(None)
    own = TtsConfig.from_dict(read_config(TINY)["tts_config"])
    windows = [history if own.is_global(i) else min(own.sliding_window, history) for i in range(4)]
    backbone = stage._model.backbone
    prefill = backbone.prefill
    seen: list[mx.array] = []  # inputs of all positions, (2, T, H) each

    def first(x: mx.array) -> Any:
        seen[:] = [x.reshape(2, VOICE_PROMPT, -1)]
        return prefill(x)

    def step(x: mx.array, position: mx.array, slots: Any, caches: Any) -> Any:
        seen.append(x.reshape(2, 1, -1))
        at = position.item()
        # Always as long as in the end, so that MLX meets one shape only; no position sees a later one.
        inputs = mx.pad(mx.concatenate(seen, axis=1), [(0, 0), (0, VOICE_PROMPT + len(IDS) - 1 - at), (0, 0)])
        with monkeypatch.context() as patch:
            patch.setattr(mx.fast, "scaled_dot_product_attention", attention_of(windows))
            hidden, _ = prefill(inputs.reshape(1, -1, inputs.shape[-1]))
        return hidden.reshape(inputs.shape)[:, at].reshape(1, 2, -1), caches

    with monkeypatch.context() as patch:
        patch.setattr(actor, "compiled", lambda function, *example: function)
        patch.setattr(backbone, "prefill", first)
        patch.setattr(backbone, "step", step)
        return say(open_session(stage), IDS)


def attention_of(windows: list[int]) -> Callable[..., mx.array]:
    """Softmax attention in full, of one layer after the other."""
    layers = iter(windows)

    def attend(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any) -> mx.array:
        positions = mx.arange(keys.shape[2])
        ahead = positions[:, None] - positions
        scores = scale * queries @ keys.swapaxes(2, 3)
        return mx.softmax(mx.where((ahead >= 0) & (ahead < next(layers)), scores, -mx.inf), axis=-1) @ values

    return attend


@pytest.mark.parametrize("history", [1, 40, 125])
def test_the_last_positions_alone_are_seen(
    history: int, unbounded_codes: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrower than the voice prompt, than the model's own windows (48), and wider; the ring turns again and again."""
    stage = load(history)
    session = open_session(stage)
    codes = say(session, IDS[:10])
    held, before = slots(session), sum(buffer.nbytes for buffer in session.state.caches)
    assert held == [min(history, 48), history] * 2
    codes = np.concatenate([codes, say(session, IDS[10:])])
    assert slots(session) == held and sum(buffer.nbytes for buffer in session.state.caches) == before
    np.testing.assert_array_equal(codes, masked_codes(history, monkeypatch))
    # Frame 0 makes no step, frame 1 is position 37, which sees itself and the 37 before.
    whole = max(history - VOICE_PROMPT + 1, 1)
    np.testing.assert_array_equal(codes[:whole], unbounded_codes[:whole])
    assert not np.array_equal(codes[whole:], unbounded_codes[whole:])


def test_a_second_session_of_the_same_prompt_begins_from_what_the_ring_held() -> None:
    stage = load(40)
    first = say(open_session(stage, prompt_positions=60), IDS[:90])
    assert len(stage._snapshots._held) == 1
    second = open_session(stage, prompt_positions=60)
    assert slots(second) == [40] * 4
    np.testing.assert_array_equal(say(second, IDS[:90]), first)
    np.testing.assert_array_equal(first, say(open_session(load(40), prompt_positions=60), IDS[:90]))
