"""Text condition of the speech decoder: one row for every token id, from how the token is spelled and what kind it is.

The T5Gemma-type character encoder of ``vcpipe.actors.tts.char_encoder`` in PyTorch. A token's row depends on its id alone, so
training computes the rows of the whole vocabulary once a step and looks them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

#: What a checkpoint's config leaves out.
EPS, SCORE_SCALE, SCORE_CAP, ROTARY_BASE, CHARACTERS = 1e-6, 256.0**-0.5, 50.0, 10_000.0, 257

#: Value of a score that the softmax must not see.
_NEVER = -1e30


class OffsetNorm(nn.Module):
    """RMS norm scaled by 1 + weight, (..., D) -> same. ``start``: first value of all weights."""

    def __init__(self, dims: int, start: float = 0.0, eps: float = EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dims,), start))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, 1 + self.weight, self.eps)


class GatedMlp(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x)), without biases."""

    def __init__(self, dims: int, hidden_dims: int) -> None:
        super().__init__()
        self.gate_proj = linear(dims, hidden_dims)
        self.up_proj = linear(dims, hidden_dims)
        self.down_proj = linear(hidden_dims, dims)

    def forward(self, x: Tensor) -> Tensor:
        gate = functional.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


def linear(inputs: int, outputs: int, *, bias: bool = False, gain: float = 1.0) -> nn.Linear:
    """A layer whose outputs have ``gain`` times the variance of its inputs squared at first, and no bias yet."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=gain * inputs**-0.5)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def rotary(positions: Tensor, dims: int, base: float = ROTARY_BASE) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (T,), for both halves of a head: (T, 1, dims) each."""
    half = torch.arange(dims // 2, device=positions.device)
    angles = positions[:, None, None] * base ** (-half / (dims // 2))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Heads (..., T, heads, dims) turned by the angles of their positions; the two halves of a head are its coordinates."""
    first, second = x.chunk(2, dim=-1)
    return x * angles[0] + torch.cat([-second, first], dim=-1) * angles[1]


# ------------------------------------------------------------------------------------------------ spelling
def spellings(vocabulary: Mapping[str, int]) -> list[list[int]]:
    """Rows of the character table for every id. Characters are the tokens of one character, in order of their ids."""
    characters = sorted((token for token in vocabulary if len(token) == 1), key=vocabulary.__getitem__)
    row_of = {character: row for row, character in enumerate(characters)}
    by_id = sorted(vocabulary, key=vocabulary.__getitem__)
    return [[row_of[character] for character in token if character in row_of] for token in by_id]


class CharAttention(nn.Module):
    """Attention in both directions with soft-capped scores."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        dims, self.heads, self.head_dim = sizes["hidden_size"], sizes["num_attention_heads"], sizes["head_dim"]
        self.q_proj, self.k_proj, self.v_proj = (linear(dims, self.heads * self.head_dim) for _ in range(3))
        self.o_proj = linear(self.heads * self.head_dim, dims)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """x (N, L, H), valid (N, L) bool -> (N, L, H)."""
        angles = rotary(torch.arange(x.shape[1], device=x.device), self.head_dim)
        queries, keys, values = (
            projection(x).unflatten(-1, (self.heads, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = torch.einsum("nqhd,nkhd->nhqk", turned(queries, angles), turned(keys, angles)) * SCORE_SCALE
        scores = torch.tanh(scores / SCORE_CAP) * SCORE_CAP
        weights = scores.masked_fill(~valid[:, None, None], _NEVER).softmax(dim=-1)
        return self.o_proj(torch.einsum("nhqk,nkhd->nqhd", weights, values).flatten(2))


class CharLayer(nn.Module):
    """Attention and gated MLP, each between two norms."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        dims = sizes["hidden_size"]
        self.self_attn = CharAttention(sizes)
        self.mlp = GatedMlp(dims, sizes["intermediate_size"])
        self.pre_self_attn_layernorm = OffsetNorm(dims)
        self.post_self_attn_layernorm = OffsetNorm(dims)
        self.pre_feedforward_layernorm = OffsetNorm(dims)
        self.post_feedforward_layernorm = OffsetNorm(dims)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = x + self.post_self_attn_layernorm(self.self_attn(self.pre_self_attn_layernorm(x), valid))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class CharTransformer(nn.Module):
    """Layers and final norm over character embeddings scaled by sqrt(H)."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CharLayer(sizes) for _ in range(sizes["num_hidden_layers"]))
        self.norm = OffsetNorm(sizes["hidden_size"])
        self.embed_scale = sizes["hidden_size"] ** 0.5

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = x * self.embed_scale
        for layer in self.layers:
            x = layer(x, valid)
        return self.norm(x)


class TextCondition(nn.Module):
    """Condition rows of a vocabulary: ``flags`` (V,) tells which ids continue a word (1), ``eos`` and ``bos`` are marked too.

    Its tables are those of ids below V alone; a checkpoint's are longer.
    """

    def __init__(
        self,
        sizes: Mapping[str, Any],
        dims: int,
        spelled: Sequence[list[int]],
        flags: Sequence[int],
        bos: int,
        eos: int,
    ) -> None:
        super().__init__()
        inner, count = sizes["hidden_size"], sizes.get("char_vocab_size", CHARACTERS)
        self.embed_tokens = nn.Embedding(count, inner)
        nn.init.normal_(self.embed_tokens.weight, std=inner**-0.5)
        self.backbone = nn.ModuleDict({"encoder": CharTransformer(sizes)})
        self.proj_embedding = linear(inner, dims)
        self.subword_flag_emb = nn.ModuleDict({"cont_emb": nn.Embedding(2, dims)})
        self.bos_eos_emb = nn.ModuleDict({"special_emb": nn.Embedding(3, dims)})
        for table in (self.subword_flag_emb["cont_emb"], self.bos_eos_emb["special_emb"]):
            nn.init.normal_(table.weight, std=0.5)
        longest = max(1, *(len(rows) for rows in spelled))
        padded = [rows + [count - 1] * (longest - len(rows)) for rows in spelled]
        kinds = [(i == bos) + 2 * (i == eos) for i in range(len(spelled))]
        for name, values in (("_characters", padded), ("_flags", list(flags)), ("_kinds", kinds)):
            self.register_buffer(name, torch.tensor(values), persistent=False)
        self.register_buffer("_lengths", torch.tensor([[len(rows)] for rows in spelled]), persistent=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        """-> condition (V, H) of every id, and what a position has that is not spelled (V, H)."""
        valid = torch.arange(self._characters.shape[1], device=self._lengths.device) < self._lengths  # (V, L)
        encoded = self.backbone["encoder"](self.embed_tokens(self._characters), valid)
        mean = (encoded * valid[..., None]).sum(dim=1) / self._lengths.clamp(min=1)
        marks = self.subword_flag_emb["cont_emb"](self._flags) + self.bos_eos_emb["special_emb"](self._kinds)
        return self.proj_embedding(mean) + marks, marks
