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
from vcpipe.actors.language.cache import KV_ROWS, Caches
from vcpipe.actors.language.config import LanguageConfig
from vcpipe.actors.language.model import LanguageModel, PromptStates
from vcpipe.actors.language.parameters import LanguageParameters
from vcpipe.actors.language.text import TokenAccumulator, TokenBytes
from vcpipe.actors.stage import Emitter, Progress, StageConfig
from vcpipe.actors.weights import WeightLoader, load_stage
from vcpipe.schemas.errors import ConfigError, ProtocolError
from vcpipe.schemas.messages import OpenSession, Projected, TextStep
from vcpipe.schemas.reports import Tokens

#: Positions for which everything is traced before the first session: five minutes. Behind them the key/value buffers double
#: ever more rarely, and each time one frame takes longer.
_TRACED_POSITIONS = 16 * KV_ROWS

_NAMES = ("embed_tokens.", "llm.", "lm_head.", "function_head.")
_KERNELS = {"llm.layers.*.mixer.conv1d.weight": "conv1d"}


def load(config: StageConfig, progress: Progress, load_weights: WeightLoader = load_stage) -> LanguageStage:
    """Read config, tokenizer and weights. Raises ConfigError or WeightsError."""
    language_config = LanguageConfig.from_runtime(read_config(config.checkpoint))
    tokenizer = load_tokenizer(config.checkpoint)
    token_bytes = TokenBytes(tokenizer)
    stored = LanguageParameters(language_config)
    report = load_weights(
        stored,
        config.checkpoint,
        stage="language",
        root="stt_model.",
        names=_NAMES,
        kernels=_KERNELS,
        progress=progress,
    )
    model = LanguageModel(language_config, stored)
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
        self.prompt_states = PromptStates()

    def warm_up(self) -> None:
        """Run once what a session's first minutes may meet: a prompt and two frames, then a frame in each size of buffers."""
        session, _ = self.open(OpenSession(system_prompt="warm up"))
        session.prefill()
        row = mx.zeros((1, 1, self.config.hidden_size))
        for _ in range(2):
            session.advance(row)
        caches = Caches.empty(self.config, mx.float32)
        while caches.length < _TRACED_POSITIONS:
            mx.eval(self.model.step(row, self.no_ids, caches)[0], caches.blocks)
            caches.length = caches.rows
        self.prompt_states.clear()

    @property
    def no_ids(self) -> mx.array:
        """(2,): the previous ids before the first."""
        return mx.full((2,), self.config.pad_token_id, mx.uint32)

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
        self._prompt_states = stage.prompt_states
        self._prompt_ids = prompt_ids
        self._widen_prompt = request.offline
        dtype = stage.model.embedding.dtype if prompt_ids and not request.offline else mx.float32
        self._caches = Caches.empty(stage.config, dtype) if request.use_language_cache else None
        self._history: mx.array | None = None  # (1, positions, hidden), uncached only
        self._previous_ids = stage.no_ids
        self._text = TokenAccumulator(stage.token_bytes, stage.config.special_ids)
        self._function = TokenAccumulator(stage.token_bytes, stage.config.special_ids)

    def prefill(self) -> None:
        """Put the prompt on the audio channel, one position an id; both other channels stay PAD and no head is asked.

        Position by position, not at once: a streaming session's rows stay in the embeddings' dtype (an offline run has them
        float32) and bfloat16 sums depend on their order.
        """
        if not self._prompt_ids:
            return
        rows = self._model.embedding(mx.array(self._prompt_ids))[None]  # (1, P, hidden)
        if self._widen_prompt:
            rows = rows.astype(mx.float32)
        if self._caches is None:
            self._history = self._model.fuse(rows, self._previous_ids)
            mx.eval(self._history)
        elif (known := self._prompt_states.find(self._prompt_ids, self._widen_prompt)) is not None:
            self._caches = known
        else:
            for row in mx.split(rows, rows.shape[1], axis=1):
                self._model.step(row, self._previous_ids, self._caches)
                mx.eval(self._caches.blocks)
            self._prompt_states.keep(self._prompt_ids, self._widen_prompt, self._caches)

    def step(self, message: Projected, emit: Emitter) -> None:
        """One audio frame. Raises ProtocolError for a row of another width."""
        projected = mx.array(message.projected)
        if projected.shape[-1] != self._model.config.hidden_size:
            raise ProtocolError(
                f"language: projected has {projected.shape[-1]} channels, expected {self._model.config.hidden_size}"
            )
        with emit.span("language"):
            text_id, function_id = self.advance(projected)
        emit.send(TextStep(text_id))
        emit.report(self._tokens(text_id, function_id))

    def advance(self, projected: mx.array) -> tuple[int, int]:
        """One position of the timeline: projected (1, 1, hidden) -> text id and function id."""
        self._previous_ids = self._next_ids(projected)
        text_id, function_id = np.array(self._previous_ids).tolist()
        return text_id, function_id

    def end(self, emit: Emitter) -> None:
        """Nothing is due: an unfinished character has been shown as U+FFFD."""

    def _next_ids(self, projected: mx.array) -> mx.array:
        """(1, 1, hidden) -> evaluated (2,)."""
        if self._caches is not None:
            ids, _ = self._model.step(projected, self._previous_ids, self._caches)
            mx.eval(ids, self._caches.blocks)
            return ids
        fused = self._model.fuse(projected, self._previous_ids)
        self._history = fused if self._history is None else mx.concatenate([self._history, fused], axis=1)
        ids, _ = self._model.over_history(self._history)
        mx.eval(ids, self._history)
        return ids

    def _tokens(self, text_id: int, function_id: int) -> Tokens:
        changes: dict[str, Any] = {}
        for channel, text, token_id in (("text", self._text, text_id), ("function", self._function, function_id)):
            if (update := text.append(token_id)) is not None:
                changes[f"{channel}_delta"] = update.delta
                changes[f"{channel}_erase"] = update.erase
                changes[f"{channel}_append"] = update.append
        return Tokens(text_id, function_id, **changes)
