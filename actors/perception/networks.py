"""The networks of the perception stage under their checkpoint names."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.perception.config import PerceptionConfig
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

    def widen(self) -> None:
        """Make the weights float32 that meet float32 activations anyway: the same results without a cast every frame.

        The prediction network stays as it is: it rounds its embeddings to the checkpoint's dtype, and it runs only when a
        piece was emitted.
        """
        self.perception.set_dtype(mx.float32)
        self.rnnt_joint.set_dtype(mx.float32)
        mx.eval(self.parameters())
