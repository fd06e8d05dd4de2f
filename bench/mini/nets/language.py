"""Nemotron-H in PyTorch as it is trained: the language actor's network, with batch, gradients and dropout.

Mamba-2 (Dao and Gu, 2024), attention without positions and squared-ReLU blocks in the order of a pattern (Nemotron-H, NVIDIA,
2025). Modules bear the checkpoint's names below ``stt_model.``; the projection of the encoder's frames (``perception.proj``)
is learnt here too. ``forward`` takes whole timelines, ``step`` one position and the blocks' states; both compute the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vcpipe.bench.mini.shape import PAD

#: Positions treated at once by a Mamba-2 block: work within them is quadratic.
BLOCK = 256

#: What a block remembers. Mamba-2: the last kernel - 1 raw inputs of its convolution (B, kernel - 1, C) and the state
#: (B, G, R, P, N). Attention: keys and values (B, kv_heads, positions, head_dim), filled from the front. MLP: nothing.
State = tuple[Tensor, ...]


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class Mamba(nn.Module):
    """Per head: S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T,  y_t = S_t C_t + D x_t; H heads share G groups of B and C."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.head, self.columns = text["mamba_num_heads"], text["mamba_head_dim"], text["ssm_state_size"]
        self.groups, self.kernel, self.eps = text["n_groups"], text["conv_kernel"], text["layer_norm_epsilon"]
        self.inner = self.heads * self.head
        self.channels = self.inner + 2 * self.groups * self.columns
        self.in_proj = nn.Linear(text["hidden_size"], self.inner + self.channels + self.heads, bias=False)
        self.conv1d = nn.Conv1d(self.channels, self.channels, self.kernel, groups=self.channels)
        # Time constants from a few frames to some tens of seconds, as the paper's code draws them.
        steps = torch.exp(torch.empty(self.heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the step
        self.A_log = nn.Parameter(torch.log(torch.empty(self.heads).uniform_(1, 16)))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = RmsNorm(self.inner, self.eps)
        self.out_proj = nn.Linear(self.inner, text["hidden_size"], bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden)."""
        gate, raw, dt = self._project(h)
        mixed = self._convolve(F.pad(raw, (0, 0, self.kernel - 1, 0)), h.shape[1])
        return self._finish(self._scan(mixed, dt), gate)

    def step(self, h: Tensor, state: State, at: int) -> tuple[Tensor, State]:
        """(B, 1, hidden) -> (B, 1, hidden)."""
        past, s = state
        gate, raw, dt = self._project(h)
        window = torch.cat([past, raw], dim=1)
        x, b, c = self._heads_of(self._convolve(window, 1))  # (B, 1, G, R, P) and (B, 1, G, N) twice
        dt, log_decay = self._steps(dt)  # (B, 1, G, R)
        added = (dt[..., None] * x)[:, 0, ..., None] * b[:, 0, :, None, None]
        s = torch.exp(log_decay)[:, 0, ..., None, None] * s + added
        y = (s @ c[:, 0, :, None, :, None]).squeeze(-1)[:, None] + x * self._skip()
        return self._finish(y, gate), (window[:, 1:], s)

    def empty(self, batch: int, positions: int, like: Tensor) -> State:
        raw = like.new_zeros(batch, self.kernel - 1, self.channels)
        return raw, like.new_zeros(batch, self.groups, self.heads // self.groups, self.head, self.columns)

    def _project(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gate (B, T, inner), raw convolution input (B, T, C), dt (B, T, H)."""
        gate, raw, dt = self.in_proj(h).split([self.inner, self.channels, self.heads], dim=-1)
        return gate, raw, dt

    def _convolve(self, window: Tensor, positions: int) -> Tensor:
        """(B, T + kernel - 1, C) -> (B, T, C). Shifted products: depthwise convolutions have slow gradients."""
        taps = self.conv1d.weight[:, 0]  # (C, kernel)
        assert self.conv1d.bias is not None
        mixed = torch.addcmul(self.conv1d.bias, window[:, :positions], taps[:, 0])
        for i in range(1, self.kernel):
            mixed = torch.addcmul(mixed, window[:, i : i + positions], taps[:, i])
        return F.silu(mixed)

    def _heads_of(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, C) -> x (B, T, G, R, P), B and C (B, T, G, N)."""
        x, b, c = mixed.split([self.inner, self.groups * self.columns, self.groups * self.columns], dim=-1)
        x = x.unflatten(-1, (self.groups, self.heads // self.groups, self.head))
        return x, b.unflatten(-1, (self.groups, self.columns)), c.unflatten(-1, (self.groups, self.columns))

    def _steps(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Projected dt (B, T, H) -> step sizes and their log decay dt A, (B, T, G, R) each."""
        dt = F.softplus(dt + self.dt_bias)
        log_decay = dt * -torch.exp(self.A_log)
        shape = (self.groups, self.heads // self.groups)
        return dt.unflatten(-1, shape), log_decay.unflatten(-1, shape)

    def _skip(self) -> Tensor:
        return self.D.view(self.groups, self.heads // self.groups, 1)

    def _scan(self, mixed: Tensor, dt: Tensor) -> Tensor:
        """All positions from an empty state, block by block: (B, T, C), (B, T, H) -> y (B, T, G, R, P)."""
        x, b, c = self._heads_of(mixed)
        dt, log_decay = self._steps(dt)
        values = (dt[..., None] * x).permute(0, 2, 3, 1, 4)  # (B, G, R, T, P)
        log_decay = log_decay.permute(0, 2, 3, 1)  # (B, G, R, T)
        b, c = b.transpose(1, 2), c.transpose(1, 2)  # (B, G, T, N)
        outputs: list[Tensor] = []
        state: Tensor | None = None
        for start in range(0, x.shape[1], BLOCK):
            part = slice(start, start + BLOCK)
            last = start + BLOCK >= x.shape[1]
            y, state = _scan_block(
                values[..., part, :], log_decay[..., part], b[:, :, part], c[:, :, part], state, last
            )
            outputs.append(y)
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)
        return torch.addcmul(y.permute(0, 3, 1, 2, 4), x, self._skip())

    def _finish(self, y: Tensor, gate: Tensor) -> Tensor:
        """y (B, T, G, R, P) -> (B, T, hidden): gate first, then a norm over each group."""
        gated = F.silu(gate) * y.flatten(2)
        grouped = gated.unflatten(-1, (self.groups, self.inner // self.groups))
        normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(2) * self.norm.weight
        return self.out_proj(normed)


def _scan_block(
    values: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor | None, last: bool
) -> tuple[Tensor, Tensor | None]:
    """Quadratic form of one block: dt x (B, G, R, S, P), dt A (B, G, R, S), B and C (B, G, S, N) -> y and the next state.

    ``state`` (B, G, R, P, N) or None for an empty one; behind the ``last`` block no state is computed.
    """
    total = log_decay.cumsum(-1)  # from the block's start
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    # Masked before the exponential: above the diagonal it would overflow.
    between = torch.exp((total[..., :, None] - total[..., None, :]).masked_fill(later, -math.inf))  # (B, G, R, S, S)
    y = ((c @ b.transpose(2, 3))[:, :, None] * between) @ values
    if state is not None:
        y = y + torch.exp(total)[..., None] * (c[:, :, None] @ state.transpose(3, 4))
    if last:
        return y, None
    added = (values * between[..., -1, :, None]).transpose(3, 4) @ b[:, :, None]  # (B, G, R, P, N)
    return y, added if state is None else added + torch.exp(total[..., -1])[..., None, None] * state


class Attention(nn.Module):
    """Grouped-query attention over all positions so far."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.head = text["hidden_size"], text["head_dim"]
        self.heads, self.kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, self.heads * self.head, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head, hidden, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden)."""
        q, k, v = (self._split(projection(h)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self._join(F.scaled_dot_product_attention(q, self._shared(k), self._shared(v), is_causal=True))

    def step(self, h: Tensor, state: State, at: int) -> tuple[Tensor, State]:
        """(B, 1, hidden) -> (B, 1, hidden). Keys and values are written in place."""
        keys, values = state
        q, k, v = (self._split(projection(h)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        keys[:, :, at], values[:, :, at] = k[:, :, 0], v[:, :, 0]
        seen = self._shared(keys[:, :, : at + 1]), self._shared(values[:, :, : at + 1])
        return self._join(F.scaled_dot_product_attention(q, *seen)), state

    def empty(self, batch: int, positions: int, like: Tensor) -> State:
        shape = (batch, self.kv_heads, positions, self.head)
        return like.new_zeros(shape), like.new_zeros(shape)

    def _split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.head)).transpose(1, 2)

    def _shared(self, rows: Tensor) -> Tensor:
        """(B, kv_heads, T, D) -> (B, heads, T, D): each key and value head serves several query heads."""
        return rows.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def _join(self, attended: Tensor) -> Tensor:
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers around a squared ReLU."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        self.up_proj = nn.Linear(text["hidden_size"], text["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(text["intermediate_size"], text["hidden_size"], bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(h)).square())

    def step(self, h: Tensor, state: State, at: int) -> tuple[Tensor, State]:
        return self(h), state

    def empty(self, batch: int, positions: int, like: Tensor) -> State:
        return ()


_MIXERS: dict[str, type[Mamba | Attention | Mlp]] = {"M": Mamba, "*": Attention, "-": Mlp}


class Block(nn.Module):
    """x + dropout(mixer(norm(x))); dropout in training only."""

    def __init__(self, text: dict[str, Any], letter: str, dropout: float) -> None:
        super().__init__()
        self.norm = RmsNorm(text["hidden_size"], text["layer_norm_epsilon"])
        self.mixer = _MIXERS[letter](text)
        self._dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mixer(self.norm(x)), self._dropout, self.training)

    def step(self, x: Tensor, state: State, at: int) -> tuple[Tensor, State]:
        mixed, state = self.mixer.step(self.norm(x), state, at)
        return x + mixed, state


class Backbone(nn.Module):
    def __init__(self, text: dict[str, Any], dropout: float) -> None:
        super().__init__()
        pattern = text["hybrid_override_pattern"]
        self.layers = nn.ModuleList([Block(text, letter, dropout) for letter in pattern])
        self.norm_f = RmsNorm(text["hidden_size"], text["layer_norm_epsilon"])


class Projection(nn.Module):
    """What of the perception is learnt with the language model: encoder frames to its width."""

    def __init__(self, encoder: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(encoder, hidden)


class Language(nn.Module):
    """Projection, embedding, backbone and the two heads. ``config``: a runtime config."""

    def __init__(self, config: dict[str, Any], *, dropout: float = 0.0) -> None:
        super().__init__()
        text, audio = config["text_config"], config["audio_config"]
        hidden, vocabulary = text["hidden_size"], text["vocab_size"]
        self.function_weight = config["function_channel_weight"]
        self.vocabulary = vocabulary
        self.perception = Projection(audio["encoder"]["d_model"], hidden)
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.llm = Backbone(text, dropout)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        self.function_head = nn.Linear(hidden, vocabulary, bias=False)
        self._start()

    def _start(self) -> None:
        """Weights before training: unit activations, quiet blocks, and a PAD that says next to nothing."""
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=module.in_features**-0.5)
            for block in self.llm.layers:
                for name, matrix in block.named_parameters():
                    if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                        matrix.mul_(len(self.llm.layers) ** -0.5)
            nn.init.zeros_(self.perception.proj.bias)
            nn.init.normal_(self.embed_tokens.weight, std=0.5)
            self.embed_tokens.weight[PAD] *= 0.05
            for head in (self.lm_head, self.function_head):
                head.weight.mul_(0.3)

    # -------------------------------------------------------------------------------------------- all positions
    def fuse(self, encoded: Tensor, text: Tensor, prompt: Tensor | None = None) -> Tensor:
        """Input rows: encoder frames (B, T, encoder) and previous text ids (B, T); previous function ids are all PAD.

        ``prompt`` (B, T): ids of a system prompt, which take the audio's place where they are 0 or more.
        """
        rows = self.perception.proj(encoded)
        if prompt is not None:
            rows = torch.where(prompt[..., None] >= 0, self.embed_tokens(prompt.clamp(min=0)), rows)
        return self.embed_tokens(text) + rows + self.function_weight * self.embed_tokens.weight[PAD]

    def hidden(self, fused: Tensor, *before: int) -> tuple[Tensor, ...]:
        """(B, T, hidden) -> the same behind the final norm, and what stands ``before`` blocks of these numbers."""
        x, inside = fused, {}
        for i, block in enumerate(self.llm.layers):
            inside[i] = x
            x = block(x)
        return self.llm.norm_f(x), *(inside[i] for i in before)

    def forward(self, encoded: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Text and function logits (B, T, vocabulary) of encoder frames and the previous text ids."""
        (hidden,) = self.hidden(self.fuse(encoded, text))
        return self.lm_head(hidden), self.function_head(hidden)

    # -------------------------------------------------------------------------------------------- one position
    def empty(self, batch: int, positions: int) -> list[State]:
        """The blocks' states before the first of at most ``positions``."""
        like = self.embed_tokens.weight
        return [block.mixer.empty(batch, positions, like) for block in self.llm.layers]

    def step(
        self, encoded: Tensor, text: Tensor, function: Tensor, states: list[State], at: int
    ) -> tuple[Tensor, Tensor, list[State]]:
        """One position, number ``at``: (B, encoder) and previous ids (B,) -> text and function logits (B, vocabulary)."""
        x = self.embed_tokens(text) + self.perception.proj(encoded) + self.function_weight * self.embed_tokens(function)
        x, after = x[:, None], []
        for block, state in zip(self.llm.layers, states, strict=True):
            x, state = block.step(x, state, at)
            after.append(state)
        hidden = self.llm.norm_f(x)[:, 0]
        return self.lm_head(hidden), self.function_head(hidden), after

    @torch.no_grad()
    def run(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Free-running, greedy, as a session does it: encoder frames (B, T, encoder) -> text and function ids (B, T)."""
        batch, positions = encoded.shape[:2]
        states = self.empty(batch, positions)
        text = function = torch.full((batch,), PAD, device=encoded.device)
        texts, functions = [], []
        for at in range(positions):
            text_logits, function_logits, states = self.step(encoded[:, at], text, function, states, at)
            text, function = text_logits.argmax(-1), function_logits.argmax(-1)
            texts.append(text)
            functions.append(function)
        return torch.stack(texts, 1), torch.stack(functions, 1)
