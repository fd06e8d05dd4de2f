"""How the embedded checkpoint is made: corpus, synthesis, training, evaluation, export. docs/mini.md tells the steps.

Nothing here is needed to run vcpipe. Networks are trained in PyTorch (``nets``), with the checkpoint's own tensor names, and
run in MLX by the actors; tests hold the two against each other.
"""
