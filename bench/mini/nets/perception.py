"""Perception: streamed log-mel, causal FastConformer encoder, RNN-T prediction and joint networks.

The same numbers as :mod:`vcpipe.actors.perception` gives frame by frame, here for whole stretches of sound and batches of
them, with gradients. FastConformer: Rekesh et al. 2023; relative positions: Dai et al. 2019; RNN-T: Graves 2012.

B is the batch, T encoder frames (80 ms), U pieces. Frame j of the encoder is centred on sample 1280 j and depends on nothing
after mel frame 8 j, so padding after a stretch changes nothing within it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

#: Mel frames, and samples, of one encoder frame.
SUBSAMPLING, FRAME_SAMPLES = 8, 1280

#: Mean and standard deviation of the log-mel of speech at usual levels: where the weights begin.
_MEL_MEAN, _MEL_DEVIATION = -9.0, 4.0


# ------------------------------------------------------------------------------------------------ log-mel
class LogMel(nn.Module):
    """(B, n) samples at 16 kHz, -1 to 1 -> (B, 8 (n // 1280) - 7, features): what a stream of 1280-sample frames has heard."""

    window: Tensor
    filters: Tensor

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        rate = config["sample_rate"]
        self._n_fft = config["n_fft"]
        self._hop = int(config["window_stride"] * rate)
        width = int(config["window_size"] * rate)
        left = (self._n_fft - width) // 2
        hann = torch.hann_window(width, periodic=False, dtype=torch.float64).float()
        window = F.pad(hann, (left, self._n_fft - width - left))
        self.register_buffer("window", window, persistent=False)
        self.register_buffer("filters", _slaney_filters(rate, self._n_fft, config["features"]), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        half = self._n_fft // 2
        frames = SUBSAMPLING * (samples.shape[1] // FRAME_SAMPLES - 1) + 1
        emphasised = torch.cat([samples[:, :1], samples[:, 1:] - 0.97 * samples[:, :-1]], 1)
        mirrored = torch.cat([emphasised[:, 1 : half + 1].flip(1), emphasised], 1)
        segments = mirrored.unfold(1, self._n_fft, self._hop)[:, 1:frames]
        # A stream has frame 0 alone at first, without the farthest sample of its mirror image: it lies one sample early.
        first = F.pad(mirrored[:, None, 1 : self._n_fft], (0, 1))
        spectrum = torch.fft.rfft(torch.cat([first, segments], 1) * self.window)
        power = spectrum.real.square() + spectrum.imag.square()
        return torch.log(power @ self.filters.T + 2.0**-24)


def _slaney_filters(rate: int, n_fft: int, features: int) -> Tensor:
    """(features, n_fft // 2 + 1) triangles of equal area: linear to 1000 Hz, logarithmic above (Slaney's Auditory Toolbox)."""
    hz_per_mel, break_hz, log_step = 200.0 / 3, 1000.0, math.log(6.4) / 27.0
    break_mel = break_hz / hz_per_mel
    mels = torch.linspace(0.0, break_mel + math.log(rate / 2 / break_hz) / log_step, features + 2)
    edges = torch.where(mels >= break_mel, break_hz * torch.exp(log_step * (mels - break_mel)), hz_per_mel * mels)
    bins = torch.linspace(0, rate // 2, n_fft // 2 + 1)
    offsets, widths = edges[:, None] - bins, edges[1:] - edges[:-1]
    triangles = torch.minimum(-offsets[:-2] / widths[:-1, None], offsets[2:] / widths[1:, None]).clamp(min=0.0)
    return triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None]


# ------------------------------------------------------------------------------------------------ encoder
class Subsampling(nn.Module):
    """(B, 8 T - 7, features) -> (B, T, d_model): three convolutions of stride 2, padded by 2 before and 1 after."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        channels, features = config["subsampling_conv_channels"], config["feat_in"]
        for _ in range(3):
            features = features // 2 + 1
        self.conv = nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=2, groups=channels),
            nn.Conv2d(channels, channels, 1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=2, groups=channels),
            nn.Conv2d(channels, channels, 1),
            nn.ReLU(),
        )
        self.out = nn.Linear(channels * features, config["d_model"])
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Keep the signal's size from layer to layer: PyTorch's own start loses it under the biases, and learning stalls."""
        for index, gain in ((0, 2.0), (2, 1.0), (3, 2.0), (5, 1.0), (6, 2.0)):
            layer = self.conv[index]
            nn.init.normal_(layer.weight, std=(gain / layer.weight[0].numel()) ** 0.5)
            nn.init.zeros_(layer.bias)
        first = self.conv[0]  # as if the log-mel came with mean 0 and deviation 1
        first.weight /= _MEL_DEVIATION
        first.bias -= _MEL_MEAN * first.weight.sum((1, 2, 3))
        nn.init.normal_(self.out.weight, std=self.out.in_features**-0.5)
        nn.init.zeros_(self.out.bias)

    def forward(self, mel: Tensor) -> Tensor:
        x = mel[:, None]  # (B, channels, time, frequency)
        for layer in self.conv:
            x = layer(F.pad(x, (2, 1, 2, 1)) if getattr(layer, "stride", None) == (2, 2) else x)
        return self.out(x.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """(B, T, d_model) -> the same."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner = config["d_model"], config["d_model"] * config["ff_expansion_factor"]
        self.linear1 = nn.Linear(width, inner, bias=config["use_bias"])
        self.linear2 = nn.Linear(inner, width, bias=config["use_bias"])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(F.silu(self.linear1(x)))


class RelativeAttention(nn.Module):
    """(B, T, d_model) -> the same; a frame sees itself and the frames before it that ``hidden`` leaves."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads, bias = config["d_model"], config["n_heads"], config["use_bias"]
        self._heads = heads
        self.linear_q = nn.Linear(width, width, bias=bias)
        self.linear_k = nn.Linear(width, width, bias=bias)
        self.linear_v = nn.Linear(width, width, bias=bias)
        self.linear_out = nn.Linear(width, width, bias=bias)
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(heads, width // heads))
        self.pos_bias_v = nn.Parameter(torch.zeros(heads, width // heads))

    def forward(self, x: Tensor, distances: Tensor, hidden: Tensor) -> Tensor:
        """distances: (T, d_model) sinusoids of T - 1, ... 0 frames; hidden: (T, T), -1e30 where a query must not look."""
        batch, frames, width = x.shape
        query, key, value = (
            layer(x).unflatten(2, (self._heads, -1)) for layer in (self.linear_q, self.linear_k, self.linear_v)
        )
        scale = (width // self._heads) ** -0.5
        by_content = ((query + self.pos_bias_u) * scale).transpose(1, 2)  # (B, heads, T, head_dim)
        by_position = ((query + self.pos_bias_v) * scale).transpose(1, 2)
        positions = self.linear_pos(distances).unflatten(1, (self._heads, -1)).permute(1, 2, 0)  # (heads, head_dim, T)
        # Column T - 1 - d of a query's row is distance d; read with one column more per row, it lies under its key.
        shifted = F.pad(by_position @ positions, (1, 0)).view(batch, self._heads, frames + 1, frames)[:, :, 1:]
        scores = by_content @ key.permute(0, 2, 3, 1) + (shifted + hidden)
        mixed = scores.softmax(-1) @ value.transpose(1, 2)
        return self.linear_out(mixed.transpose(1, 2).flatten(2))


class ConvModule(nn.Module):
    """(B, T, d_model) -> the same: gated pointwise, causal depthwise, LayerNorm (named ``batch_norm``), pointwise."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, kernel, bias = config["d_model"], config["conv_kernel_size"], config["use_bias"]
        self.pointwise_conv1 = nn.Conv1d(width, 2 * width, 1, bias=bias)
        self.depthwise_conv = nn.Conv1d(width, width, kernel, padding=kernel - 1, groups=width, bias=bias)
        self.batch_norm = nn.LayerNorm(width)
        self.pointwise_conv2 = nn.Conv1d(width, width, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gated = F.glu(_pointwise(self.pointwise_conv1, x))
        mixed = self.depthwise_conv(gated.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2)
        return _pointwise(self.pointwise_conv2, F.silu(self.batch_norm(mixed)))


def _pointwise(layer: nn.Conv1d, x: Tensor) -> Tensor:
    """A convolution of kernel 1 on channels that come last."""
    return F.linear(x, layer.weight[:, :, 0], layer.bias)


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, each on its normalised input; a norm last."""

    def __init__(self, config: Mapping[str, Any], dropout: float) -> None:
        super().__init__()
        width = config["d_model"]
        self.norm_feed_forward1 = nn.LayerNorm(width)
        self.feed_forward1 = FeedForward(config)
        self.norm_self_att = nn.LayerNorm(width)
        self.self_attn = RelativeAttention(config)
        self.norm_conv = nn.LayerNorm(width)
        self.conv = ConvModule(config)
        self.norm_feed_forward2 = nn.LayerNorm(width)
        self.feed_forward2 = FeedForward(config)
        self.norm_out = nn.LayerNorm(width)
        self._dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, distances: Tensor, hidden: Tensor) -> Tensor:
        drop = self._dropout
        x = torch.add(x, drop(self.feed_forward1(self.norm_feed_forward1(x))), alpha=0.5)
        x = x + drop(self.self_attn(self.norm_self_att(x), distances, hidden))
        x = x + drop(self.conv(self.norm_conv(x)))
        x = torch.add(x, drop(self.feed_forward2(self.norm_feed_forward2(x))), alpha=0.5)
        return self.norm_out(x)


class Encoder(nn.Module):
    """FastConformer on log-mel. ``audio``: the config's ``audio_config``; ``dropout``: of what every module adds."""

    def __init__(self, audio: Mapping[str, Any], *, dropout: float = 0.0) -> None:
        super().__init__()
        config = audio["encoder"]
        self.width: int = config["d_model"]
        self._left_context = config["att_context_size"][0][0]
        self.log_mel = LogMel(audio["preprocessor"])
        self.pre_encode = Subsampling(config)
        self.layers = nn.ModuleList(ConformerBlock(config, dropout) for _ in range(config["n_layers"]))

    def forward(self, mel: Tensor) -> Tensor:
        """(B, 8 T - 7, features) -> (B, T, d_model)."""
        x = self.pre_encode(mel)
        distances, hidden = self._surroundings(x.shape[1], x.device)
        for layer in self.layers:
            x = layer(x, distances, hidden)
        return x

    @torch.no_grad()
    def features(self, samples: Tensor) -> Tensor:
        """(B, n) samples -> (B, n // 1280, d_model), the frames as a session gives them; n at least 1280."""
        return self(self.log_mel(samples))

    def _surroundings(self, frames: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """See :meth:`RelativeAttention.forward`."""
        index = torch.arange(frames, device=device)
        rates = torch.exp(torch.arange(0, self.width, 2, device=device) * -(math.log(10000.0) / self.width))
        angles = index.flip(0)[:, None] * rates
        distance = index[:, None] - index
        seen = (distance >= 0) & (distance <= self._left_context)
        hidden = torch.zeros(frames, frames, device=device).masked_fill_(~seen, -1e30)
        return torch.stack([angles.sin(), angles.cos()], 2).flatten(1), hidden


# ------------------------------------------------------------------------------------------------ RNN-T
class _Lstm(nn.Module):
    """Under the name it has in checkpoints."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)


class _Prediction(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["pred_hidden"]
        self.embed = nn.Embedding(config["vocab_size"] + config["blank_as_pad"], width)
        self.dec_rnn = _Lstm(width, config["pred_rnn_layers"])


class PredictionNetwork(nn.Module):
    """Summary of the pieces so far."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.prediction = _Prediction(config)

    def forward(self, pieces: Tensor, keep: Tensor | None = None) -> Tensor:
        """(B, U) ids -> (B, U + 1, pred_hidden) after none (a vector of zeros), 1, ... U pieces.

        ``keep``: (B, U, 1), 0 for pieces that are to read as zeros.
        """
        embedded = self.prediction.embed(pieces)
        if keep is not None:
            embedded = embedded * keep
        return self.prediction.dec_rnn.lstm(F.pad(embedded, (0, 0, 1, 0)))[0]


class JointNetwork(nn.Module):
    """Scores of every piece and, last, the blank."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        joint = config["joint_hidden"]
        self.enc = nn.Linear(config["encoder_hidden"], joint)
        self.pred = nn.Linear(config["pred_hidden"], joint)
        self.joint_net = nn.Sequential(nn.ReLU(), nn.Identity(), nn.Linear(joint, config["num_classes"] + 1))

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """(B, T, encoder_hidden), (B, U, pred_hidden) -> logits (B, T, U, pieces + 1)."""
        return self.joint_net(self.enc(encoded)[:, :, None] + self.pred(predicted)[:, None])


class _Perception(nn.Module):
    def __init__(self, audio: Mapping[str, Any], dropout: float) -> None:
        super().__init__()
        self.encoder = Encoder(audio, dropout=dropout)


class SpeechRecogniser(nn.Module):
    """Encoder and RNN-T. Names are the checkpoint's below ``stt_model.``; the projection is the language model's affair."""

    def __init__(self, audio: Mapping[str, Any], *, dropout: float = 0.0) -> None:
        super().__init__()
        self.perception = _Perception(audio, dropout)
        self.rnnt_decoder = PredictionNetwork(audio["decoder"])
        self.rnnt_joint = JointNetwork(audio["joint"])
        self.blank: int = audio["joint"]["num_classes"]
        self.max_symbols: int = audio["max_symbols"]

    @property
    def encoder(self) -> Encoder:
        return self.perception.encoder

    @staticmethod
    def load(audio: Mapping[str, Any], folder: Path) -> SpeechRecogniser:
        """The network that a run of training left in ``folder``, for use."""
        network = SpeechRecogniser(audio)
        network.load_state_dict(load_file(str(folder / "weights.safetensors")))
        return network.eval().requires_grad_(False)

    @torch.no_grad()
    def greedy(self, encoded: Tensor, frames: Tensor) -> list[list[tuple[int, int]]]:
        """(B, T, d_model) and lengths (B,) -> for every stretch its (piece, frame in which it came).

        In a frame pieces are taken until the blank is best or there are ``max_symbols``. Every stretch has its own frame, so
        that the whole batch takes about as many steps as its longest stretch has frames and pieces.
        """
        joint, prediction = self.rnnt_joint, self.rnnt_decoder.prediction
        lstm, embed = prediction.dec_rnn.lstm, prediction.embed
        from_frames = joint.enc(encoded)
        rows, last = torch.arange(len(frames), device=frames.device), encoded.shape[1] - 1
        frame, symbols = torch.zeros_like(frames), torch.zeros_like(frames)
        predicted, state = lstm(encoded.new_zeros(len(frames), 1, embed.embedding_dim))
        taken: list[Tensor] = []
        while len(taken) % 16 or bool((frame < frames).any()):
            scores = joint.joint_net(from_frames[rows, frame.clamp(max=last)] + joint.pred(predicted[:, 0]))
            piece = scores.argmax(-1)
            alive = frame < frames
            more = alive & (piece != self.blank)
            taken.append(torch.stack([torch.where(more, piece, -1), frame]))
            after, state_after = lstm(embed(piece)[:, None], state)
            predicted = torch.where(more[:, None, None], after, predicted)
            hidden, cell = (torch.where(more[None, :, None], *pair) for pair in zip(state_after, state, strict=True))
            state = hidden, cell
            symbols = torch.where(more, symbols + 1, 0)
            done = alive & (~more | (symbols == self.max_symbols))
            frame, symbols = frame + done, symbols.masked_fill(done, 0)
        if not taken:
            return [[] for _ in rows]
        table = torch.stack(taken).permute(2, 0, 1).tolist()
        return [[(piece, frame) for piece, frame in row if piece >= 0] for row in table]
