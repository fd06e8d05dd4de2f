"""RNN-T: encoder frames in, ids of text pieces out, greedily and frame by frame (Graves 2012).

A prediction network (embedding and LSTM) summarises the pieces so far; a joint network scores, for the current frame and
that summary, every piece and the blank, which means "next frame".
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.perception.config import RnntConfig
from vcpipe.actors.perception.transcript import PieceTable, TranscriptText

#: Hidden and cell state of one LSTM layer, (1, 1, hidden) each.
LstmState = tuple[mx.array, mx.array]


class LstmLayer(nn.Module):
    """One LSTM layer, one step at a time; gates in the order input, forget, cell, output, with one summed bias."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.Wx = mx.zeros((4 * hidden, inputs))
        self.Wh = mx.zeros((4 * hidden, hidden))
        self.bias = mx.zeros((4 * hidden,))

    def __call__(self, x: mx.array, state: LstmState | None) -> LstmState:
        """(1, 1, inputs) and the state before (None at the start) -> the state after; its hidden half is the output."""
        gates = mx.addmm(self.bias, x, self.Wx.T)
        if state is not None:
            gates = gates + state[0] @ self.Wh.T
        in_gate, forget_gate, candidate, out_gate = mx.split(gates, 4, axis=-1)
        cell = mx.sigmoid(in_gate) * mx.tanh(candidate)
        if state is not None:
            cell = mx.sigmoid(forget_gate) * state[1] + cell
        return mx.sigmoid(out_gate) * mx.tanh(cell), cell


class LstmStack(nn.Module):
    """LSTM layers, each reading the one below."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.lstm = [LstmLayer(hidden, hidden) for _ in range(layers)]

    def __call__(self, x: mx.array, states: list[LstmState] | None) -> list[LstmState]:
        """(1, 1, hidden) -> the states of all layers after it."""
        after = []
        for index, layer in enumerate(self.lstm):
            state = layer(x, states[index] if states is not None else None)
            x = state[0]
            after.append(state)
        return after


class Prediction(nn.Module):
    """Parameters of the prediction network."""

    def __init__(self, config: RnntConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.embeddings, config.pred_hidden)
        self.dec_rnn = LstmStack(config.pred_hidden, config.pred_rnn_layers)


class PredictionNetwork(nn.Module):
    """What was said so far, one piece at a time."""

    def __init__(self, config: RnntConfig) -> None:
        super().__init__()
        self._hidden = config.pred_hidden
        self.prediction = Prediction(config)

    def __call__(self, token: int | None, states: list[LstmState] | None) -> list[LstmState]:
        """Last piece (None: none yet, read as zeros, not as the blank's row) -> LSTM states; the top one's hidden half,
        (1, 1, pred_hidden), is the prediction."""
        x = mx.zeros((1, 1, self._hidden)) if token is None else self.prediction.embed(mx.array([[token]]))
        return self.prediction.dec_rnn(x, states)


class JointNetwork(nn.Module):
    """Scores of every class from an encoded frame and a prediction."""

    def __init__(self, config: RnntConfig) -> None:
        super().__init__()
        self.enc = nn.Linear(config.encoder_hidden, config.joint_hidden)
        self.pred = nn.Linear(config.pred_hidden, config.joint_hidden)
        self.joint_net = [nn.ReLU(), nn.Identity(), nn.Linear(config.joint_hidden, config.classes)]

    def __call__(self, from_frame: mx.array, from_prediction: mx.array) -> mx.array:
        """Outputs of ``enc`` and ``pred``, (1, 1, joint_hidden) each -> logits (1, 1, classes)."""
        x = from_frame + from_prediction
        for layer in self.joint_net:
            x = layer(x)
        return x


class GreedyDecoder:
    """Greedy RNN-T search over the frames of one stream.

    :meth:`begin` a frame, then :meth:`evaluate` the joint network until the frame is ``finished``; :meth:`step` does both.
    The prediction depends on the pieces only, so it is computed once a piece and kept through any number of blanks.
    """

    def __init__(self, predictor: PredictionNetwork, joint: JointNetwork, config: RnntConfig) -> None:
        self._predictor = predictor
        self._joint = joint
        self._blank_id = config.blank_id
        self._max_symbols = config.max_symbols
        self._states: list[LstmState] | None = None  # after all emitted pieces but the last
        self._last_token: int | None = None
        self._next_states: list[LstmState] | None = None  # after the last piece too, None until needed
        self._from_prediction = mx.zeros(0)
        self._from_frame = mx.zeros(0)
        self._symbols = 0
        self.finished = True

    def begin(self, encoded: mx.array) -> None:
        """Take the next frame, (1, 1, encoder_hidden) float32."""
        self._from_frame = self._joint.enc(encoded)
        self._symbols = 0
        self.finished = False

    def evaluate(self) -> int | None:
        """One evaluation of the joint network: the id of a piece, or None for the blank, which finishes the frame.

        The frame is also finished by its ``max_symbols``-th piece.
        """
        assert not self.finished
        if self._next_states is None:
            self._next_states = self._predictor(self._last_token, self._states)
            self._from_prediction = self._joint.pred(self._next_states[-1][0])
        token = int(mx.argmax(self._joint(self._from_frame, self._from_prediction)))
        if token == self._blank_id:
            self.finished = True
            return None
        self._states, self._next_states, self._last_token = self._next_states, None, token
        self._symbols += 1
        self.finished = self._symbols >= self._max_symbols
        return token

    def step(self, encoded: mx.array) -> list[int]:
        """(1, 1, encoder_hidden) -> ids of the pieces emitted in this frame, at most ``max_symbols``."""
        self.begin(encoded)
        tokens = []
        while not self.finished:
            token = self.evaluate()
            if token is not None:
                tokens.append(token)
        return tokens


class Recogniser:
    """Transcript of one stream, frame by frame."""

    def __init__(self, decoder: GreedyDecoder, pieces: PieceTable) -> None:
        self._decoder = decoder
        self._pieces = pieces
        self._text = TranscriptText()

    def step(self, encoded: mx.array) -> str | None:
        """(1, 1, encoder_hidden) -> what the frame adds to the transcript, possibly ""; None where it kept no piece."""
        kept = [text for token in self._decoder.step(encoded) if (text := self._pieces.text(token)) is not None]
        return self._text.append("".join(kept)) if kept else None
