"""The networks of the perception stage under their checkpoint names."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.perception.config import PerceptionConfig
from vcpipe.actors.perception.dense import make_dense
from vcpipe.actors.perception.fastconformer import FastConformer
from vcpipe.actors.perception.rnnt import JointNetwork, PredictionNetwork

#: Parameter pattern -> kind of kernel, for the tensors that may come in PyTorch's layout.
KERNELS = {
    "perception.encoder.pre_encode.conv.*.weight": "conv2d",
    "perception.encoder.layers.*.conv.pointwise_conv?.weight": "conv1d",
    "perception.encoder.layers.*.conv.depthwise_conv.weight": "conv1d",
}

#: Prefixes of the parameters; the mel filters and window that checkpoints also carry are not among them.
NAMES = ("perception.encoder.", "perception.proj.", "rnnt_decoder.", "rnnt_joint.")


class Perception(nn.Module):
    """The encoder and the projection of its frames into the language model's space."""

    def __init__(self, config: PerceptionConfig) -> None:
        super().__init__()
        self.encoder = FastConformer(config.encoder)
        self.proj = nn.Linear(config.encoder.d_model, config.output_dim)


class PerceptionNetworks(nn.Module):
    """All weights of the stage."""

    def __init__(self, config: PerceptionConfig) -> None:
        super().__init__()
        self.perception = Perception(config)
        self.rnnt_decoder = PredictionNetwork(config.rnnt)
        self.rnnt_joint = JointNetwork(config.rnnt)

    def prepare(self) -> None:
        """Bring the loaded weights into the form they run in: fewer arrays, in float32 or, for kernels, as they are stored.

        Their checkpoint names end here.
        """
        self.perception.encoder.prepare()
        self.rnnt_decoder.prepare()
        for part in (self.perception, self.rnnt_joint):
            make_dense(part)
        mx.eval(self.parameters())
