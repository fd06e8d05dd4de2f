"""RNN-T: encoder frames in, ids of text pieces out, greedily and frame by frame (Graves 2012).

A prediction network (embedding and LSTM) summarises the pieces so far; a joint network scores, for the current frame and
that summary, every piece and the blank, which means "next frame".
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.compiled import compiled
from vcpipe.actors.perception.config import RnntConfig
from vcpipe.actors.perception.dense import Dense
from vcpipe.actors.perception.transcript import PieceTable, TranscriptText
from vcpipe.actors.product import product

#: Hidden and cell state of one LSTM layer, (1, hidden) each.
LstmState = tuple[mx.array, mx.array]

#: The joint network's half of an encoded frame, (1, joint_hidden), and the best class beside a prediction, (1,) uint32.
Scored = tuple[mx.array, mx.array]


class LstmLayer(nn.Module):
    """Parameters of one LSTM layer: gates in the order input, forget, cell, output, with one summed bias."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.Wx = mx.zeros((4 * hidden, inputs))
        self.Wh = mx.zeros((4 * hidden, hidden))
        self.bias = mx.zeros((4 * hidden,))


def lstm_cell(gates: mx.array, cell: mx.array) -> LstmState:
    """(1, 4 * hidden) before their activations, and the cell state (1, hidden) -> the state after."""
    in_gate, forget_gate, candidate, out_gate = mx.split(gates, 4, axis=-1)
    cell = mx.sigmoid(forget_gate) * cell + mx.sigmoid(in_gate) * mx.tanh(candidate)
    return mx.sigmoid(out_gate) * mx.tanh(cell), cell


class LstmStack(nn.Module):
    """LSTM layers, each reading the one below."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.lstm = [LstmLayer(hidden, hidden) for _ in range(layers)]


class Prediction(nn.Module):
    """Parameters of the prediction network."""

    def __init__(self, config: RnntConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.embeddings, config.pred_hidden)
        self.dec_rnn = LstmStack(config.pred_hidden, config.pred_rnn_layers)


class PredictionNetwork(nn.Module):
    """What was said so far, one piece at a time.

    ``none``, the index that stands for no piece yet, reads as a vector of zeros, not as the blank's row.
    """

    def __init__(self, config: RnntConfig) -> None:
        super().__init__()
        self.none = config.embeddings
        self._layers, self._hidden = config.pred_rnn_layers, config.pred_hidden
        self.prediction = Prediction(config)

    def prepare(self) -> None:
        """Multiply the embeddings by the lowest layer's input matrix once, and join the two matrices of each other layer.

        The products are rounded to the checkpoint's dtype, as if they were made a piece at a time; all else is float32.
        """
        embed, (lowest, *upper) = self.prediction.embed, self.prediction.dec_rnn.lstm
        products = mx.addmm(lowest.bias, embed(mx.arange(self.none)), lowest.Wx.T)
        inputs = mx.concatenate([products, lowest.bias[None]])
        self.pop("prediction")
        self.inputs = inputs.astype(mx.float32)  # (embeddings + 1, 4 * hidden)
        self.recurrent = Dense(lowest.Wh.astype(mx.float32))
        joined = [mx.concatenate([layer.Wx, layer.Wh], axis=1).astype(mx.float32) for layer in upper]
        self.joined = [Dense(matrix, layer.bias) for matrix, layer in zip(joined, upper, strict=True)]
        mx.eval(self.parameters())

    def empty_states(self) -> list[LstmState]:
        """States before the first piece."""
        return [(mx.zeros((1, self._hidden)), mx.zeros((1, self._hidden))) for _ in range(self._layers)]

    def __call__(self, token: mx.array, states: list[LstmState]) -> list[LstmState]:
        """Last piece, (1,), and states -> states after it; the top one's hidden half is the prediction."""
        hidden, cell = states[0]
        after = [lstm_cell(self.inputs[token] + self.recurrent(hidden), cell)]
        for layer, (hidden, cell) in zip(self.joined, states[1:], strict=True):
            after.append(lstm_cell(layer(mx.concatenate([after[-1][0], hidden], axis=-1)), cell))
        return after


class JointNetwork(nn.Module):
    """Scores of every class from an encoded frame and a prediction."""

    def __init__(self, config: RnntConfig) -> None:
        super().__init__()
        self.enc = nn.Linear(config.encoder_hidden, config.joint_hidden)
        self.pred = nn.Linear(config.pred_hidden, config.joint_hidden)
        self.joint_net = [nn.ReLU(), nn.Identity(), nn.Linear(config.joint_hidden, config.classes)]

    def __call__(self, from_frame: mx.array, from_prediction: mx.array) -> mx.array:
        """Outputs of ``enc`` and ``pred``, (1, joint_hidden) each -> logits (1, classes)."""
        x = from_frame + from_prediction
        *before, last = self.joint_net
        for layer in before:
            x = layer(x)
        return product(x, last)


class Transducer:
    """Both networks as pure functions of arrays, prepared, for any number of streams."""

    def __init__(self, predictor: PredictionNetwork, joint: JointNetwork, config: RnntConfig) -> None:
        self.config = config
        self._predictor = predictor
        self._joint = joint
        self.start = self._predict(mx.array([predictor.none]), predictor.empty_states())
        mx.eval(self.start)
        #: (piece (1,), states, from_frame) -> states and from_prediction after it, and the frame's next best class (1,).
        self.advance = compiled(self._advance)

    def score(self, encoded: mx.array, from_prediction: mx.array) -> Scored:
        """A frame, (1, encoder_hidden), beside the joint network's half of a prediction, (1, joint_hidden)."""
        from_frame = product(encoded, self._joint.enc)
        return from_frame, self._best(from_frame, from_prediction)

    def _advance(
        self, token: mx.array, states: list[LstmState], from_frame: mx.array
    ) -> tuple[list[LstmState], mx.array, mx.array]:
        states, from_prediction = self._predict(token, states)
        return states, from_prediction, self._best(from_frame, from_prediction)

    def _predict(self, token: mx.array, states: list[LstmState]) -> tuple[list[LstmState], mx.array]:
        states = self._predictor(token, states)
        return states, product(states[-1][0], self._joint.pred)

    def _best(self, from_frame: mx.array, from_prediction: mx.array) -> mx.array:
        return mx.argmax(self._joint(from_frame, from_prediction), axis=-1)


class GreedyDecoder:
    """Greedy RNN-T search over the frames of one stream.

    :meth:`begin` a frame, then :meth:`evaluate` until the frame is ``finished``; :meth:`step` does both. The prediction
    depends on the pieces only, so it is computed once a piece and kept through any number of blanks: a frame without a piece
    needs nothing beyond :meth:`Transducer.score` with ``from_prediction``, which may be part of the encoder's evaluation.
    """

    def __init__(self, transducer: Transducer) -> None:
        self._transducer = transducer
        self._states, self.from_prediction = transducer.start
        self._from_frame = self._best = mx.zeros(0)
        self._symbols = 0
        self.finished = True

    def begin(self, scored: Scored) -> None:
        """Take the next frame."""
        self._from_frame, self._best = scored
        self._symbols = 0
        self.finished = False

    def evaluate(self) -> int | None:
        """The next piece of the frame, or None for the blank, which finishes it, as does its ``max_symbols``-th piece."""
        assert not self.finished
        config = self._transducer.config
        token = int(self._best)
        if token == config.blank_id:
            self.finished = True
            return None
        self._states, self.from_prediction, self._best = self._transducer.advance(
            self._best, self._states, self._from_frame
        )
        mx.eval(self._states, self.from_prediction, self._best)
        self._symbols += 1
        self.finished = self._symbols >= config.max_symbols
        return token

    def step(self, scored: Scored) -> list[int]:
        """Ids of the pieces emitted in this frame, at most ``max_symbols``."""
        self.begin(scored)
        tokens = []
        while not self.finished:
            token = self.evaluate()
            if token is not None:
                tokens.append(token)
        return tokens


class Recogniser:
    """Transcript of one stream, frame by frame."""

    def __init__(self, transducer: Transducer, pieces: PieceTable) -> None:
        self._transducer = transducer
        self._decoder = GreedyDecoder(transducer)
        self._pieces = pieces
        self._text = TranscriptText()
        #: False where the checkpoint does not say what the pieces spell: there is no transcript then.
        self.knows_pieces = bool(transducer.config.pieces)

    @property
    def from_prediction(self) -> mx.array:
        """What the next frame is to be scored with."""
        return self._decoder.from_prediction

    def step(self, scored: Scored) -> str | None:
        """What the frame adds to the transcript, possibly ""; None where it kept no piece."""
        kept = [text for token in self._decoder.step(scored) if (text := self._pieces.text(token)) is not None]
        return self._text.append("".join(kept)) if kept else None

    def recognise(self, encoded: mx.array) -> str | None:
        """As :meth:`step`, of an encoded frame, (1, encoder_hidden)."""
        return self.step(self._transducer.score(encoded, self.from_prediction))
