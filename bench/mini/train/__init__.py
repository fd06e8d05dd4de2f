"""One training program a part of the checkpoint."""
