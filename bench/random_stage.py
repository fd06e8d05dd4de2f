"""Any stage with random weights: the module an actor loads instead of ``vcpipe.actors.<stage>.actor``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.nn as nn

from vcpipe.actors.checkpoint import read_config
from vcpipe.actors.stage import Progress, Stage, StageConfig
from vcpipe.actors.weights import LoadReport
from vcpipe.bench.random_weights import fill


def load(config: StageConfig, progress: Progress) -> Stage:
    """The stage of a checkpoint folder that has a config and a tokenizer, but no weights."""
    actor = importlib.import_module(f"vcpipe.actors.{config.stage}.actor")
    stage: Stage = actor.load(config, progress, make_weights)
    return stage


def make_weights(
    module: nn.Module, checkpoint: Path, *, root: str, progress: Progress, **of_real_weights: Any
) -> LoadReport:
    """A :class:`vcpipe.actors.weights.WeightLoader` that reads no weights."""
    fill(module, root, read_config(checkpoint), progress)
    return LoadReport()
