"""The networks in PyTorch, with the tensor names and layouts of the checkpoint."""
