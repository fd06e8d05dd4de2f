"""Checkpoint folders as files: writing them, and loading what was written as an actor does."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from vcpipe.actors.stage import StageConfig


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    import mlx.core as mx  # here, so that measurements may take config and tokenizer without MLX

    stored = {
        name: mx.array(value) if value.dtype == np.int32 else mx.array(value).astype(mx.bfloat16)
        for name, value in arrays.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), stored, metadata={"format": "mlx"})


def load_stage(name: str, folder: Path) -> Any:
    """The stage as its actor would load it."""
    actor = importlib.import_module(f"vcpipe.actors.{name}.actor")
    return actor.load(StageConfig(name, folder, device="cpu"), lambda step, fraction: None)
