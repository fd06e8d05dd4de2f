"""The tts stage: text ids in, codec codes out, one frame a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from vcpipe.actors.checkpoint import load_tokenizer, read_config
from vcpipe.actors.compiled import compiled
from vcpipe.actors.stage import Emitter, Progress, StageConfig
from vcpipe.actors.tts.char_encoder import Spelling
from vcpipe.actors.tts.config import PROMPT_POSITIONS, TtsConfig
from vcpipe.actors.tts.ear_tts import SpeechDecoder
from vcpipe.actors.tts.rng import session_key
from vcpipe.actors.tts.step import DecoderState, Snapshot, SnapshotStore
from vcpipe.actors.weights import WeightLoader, load_stage
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.messages import Codes, OpenSession, TextStep

#: Tensors of a checkpoint that belong to this stage, after its root.
_NAMES = ("tts_model.", "audio_prompt_latents.", "codec_silence_tokens")

#: Weights that are read other than through their layer.
_DENSE = (
    "tts_model.mog_head.proj_mus.*",
    "tts_model.mog_head.low_mat",
    "tts_model.rvq_embs",
    "tts_model.embed_subword.embed_tokens.*",
)

#: The codes of the prompt come from this much more silence than the prompt is long.
_EXTRA_CODES = 1

#: States before the first frame that are kept for the next session of the same seed and prompt length.
_SNAPSHOTS = 4


def load(config: StageConfig, progress: Progress, load_weights: WeightLoader = load_stage) -> TtsStage:
    """Read the speech decoder of a checkpoint."""
    settings = read_config(config.checkpoint)
    tts = TtsConfig.from_dict(settings.get("tts_config") or {})
    vocabulary = load_tokenizer(config.checkpoint).get_vocab(with_added_tokens=True)
    spelling = Spelling(vocabulary, tts.character_encoder.char_vocab_size)
    decoder = SpeechDecoder(tts, config.tts_history_frames)
    report = load_weights(
        decoder,
        config.checkpoint,
        stage="tts",
        root="tts_model.",
        names=_NAMES,
        kernels={},
        dense=_DENSE,
        progress=progress,
    )
    ids = TextIds(pad=settings["pad_token_id"], eos=settings["eos_token_id"])
    return TtsStage(decoder, spelling, ids, report.warnings)


@dataclass(frozen=True, slots=True)
class TextIds:
    """The text ids that mean something to the speech decoder."""

    pad: int
    eos: int


class TtsStage:
    """The loaded network, and what all sessions share."""

    name = "tts"

    def __init__(self, decoder: SpeechDecoder, spelling: Spelling, ids: TextIds, warnings: list[str]) -> None:
        self.warnings = warnings
        self.ids = ids
        self._decoder = decoder
        self._model = decoder.tts_model
        self._model.prepare()
        self._spelling = spelling
        # Text rows by id: a pure function of the id, at most one entry for each token of the vocabulary.
        self._text_rows: dict[int, mx.array] = {}
        self.silence_codes = np.array(decoder.codec_silence_tokens, dtype=np.int32)
        self.silence_sum = self._model.code_sum(mx.array(self.silence_codes)[None, None])
        self._mask_sum = mx.zeros_like(self.silence_sum)
        mx.eval(self._model.parameters(), self.silence_sum, self._mask_sum)
        self._step: Callable[..., Any] | None = None
        # After the voice prompt alone: its codes, and the state, which no seed has a part in yet.
        self._voice: tuple[bytes, Snapshot] | None = None
        self._snapshots = SnapshotStore(_SNAPSHOTS)

    @property
    def prompt_codes(self) -> np.ndarray | None:
        """Only the codec knows them."""
        return None

    def warm_up(self) -> None:
        """One session with a prompt of two positions: a step of every kind, with the buffers that sessions begin with."""
        codes = np.zeros((PROMPT_POSITIONS + _EXTRA_CODES, self._model.config.num_quantizers), np.int32)
        session, _ = self.open(OpenSession(prompt_positions=2, prompt_codes=codes))
        session.prefill()
        self._snapshots.clear()
        self._trace_later_sizes(session.state)

    def open(self, request: OpenSession) -> tuple[TtsSession, OpenSession]:
        """A session that has its prompts still to take in.

        ``request.prompt_codes``: (38, Q) codes of silence. ``request.prompt_positions``: of the timeline before the first
        frame. Raises ConfigError for codes of another shape or a seed MLX does not accept.
        """
        session_key(request.seed)
        columns = self._prompt_columns(request.prompt_codes)
        first_codes = None
        if request.prompt_positions == 0:
            first_codes = np.zeros_like(self.silence_codes) if request.offline else self.silence_codes
        return TtsSession(self, request.seed, columns, request.prompt_positions, first_codes), request

    def start(self, seed: int, columns: np.ndarray, prompt_positions: int) -> DecoderState:
        """The state before the first frame: after the voice prompt (37, Q) and so many prompt positions.

        It depends on nothing else, so the last few are kept.
        """
        layout, voice = self._model.backbone.layout, self._after_voice_prompt(columns)
        # Position 0 of the timeline makes no step.
        if prompt_positions <= 1:
            return DecoderState.open(voice, layout, session_key(seed))
        name = (seed, prompt_positions, columns.tobytes())
        snapshot = self._snapshots.get(name)
        if snapshot is not None:
            return DecoderState.open(snapshot, layout)
        state = DecoderState.open(voice, layout, session_key(seed))
        for _ in range(prompt_positions - 1):
            self.advance(state, self.ids.pad)
        self._snapshots.put(name, state.snapshot(layout))
        return state

    def advance(self, state: DecoderState, text_id: int) -> np.ndarray:
        """One step of ``state`` in place -> (Q,) int32 codes; everything is evaluated."""
        if text_id == self.ids.eos:
            state.code_sum = self.silence_sum
        state.caches = self._model.backbone.layout.make_room(state.caches, state.position)
        if self._step is None:
            self._step = compiled(self._model.guided_step)
        # Nothing but the graph holds the old buffers when it is evaluated, so they are written in place.
        codes, state.code_sum, state.key, state.caches = self._step(*self._inputs(state, text_id))
        mx.eval(codes, state.code_sum, state.key, state.caches)
        state.position += 1
        return np.array(codes).astype(np.int32).reshape(-1)

    def _trace_later_sizes(self, state: DecoderState) -> None:
        """Let no frame wait while MLX traces the step for buffers that have doubled. Nothing is evaluated."""
        assert self._step is not None, "prompt positions were stepped"
        for caches in self._model.backbone.layout.later_sizes(state.caches):
            self._step(*self._inputs(replace(state, caches=caches), self.ids.pad))

    def _inputs(self, state: DecoderState, text_id: int) -> tuple[Any, ...]:
        """What the step takes: see :meth:`EarTts.guided_step`."""
        position, slots = mx.array([state.position], mx.int32), self._model.backbone.layout.slots(state.position)
        return state.code_sum, self._rows(text_id), position, slots, state.key, state.caches

    def _after_voice_prompt(self, columns: np.ndarray) -> Snapshot:
        """Prompt codes (37, Q) -> the state before the first step, its key left open."""
        name = columns.tobytes()
        if self._voice is None or self._voice[0] != name:
            pads = [self.ids.pad] * PROMPT_POSITIONS
            text = self._model.text_rows(pads, [self._spelling(self.ids.pad)] * 2)
            _, entries = self._model.prefill(mx.array(columns)[None], text, self._decoder.audio_prompt_latents.Aria)
            mx.eval(entries)
            self._voice = name, Snapshot(self._mask_sum, PROMPT_POSITIONS, session_key(0), entries)
        return self._voice[1]

    def _rows(self, text_id: int) -> mx.array:
        """Text rows (2, 1, H) of one id."""
        rows = self._text_rows.get(text_id)
        if rows is None:
            rows = self._model.text_rows([text_id], [self._spelling(text_id)])
            mx.eval(rows)
            self._text_rows[text_id] = rows
        return rows

    def _prompt_columns(self, codes: np.ndarray | None) -> np.ndarray:
        """Codes of silence (38, Q) -> the prompt's (37, Q): the first and the last column masked, one dropped."""
        config = self._model.config
        shape = (PROMPT_POSITIONS + _EXTRA_CODES, config.num_quantizers)
        if codes is None or codes.shape != shape:
            seen = "none" if codes is None else f"shape {codes.shape}"
            raise ConfigError(f"tts needs the codec's codes of silence, shape {shape}, to open a session; got {seen}")
        if codes.min() < 0 or codes.max() >= config.codebook_size:
            raise ConfigError(
                f"tts got codes of silence from {codes.min()} to {codes.max()}; accepted: 0 to {config.codebook_size - 1}"
            )
        columns = codes[:PROMPT_POSITIONS].astype(np.int32)
        columns[[0, -1]] = config.codebook_size
        return columns


class TtsSession:
    """One session. ``first_codes``: what frame 0 sends without a step, None when a prompt came before it."""

    def __init__(
        self,
        stage: TtsStage,
        seed: int,
        columns: np.ndarray,
        prompt_positions: int,
        first_codes: np.ndarray | None,
    ) -> None:
        self._stage = stage
        self._prompt = (seed, columns, prompt_positions)
        self._first_codes = first_codes
        self._state: DecoderState | None = None

    @property
    def state(self) -> DecoderState:
        """What the next step goes on from."""
        assert self._state is not None, "prefill() comes before the first step"
        return self._state

    def prefill(self) -> None:
        """Voice prompt and prompt positions."""
        self._state = self._stage.start(*self._prompt)

    def step(self, message: TextStep, emit: Emitter) -> None:
        """One text id -> the codes of its frame, control codes not replaced."""
        with emit.span("tts"):
            if self._first_codes is not None:
                codes, self._first_codes = self._first_codes, None
            else:
                codes = self._stage.advance(self.state, message.text_id)
        emit.send(Codes(codes))

    def end(self, emit: Emitter) -> None:
        """Nothing is due: every frame was answered in its own step."""
