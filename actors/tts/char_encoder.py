"""Character-aware text condition: how a token is spelled, and whether it continues a word or is BOS or EOS.

A T5Gemma-type encoder reads the characters of one token in both directions; its mean becomes the token's embedding. All of
it runs in the dtype of the character table (bfloat16 in the public checkpoints).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.tts.config import FLAGGED_IDS, CharEncoderConfig
from vcpipe.actors.tts.layers import GatedMlp, OffsetNorm, merge_heads, split_heads
from vcpipe.schemas.errors import ConfigError


class Spelling:
    """Characters of every token, as rows of the character table.

    ``vocabulary``: token -> id, added tokens included. The characters are its one-character tokens in order of their ids;
    with the padding character they must be ``char_vocab_size``. Other characters of a token are skipped.
    """

    def __init__(self, vocabulary: Mapping[str, int], char_vocab_size: int) -> None:
        characters = sorted((token for token in vocabulary if len(token) == 1), key=vocabulary.__getitem__)
        if len(characters) + 1 != char_vocab_size:
            raise ConfigError(
                f"the tokenizer has {len(characters)} single-character tokens, but the speech decoder's character table has "
                f"{char_vocab_size} rows: one for each of them and one for padding. The tokenizer is not this checkpoint's"
            )
        self._row_of = {character: row for row, character in enumerate(characters)}
        self._token_of = {token_id: token for token, token_id in vocabulary.items()}

    def __call__(self, token_id: int) -> list[int]:
        """Character rows of a token; none for an unknown id."""
        token = self._token_of.get(token_id, "")
        return [self._row_of[character] for character in token if character in self._row_of]


class CharAttention(nn.Module):
    """Bidirectional attention with soft-capped scores."""

    def __init__(self, config: CharEncoderConfig) -> None:
        super().__init__()
        dims, head_dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = config.query_pre_attn_scalar**-0.5
        self.softcap = config.attn_logit_softcapping
        self.q_proj = nn.Linear(dims, self.heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dims, self.kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dims, self.kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * head_dim, dims, bias=False)
        self.rope = nn.RoPE(head_dim, traditional=False, base=config.rope_theta)

    def __call__(self, x: mx.array, valid: mx.array) -> mx.array:
        """x (N, L, H), valid (N, L) bool -> (N, L, H)."""
        queries = self.rope(split_heads(self.q_proj(x), self.heads))
        keys = self.rope(split_heads(self.k_proj(x), self.kv_heads))
        values = split_heads(self.v_proj(x), self.kv_heads)
        groups = self.heads // self.kv_heads
        keys, values = mx.repeat(keys, groups, axis=1), mx.repeat(values, groups, axis=1)
        scores = (queries @ keys.swapaxes(-1, -2)) * self.scale
        scores = mx.tanh(scores / self.softcap) * self.softcap
        scores = mx.where(valid[:, None, None], scores, -1e30)
        weights = mx.softmax(scores.astype(mx.float32), axis=-1).astype(queries.dtype)
        return self.o_proj(merge_heads(weights @ values))


class CharLayer(nn.Module):
    """Attention and gated MLP, each between two norms."""

    def __init__(self, config: CharEncoderConfig) -> None:
        super().__init__()
        dims, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = CharAttention(config)
        self.mlp = GatedMlp(dims, config.intermediate_size)
        self.pre_self_attn_layernorm = OffsetNorm(dims, eps)
        self.post_self_attn_layernorm = OffsetNorm(dims, eps)
        self.pre_feedforward_layernorm = OffsetNorm(dims, eps)
        self.post_feedforward_layernorm = OffsetNorm(dims, eps)

    def __call__(self, x: mx.array, valid: mx.array) -> mx.array:
        attended = self.self_attn(self.pre_self_attn_layernorm(x), valid)
        x = x + self.post_self_attn_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class CharTransformer(nn.Module):
    """Layers and final norm over character embeddings scaled by sqrt(H)."""

    def __init__(self, config: CharEncoderConfig) -> None:
        super().__init__()
        self.layers = [CharLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.embed_scale = config.hidden_size**0.5

    def __call__(self, x: mx.array, valid: mx.array) -> mx.array:
        x = x * mx.array(self.embed_scale, x.dtype)
        for layer in self.layers:
            x = layer(x, valid)
        return self.norm(x)


class CharBackbone(nn.Module):
    """Holds the encoder under the name the checkpoint gives it."""

    def __init__(self, config: CharEncoderConfig) -> None:
        super().__init__()
        self.encoder = CharTransformer(config)


class ContinuationFlags(nn.Module):
    """Embedding of "continues a word"; ids beyond the table use its last row, ``pad_tensor``."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pad_tensor = mx.array(FLAGGED_IDS, mx.int32)
        self.is_continuation = mx.zeros((FLAGGED_IDS + 1,), mx.int32)
        self.cont_emb = nn.Embedding(2, dims)

    def __call__(self, ids: mx.array) -> mx.array:
        return self.cont_emb(self.is_continuation[mx.where(ids >= FLAGGED_IDS, self.pad_tensor, ids)])


class SpecialFlags(nn.Module):
    """Embedding of ordinary / BOS / EOS; ids beyond the table use row ``pad_tensor``."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pad_tensor = mx.array(FLAGGED_IDS - 1, mx.int32)
        self.special_flags = mx.zeros((FLAGGED_IDS,), mx.int32)
        self.special_emb = nn.Embedding(3, dims)

    def __call__(self, ids: mx.array) -> mx.array:
        return self.special_emb(self.special_flags[mx.where(ids >= FLAGGED_IDS, self.pad_tensor, ids)])


class CharAwareEncoder(nn.Module):
    """Token ids and their spellings -> condition."""

    def __init__(self, config: CharEncoderConfig, dims: int) -> None:
        super().__init__()
        self.padding = config.char_vocab_size - 1
        self.embed_tokens = nn.Embedding(config.char_vocab_size, config.hidden_size)
        self.backbone = CharBackbone(config)
        self.proj_embedding = nn.Linear(config.hidden_size, dims, bias=False)
        self.subword_flag_emb = ContinuationFlags(dims)
        self.bos_eos_emb = SpecialFlags(dims)

    def __call__(self, token_ids: Sequence[int], spellings: Sequence[list[int]]) -> mx.array:
        """``token_ids`` of T positions; ``spellings`` of the last of them, the others get only flags. -> (1, T, H)."""
        unspelled = len(token_ids) - len(spellings)
        spelled = self._spelled(spellings)[None]
        silent = mx.zeros((1, unspelled, spelled.shape[-1]), spelled.dtype)
        ids = mx.array([token_ids], mx.int32)
        return mx.concatenate([silent, spelled], axis=1) + self.subword_flag_emb(ids) + self.bos_eos_emb(ids)

    def _spelled(self, spellings: Sequence[list[int]]) -> mx.array:
        """Character rows of N tokens -> (N, H): the mean over the encoded characters, projected."""
        longest = max(1, *(len(rows) for rows in spellings))
        padded = mx.array([rows + [self.padding] * (longest - len(rows)) for rows in spellings], mx.int32)  # (N, L)
        lengths = mx.array([[len(rows)] for rows in spellings], mx.int32)  # (N, 1)
        valid = mx.arange(longest)[None] < lengths  # (N, L)
        encoded = self.backbone.encoder(self.embed_tokens(padded), valid)  # (N, L, H)
        mean = mx.sum(encoded * valid[..., None], axis=1) / mx.maximum(lengths, 1)
        return self.proj_embedding(mean)
