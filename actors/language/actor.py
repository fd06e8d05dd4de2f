"""The language stage: projected audio in, the assistant's text id out, with both channels' text for the coordinator.

It holds Nemotron-H and its two heads; it draws no random numbers and knows no audio.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from vcpipe.actors.checkpoint import load_tokenizer, read_config
from vcpipe.actors.language.config import LanguageConfig
from vcpipe.actors.language.nemotron_h import LanguageModel
from vcpipe.actors.language.text import TokenAccumulator, TokenBytes
from vcpipe.actors.stage import Emitter, Progress, StageConfig
from vcpipe.actors.weights import WeightLoader, load_stage
from vcpipe.schemas.errors import ConfigError, ProtocolError
from vcpipe.schemas.messages import OpenSession, Projected, TextStep
from vcpipe.schemas.reports import Tokens

_NAMES = ("embed_tokens.", "llm.", "lm_head.", "function_head.")
_KERNELS = {"llm.layers.*.mixer.conv1d.weight": "conv1d"}


def load(config: StageConfig, progress: Progress, load_weights: WeightLoader = load_stage) -> LanguageStage:
    """Read config, tokenizer and weights. Raises ConfigError or WeightsError."""
    language_config = LanguageConfig.from_runtime(read_config(config.checkpoint))
    tokenizer = load_tokenizer(config.checkpoint)
    token_bytes = TokenBytes(tokenizer)
    model = LanguageModel(language_config)
    report = load_weights(
        model, config.checkpoint, stage="language", root="stt_model.", names=_NAMES, kernels=_KERNELS, progress=progress
    )
    return LanguageStage(language_config, model, tokenizer, token_bytes, report.warnings)


class LanguageStage:
    """One Nemotron-H for any number of sessions."""

    name = "language"
    prompt_codes: np.ndarray | None = None

    def __init__(
        self,
        config: LanguageConfig,
        model: LanguageModel,
        tokenizer: Tokenizer,
        token_bytes: TokenBytes,
        warnings: list[str],
    ) -> None:
        self.config = config
        self.model = model
        self.warnings = warnings
        self._tokenizer = tokenizer
        self.token_bytes = token_bytes

    def warm_up(self) -> None:
        """A prompt and two frames: every kernel runs once in each dtype that it meets."""
        session, _ = self.open(OpenSession(system_prompt="warm up"))
        session.prefill()
        for _ in range(2):
            session.advance(mx.zeros((1, 1, self.config.hidden_size)))

    def open(self, request: OpenSession) -> tuple[LanguageSession, OpenSession]:
        """A session that has its system prompt still to take in; the request goes on with the prompt's length."""
        prompt_ids = self._prompt_ids(request.system_prompt)
        session = LanguageSession(self, request, prompt_ids)
        return session, replace(request, prompt_positions=len(prompt_ids))

    def _prompt_ids(self, system_prompt: str | None) -> list[int]:
        """Ids of the prompt between BOS and EOS; none at all for a blank prompt."""
        prompt = self.config.default_system_prompt if system_prompt is None else system_prompt
        if not prompt.strip():
            return []
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        if max(ids, default=0) >= self.config.vocab_size:
            raise ConfigError(
                f"the tokenizer gives id {max(ids)} for the system prompt, the checkpoint has {self.config.vocab_size} ids"
            )
        return [self.config.bos_token_id, *ids, self.config.eos_token_id]


class LanguageSession:
    """State of one conversation: the blocks' caches (or, uncached, every input row so far) and the last two ids."""

    def __init__(self, stage: LanguageStage, request: OpenSession, prompt_ids: list[int]) -> None:
        self._model = stage.model
        self._prompt_ids = prompt_ids
        self._widen_prompt = request.offline
        self._caches = stage.model.llm.empty_caches() if request.use_language_cache else None
        self._history: mx.array | None = None  # (1, positions, hidden), uncached only
        self._previous_ids = (stage.config.pad_token_id, stage.config.pad_token_id)
        self._text = TokenAccumulator(stage.token_bytes, stage.config.special_ids)
        self._function = TokenAccumulator(stage.token_bytes, stage.config.special_ids)

    def prefill(self) -> None:
        """Put the prompt on the audio channel, one position an id; both other channels stay PAD and no head is asked.

        Position by position, not at once: a streaming session's rows stay in the embeddings' dtype (an offline run has them
        float32) and bfloat16 sums depend on their order.
        """
        if not self._prompt_ids:
            return
        rows = self._model.embed_tokens(mx.array([self._prompt_ids]))  # (1, P, hidden)
        fused = self._model.fuse(rows.astype(mx.float32) if self._widen_prompt else rows, *self._previous_ids)
        if self._caches is None:
            self._history = fused
            mx.eval(fused)
            return
        for position in range(len(self._prompt_ids)):
            _, self._caches = self._model.llm.step(fused[:, position : position + 1], self._caches)
            mx.eval(self._caches)

    def step(self, message: Projected, emit: Emitter) -> None:
        """One audio frame. Raises ProtocolError for a row of another width."""
        projected = mx.array(message.projected)
        if projected.shape[-1] != self._model.hidden_size:
            raise ProtocolError(
                f"language: projected has {projected.shape[-1]} channels, expected {self._model.hidden_size}"
            )
        with emit.span("language"):
            text_id, function_id = self.advance(projected)
        emit.send(TextStep(text_id))
        emit.report(self._tokens(text_id, function_id))

    def advance(self, projected: mx.array) -> tuple[int, int]:
        """One position of the timeline: projected (1, 1, hidden) -> text id and function id."""
        fused = self._model.fuse(projected, *self._previous_ids)
        ids = self._model.next_ids(self._hidden(fused))
        mx.eval(ids, self._caches, self._history)
        text_id, function_id = np.array(ids).tolist()
        self._previous_ids = (text_id, function_id)
        return self._previous_ids

    def end(self, emit: Emitter) -> None:
        """Nothing is due: an unfinished character has been shown as U+FFFD."""

    def _hidden(self, fused: mx.array) -> mx.array:
        """fused (1, 1, hidden) -> hidden (1, 1, hidden)."""
        if self._caches is not None:
            hidden, self._caches = self._model.llm.step(fused, self._caches)
            return hidden
        self._history = fused if self._history is None else mx.concatenate([self._history, fused], axis=1)
        return self._model.llm(self._history)[:, -1:]

    def _tokens(self, text_id: int, function_id: int) -> Tokens:
        changes: dict[str, Any] = {}
        for channel, text, token_id in (("text", self._text, text_id), ("function", self._function, function_id)):
            if (update := text.append(token_id)) is not None:
                changes[f"{channel}_delta"] = update.delta
                changes[f"{channel}_erase"] = update.erase
                changes[f"{channel}_append"] = update.append
        return Tokens(text_id, function_id, **changes)
