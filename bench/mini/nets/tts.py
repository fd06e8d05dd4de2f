"""The speech decoder (EAR-TTS) in PyTorch: from the code sums of past frames and the text to the codes of every next frame.

It computes what ``vcpipe.actors.tts`` computes, for whole windows: 37 positions of the voice prompt, then one for every frame
of a session but its first. Frames are handed around as code sums (..., Z), the entries of a frame's codes added up. Every
sliding layer has the same window, and windows here are shorter than that, so attention is plainly causal; :func:`generate` may
be longer. Global layers do not attend at all: they would see a whole session, which no training shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vcpipe.bench.mini.nets.tts_mixture import MogHead, codebooks_per_pass, nearest
from vcpipe.bench.mini.nets.tts_text import EPS, SCORE_SCALE, GatedMlp, TextCondition, linear, rotary, spellings, turned
from vcpipe.bench.mini.shape import BOS, EOS, PAD, PROMPT_FRAMES
from vcpipe.bench.mini.tokens import TextTokens

#: Last positions of the prompt whose token is spelled; all positions have its flags.
_SPELLED = 2

#: First weights of the norms after attention and MLP: blocks begin near the identity.
_QUIET = -0.6

#: How far scores spread at first, for queries and keys that have nothing in common.
_SHARPNESS = 1.5

Angles = tuple[Tensor, Tensor]


class GemmaNorm(nn.Module):
    """RMS norm scaled by 1 + weight, (..., D) -> same."""

    def __init__(self, dims: int, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dims,), start))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, 1 + self.weight, EPS)


class Attention(nn.Module):
    """Attention with normalised queries and keys and rotary positions."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        dims, self.heads, self.head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
        if config["num_key_value_heads"] != self.heads:
            raise ValueError("trained with as many heads of keys and values as of queries")
        self.q_proj, self.k_proj, self.v_proj = (linear(dims, self.heads * self.head_dim) for _ in range(3))
        self.o_proj = linear(self.heads * self.head_dim, dims)
        # The scale was made for wider heads: with plain norms attention could not single out a position.
        start = (_SHARPNESS * self.head_dim**-0.5 / SCORE_SCALE) ** 0.5 - 1
        self.q_norm, self.k_norm = GemmaNorm(self.head_dim, start), GemmaNorm(self.head_dim, start)

    def forward(self, x: Tensor, angles: Angles, cache: Tensor | None = None, position: int = 0) -> Tensor:
        """x (B, T, H) -> (B, T, H). ``cache``: (2, B, heads, capacity, D), to be written from ``position`` on.

        With a cache, T is 1 or the positions are the first ones.
        """
        queries, keys, values = self._heads(x, angles)  # (B, heads, T, D)
        is_causal = x.shape[1] > 1
        if cache is not None:
            end = position + x.shape[1]
            cache[:, :, :, position:end] = torch.stack([keys, values])
            if not is_causal:
                keys, values = cache[:, :, :, :end]
        found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=is_causal, scale=SCORE_SCALE)
        return self.o_proj(found.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, angles: Angles) -> tuple[Tensor, ...]:
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        heads = functional.linear(x, weight).unflatten(-1, (3, self.heads, self.head_dim))  # (B, T, 3, heads, D)
        gains = 1 + torch.stack([self.q_norm.weight, self.k_norm.weight])[:, None]  # (2, 1, D)
        normed = functional.rms_norm(heads[:, :, :2], (self.head_dim,), None, EPS) * gains
        cosines, sines = (part[:, None] for part in angles)  # (T, 1, 1, D)
        queries, keys = turned(normed, (cosines, sines)).unbind(dim=2)
        return tuple(part.transpose(1, 2) for part in (queries, keys, heads[:, :, 2]))


class Block(nn.Module):
    """Attention and gated MLP, each between two norms. ``attends``: else what attention finds is scaled by zero."""

    def __init__(self, config: Mapping[str, Any], dropout: float, attends: bool) -> None:
        super().__init__()
        dims = config["hidden_size"]
        self.attends = attends
        self.self_attn = Attention(config)
        self.mlp = GatedMlp(dims, config["intermediate_size"])
        self.input_layernorm = GemmaNorm(dims)
        self.post_attention_layernorm = GemmaNorm(dims, _QUIET)
        self.pre_feedforward_layernorm = GemmaNorm(dims)
        self.post_feedforward_layernorm = GemmaNorm(dims, _QUIET)
        self.dropout = nn.Dropout(dropout)
        if not attends:
            for norm in (self.input_layernorm, self.post_attention_layernorm):
                norm.weight.data.fill_(-1.0)
            for unused in (self.self_attn, self.input_layernorm, self.post_attention_layernorm):
                unused.requires_grad_(False)

    def forward(self, x: Tensor, angles: Angles, cache: Tensor | None = None, position: int = 0) -> Tensor:
        if self.attends:
            attended = self.self_attn(self.input_layernorm(x), angles, cache, position)
            x = x + self.dropout(self.post_attention_layernorm(attended))
        return x + self.dropout(self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))))


class Backbone(nn.Module):
    """All blocks and the final norm. ``window``: positions that a layer sees at most."""

    def __init__(self, config: Mapping[str, Any], dropout: float) -> None:
        super().__init__()
        layers, pattern = config["num_hidden_layers"], config["sliding_window_pattern"]
        self.window: int = config["sliding_window"]
        self.head_dim: int = config["head_dim"]
        self.layers = nn.ModuleList(Block(config, dropout, attends=(i + 1) % pattern != 0) for i in range(layers))
        self.norm = GemmaNorm(config["hidden_size"])

    def forward(self, x: Tensor, caches: Tensor | None = None, position: int = 0) -> Tensor:
        """x (B, T, H) at the positions from ``position`` on -> hidden (B, T, H).

        ``caches``: (layers, 2, B, heads, capacity, D).
        Past the window the caches must hold the last positions only: see :func:`generate`.
        """
        angles = rotary(torch.arange(position, position + x.shape[1], device=x.device), self.head_dim)
        slot = position if caches is None else min(position, caches.shape[-2] - 1)
        for index, layer in enumerate(self.layers):
            x = layer(x, angles, None if caches is None else caches[index], slot)
        return self.norm(x)


class GatedFusion(nn.Module):
    """Weighs code embedding against text condition with a learned gate."""

    def __init__(self, dims: int, codebooks: int) -> None:
        super().__init__()
        self.codebooks = codebooks
        # Code embeddings come in divided by the number of codebooks.
        self.audio_proj = linear(dims, dims, bias=True, gain=1.5 * codebooks)
        self.text_proj = linear(dims, dims, bias=True)
        self.gate = nn.Parameter(torch.zeros(dims))
        self.residual_scale = nn.Parameter(torch.tensor(0.5))
        self.final_norm = GemmaNorm(dims)

    def forward(self, audio: Tensor, text: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate)
        fused = gate * self.audio_proj(audio / self.codebooks) + (1.0 - gate) * self.text_proj(text)
        return self.final_norm(torch.sigmoid(self.residual_scale) * fused)


class EarTts(nn.Module):
    """Backbone, text condition and mixture head. ``rvq_embs`` (Q, K, Z) is the codec's, rounded as it will be stored."""

    rvq_embs: Tensor

    def __init__(self, config: Mapping[str, Any], tokens: TextTokens, dropout: float) -> None:
        super().__init__()
        dims, latent, codebooks = config["hidden_size"], config["latent_size"], config["num_quantizers"]
        vocabulary = tokens.tokenizer.get_vocab(with_added_tokens=True)
        self.passes = codebooks_per_pass(config)
        self.backbone = Backbone(config, dropout)
        self.bos_emb = nn.Parameter(torch.randn(dims) * 0.5)
        self.null_emb = nn.Parameter(torch.randn(dims) * 0.5)
        self.embed_code = linear(latent, dims)
        #: Part of the checkpoint; nothing reads it.
        self.audio_prompt_projection_W = nn.Parameter(torch.zeros(dims, dims), requires_grad=False)
        self.register_buffer("rvq_embs", torch.zeros(codebooks, config["codebook_size"], latent))
        self.embed_subword = TextCondition(
            config["character_encoder"], dims, spellings(vocabulary), tokens.continuations(), BOS, EOS
        )
        self.gated_fusion_audio_text = GatedFusion(dims, codebooks)
        self.mog_head = MogHead(config)

    def refine(
        self, hidden: Tensor, unconditional: Tensor | None, draws: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Hidden rows (N, H), guided by those without text if given -> codes (N, Q), code sums (N, Z).

        ``draws``: for every pass a uniform (N, P) and a normal (N, Z) array.
        """
        total = hidden.new_zeros(len(hidden), self.rvq_embs.shape[-1])
        codes: list[Tensor] = []
        for count, (uniform, normal) in zip(self.passes, draws, strict=True):
            given = self.embed_code(total)
            x = self.mog_head.guided(hidden + given, None if unconditional is None else unconditional + given)
            left = self.mog_head.draw(x, uniform, normal)
            for entries in self.rvq_embs[len(codes) : len(codes) + count]:
                code = nearest(left, entries)
                left, total = left - entries[code], total + entries[code]
                codes.append(code)
        return torch.stack(codes, dim=-1), total

    def draws(self, rows: int, generator: torch.Generator | None = None) -> list[tuple[Tensor, Tensor]]:
        """Random numbers for :meth:`refine`."""
        device, head = self.rvq_embs.device, self.mog_head
        return [
            (
                torch.rand(rows, head.components, device=device, generator=generator),
                torch.randn(rows, head.latent, device=device, generator=generator),
            )
            for _ in self.passes
        ]


class SpeechDecoder(nn.Module):
    """Everything that a checkpoint holds for this stage, below ``tts_model.``; integer tables excepted.

    ``silence_sum`` (Z,) is fed back when the text ends; :meth:`set_codebooks` sets it.
    """

    silence_sum: Tensor

    def __init__(self, config: Mapping[str, Any], tokens: TextTokens, dropout: float = 0.0) -> None:
        super().__init__()
        dims = config["hidden_size"]
        self.tts_model = EarTts(config, tokens, dropout)
        aria = torch.randn(1, PROMPT_FRAMES, dims) * 0.5
        self.audio_prompt_latents = nn.ParameterDict({"Aria": nn.Parameter(aria)})
        self.register_buffer("silence_sum", torch.zeros(config["latent_size"]), persistent=False)

    def set_codebooks(self, books: Tensor, silence: Tensor) -> None:
        """The codec's codebooks (Q, K, Z) and its codes (Q,) of silence."""
        model = self.tts_model
        model.rvq_embs.copy_(books.to(torch.bfloat16))
        self.silence_sum.copy_(code_sum(model.rvq_embs, silence))

    def text_table(self) -> tuple[Tensor, Tensor]:
        """See :class:`TextCondition`: it is the same for all positions of a step."""
        condition, marks = self.tts_model.embed_subword()
        return condition, marks[PAD]

    def inputs(self, previous: Tensor, text: Tensor, without_text: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """What the backbone gets: the prompt, then the frames. -> (B, 37 + T, H).

        ``previous``: code sums (B, T, Z) that the frames get, see :meth:`fed_back`; ``text``: ids (B, T);
        ``without_text``: (B,) bool, the rows that see no text; ``table``: see :meth:`text_table`.
        """
        model, (condition, unspelled) = self.tts_model, table
        batch = len(text)
        latents = self.audio_prompt_latents["Aria"][0, :-1]
        begin = model.embed_code(self.silence_sum) + model.bos_emb
        prompt = torch.cat([latents, begin[None]]).expand(batch, -1, -1)
        audio = torch.cat([prompt, model.embed_code(previous)], dim=1)
        quiet = torch.cat([unspelled.expand(PROMPT_FRAMES - _SPELLED, -1), condition[PAD].expand(_SPELLED, -1)])
        rows = torch.cat([quiet.expand(batch, -1, -1), functional.embedding(text, condition)], dim=1)
        rows = torch.where(without_text[:, None, None], model.null_emb, rows)
        return model.gated_fusion_audio_text(audio, rows)

    def fed_back(self, sums: Tensor, text: Tensor) -> Tensor:
        """Code sums (B, T, Z) of frames -> what each of them is fed: nothing first, the frame before, silence at an EOS."""
        previous = functional.pad(sums, (0, 0, 1, 0))[:, :-1]
        return torch.where((text == EOS)[..., None], self.silence_sum, previous)

    def forward(self, sums: Tensor, text: Tensor, without_text: Tensor) -> Tensor:
        """Code sums of the frames themselves (B, T, Z), their text (B, T) -> hidden (B, T, H) that predicts each frame."""
        fused = self.inputs(self.fed_back(sums, text), text, without_text, self.text_table())
        return self.tts_model.backbone(fused)[:, PROMPT_FRAMES:]


def code_sum(books: Tensor, codes: Tensor) -> Tensor:
    """Codes (..., Q) of ``books`` (Q, K, Z) -> (..., Z)."""
    total = books.new_zeros(*codes.shape[:-1], books.shape[-1])
    for entries, code in zip(books, codes.unbind(dim=-1), strict=True):
        total = total + entries[code]
    return total


@torch.no_grad()
def generate(
    decoder: SpeechDecoder, text: Tensor, *, guided: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """Let ``decoder`` speak: text ids (B, T) of the frames from a session's second on -> their code sums (B, T, Z).

    As the actor does it: guidance, nucleus, and what is said is fed back. Put the decoder into evaluation mode before.
    """
    model, (batch, frames) = decoder.tts_model, text.shape
    both = 2 if guided else 1
    without_text = torch.arange(both * batch, device=text.device) >= batch
    table = decoder.text_table()
    attention = model.backbone.layers[0].self_attn
    capacity = min(PROMPT_FRAMES + frames, model.backbone.window)
    caches = decoder.silence_sum.new_zeros(
        len(model.backbone.layers), 2, both * batch, attention.heads, capacity, attention.head_dim
    )
    nothing = decoder.silence_sum.new_zeros(both * batch, 0, decoder.silence_sum.shape[-1])
    prompt = decoder.inputs(nothing, text[:1, :0].expand(both * batch, -1), without_text, table)
    model.backbone(prompt, caches)
    condition = torch.where(without_text[:, None, None], model.null_emb, table[0][text].repeat(both, 1, 1))
    ends = (text == EOS)[..., None]
    total, sums = decoder.silence_sum.new_zeros(batch, nothing.shape[-1]), []
    for frame in range(frames):
        position = PROMPT_FRAMES + frame
        if position >= capacity:  # the oldest position leaves the window
            caches[..., :-1, :] = caches[..., 1:, :].clone()
        total = torch.where(ends[:, frame], decoder.silence_sum, total)
        audio = model.embed_code(total).repeat(both, 1)[:, None]
        fused = model.gated_fusion_audio_text(audio, condition[:, frame : frame + 1])
        hidden = model.backbone(fused, caches, position)[:, 0]
        unconditional = hidden[batch:] if guided else None
        _, total = model.refine(hidden[:batch], unconditional, model.draws(batch, generator))
        sums.append(total)
    return torch.stack(sums, dim=1)
