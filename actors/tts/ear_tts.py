"""The speech decoder: one guided step turns the previous frame's codes and a text id into the next frame's codes.

Codes travel from step to step as their *code sum* (1, 1, Z) float32: the entries of all chosen codes added in codebook order,
which is all that the next step wants to know of them. The mask codes that stand before the first step sum to zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.product import product
from vcpipe.actors.tts.backbone import Backbone
from vcpipe.actors.tts.char_encoder import CharAwareEncoder
from vcpipe.actors.tts.codebooks import depth_sum
from vcpipe.actors.tts.config import PROMPT_POSITIONS, TtsConfig
from vcpipe.actors.tts.layers import OffsetNorm, matrix_of, prepare_layers, settle
from vcpipe.actors.tts.mog import MogHead
from vcpipe.actors.tts.passes import CudaPass, PlainPass
from vcpipe.actors.tts.rng import draws


class GatedFusion(nn.Module):
    """Weighs code embedding against text condition with a learned gate."""

    def __init__(self, dims: int, codebooks: int, eps: float) -> None:
        super().__init__()
        self.codebooks = codebooks
        self.audio_proj = nn.Linear(dims, dims)
        self.text_proj = nn.Linear(dims, dims)
        self.gate = mx.zeros((dims,))
        self.residual_scale = mx.array(0.5)
        self.final_norm = OffsetNorm(dims, eps)
        self._gates = (self.gate, self.residual_scale)

    def prepare(self) -> None:
        """Evaluate the gates, in the stored dtype."""
        self.audio = matrix_of(self.audio_proj)
        self._gates = (mx.sigmoid(self.gate).astype(mx.float32), mx.sigmoid(self.residual_scale).astype(mx.float32))
        settle(self, "audio_proj")

    def __call__(self, audio: mx.array, text: mx.array) -> mx.array:
        """Code embedding (1, T, H) float32, what ``text_proj`` made of the condition (2, T, H) -> rows (1, 2 * T, H)."""
        audio = product(audio / self.codebooks, self.audio)
        gate, scale = self._gates
        fused = scale * (gate * audio + (1.0 - gate) * text)
        return self.final_norm(fused.reshape(1, -1, fused.shape[-1]))


class EarTts(nn.Module):
    """Backbone, text condition and code refinement. Call ``prepare`` once the weights are loaded.

    ``history``: see :class:`Backbone`.
    """

    def __init__(self, config: TtsConfig, history: int | None = None) -> None:
        super().__init__()
        dims = config.hidden_size
        self.config = config
        self.passes = config.codebooks_per_pass()
        self.backbone = Backbone(config, history)
        self.bos_emb = mx.zeros((dims,))
        self.null_emb = mx.zeros((dims,))
        self.embed_code = nn.Linear(config.latent_size, dims, bias=False)
        #: Part of the checkpoint; the recorded prompt latents stand in for what it would compute.
        self.audio_prompt_projection_W = mx.zeros((dims, dims))
        self.rvq_embs = mx.zeros((config.num_quantizers, config.codebook_size, config.latent_size))
        self.embed_subword = CharAwareEncoder(config.character_encoder, dims)
        self.gated_fusion_audio_text = GatedFusion(dims, config.num_quantizers, config.rms_norm_eps)
        self.mog_head = MogHead(config)
        self._pass: CudaPass | PlainPass | None = None

    def prepare(self) -> None:
        """Derive everything that depends on the weights alone; what it stands in for is let go."""
        prepare_layers(self)
        self.embedding = matrix_of(self.embed_code)
        kind = CudaPass if CudaPass.usable(self.config) else PlainPass
        self._pass = kind(self.config, self.mog_head, self.rvq_embs)
        settle(self, "embed_code", "rvq_embs", "audio_prompt_projection_W")

    # -------------------------------------------------------------------------------------------- inputs
    def text_rows(self, token_ids: Sequence[int], spellings: Sequence[list[int]]) -> mx.array:
        """Projected condition (2, T, H) float32 of T ids: the text's, then the empty one's. See :class:`CharAwareEncoder`."""
        condition = self.embed_subword(token_ids, spellings)
        rows = mx.concatenate([condition, mx.broadcast_to(self.null_emb, condition.shape)], axis=0)
        return self.gated_fusion_audio_text.text_proj(rows).astype(mx.float32)

    def code_sum(self, codes: mx.array) -> mx.array:
        """Codes (..., Q) -> their entries summed, (..., Z) float32."""
        return depth_sum(self._prepared_pass().entries, codes)

    def _prepared_pass(self) -> CudaPass | PlainPass:
        assert self._pass is not None, "prepare() comes before the first call"
        return self._pass

    # -------------------------------------------------------------------------------------------- steps
    def prefill(self, codes: mx.array, text: mx.array, latents: mx.array) -> tuple[mx.array, list[mx.array]]:
        """The voice prompt: codes (1, 37, Q), text rows (2, 37, H), latents (1, 37, H).

        -> hidden (1, 2 * 37, H), what each layer's slots shall hold. The latents stand for every position but the last,
        which gets the code before it and the begin-of-speech mark.
        """
        shifted = mx.concatenate([mx.zeros_like(codes[:, :1]), codes[:, :-1]], axis=1)
        embedded = product(self.code_sum(shifted), self.embedding)
        audio = mx.concatenate([latents.astype(embedded.dtype)[:, :-1], embedded[:, -1:] + self.bos_emb], axis=1)
        return self.backbone.prefill(self.gated_fusion_audio_text(audio, text))

    def guided_step(
        self,
        code_sum: mx.array,
        text: mx.array,
        position: mx.array,
        slots: Sequence[mx.array],
        key: mx.array,
        caches: Sequence[mx.array],
    ) -> tuple[mx.array, mx.array, mx.array, list[mx.array]]:
        """Previous code sum (1, 1, Z), text rows (2, 1, H), position (1,), its slots -> codes (1, 1, Q), code sum, key, caches.

        A function of arrays to arrays, so that it can be compiled. The codes are whole numbers in float32.
        """
        hidden, caches = self.advance(code_sum, text, position, slots, caches)
        codes, code_sum, key = self.refine(hidden, key)
        return codes, code_sum, key, caches

    def advance(
        self,
        code_sum: mx.array,
        text: mx.array,
        position: mx.array,
        slots: Sequence[mx.array],
        caches: Sequence[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        """The step's backbone half: -> hidden (1, 2, H), caches."""
        fused = self.gated_fusion_audio_text(product(code_sum, self.embedding), text)
        return self.backbone.step(fused, position, slots, caches)

    def refine(self, hidden: mx.array, key: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """The step's other half: hidden (1, 2, H) -> codes (1, 1, Q), their code sum (1, 1, Z), key.

        Iterative refinement as in MaskGIT: every pass predicts a continuous code for what is still missing, given the codes
        fixed so far, and fixes the next few codebooks. A pass draws twice, one uniform array and one normal.
        """
        one_pass, config = self._prepared_pass(), self.config
        key, drawn = draws(key, len(self.passes), config.mog_head.num_predictions, config.latent_size)
        choice: mx.array | None = None
        done = 0
        for count, (uniform, normal) in zip(self.passes, drawn, strict=True):
            # Nothing chosen embeds to zero.
            given = hidden if choice is None else product(one_pass.rows_of(choice), self.embedding, residual=hidden)
            choice = one_pass(given, uniform, normal, choice, done, count)
            done += count
        assert choice is not None, "the schedule has a pass"
        return one_pass.codes_of(choice), one_pass.sum_of(choice), key


class PromptLatents(nn.Module):
    """The recorded voice prompt."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.Aria = mx.zeros((1, PROMPT_POSITIONS, dims))


class SpeechDecoder(nn.Module):
    """Everything the checkpoint holds for this stage, under its names. ``history``: see :class:`Backbone`."""

    def __init__(self, config: TtsConfig, history: int | None = None) -> None:
        super().__init__()
        self.tts_model = EarTts(config, history)
        self.audio_prompt_latents = PromptLatents(config.hidden_size)
        self.codec_silence_tokens = mx.zeros((config.num_quantizers,), mx.int32)
