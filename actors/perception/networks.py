"""The networks of the perception stage under their checkpoint names."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from vcpipe.actors.perception.config import PerceptionConfig
from vcpipe.actors.perception.fastconformer import FastConformer, PointwiseConv
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
        """Fit the loaded weights to being read once a frame; results stay the same.

        Weights that meet float32 activations become float32 now, instead of in every frame. The prediction network is left
        alone: it rounds its embeddings to the checkpoint's dtype, and it runs only when a piece was emitted. On the CPU
        matrices are stored by input, because BLAS multiplies a single row by such a matrix 3 times faster.
        """
        for part in (self.perception, self.rnnt_joint):
            part.set_dtype(mx.float32)
            for module in part.modules():
                if isinstance(module, (nn.Linear, PointwiseConv)) and mx.default_device().type == mx.cpu:
                    module.weight = mx.contiguous(module.weight.T).T
        mx.eval(self.parameters())
