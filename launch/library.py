"""The library's front door: a pipeline on a checkpoint by name, folder or the one that comes with the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vcpipe.actors.checkpoint import resolve_checkpoint
from vcpipe.pipeline.pipeline import Listener, Pipeline
from vcpipe.schemas.config import PipelineConfig
from vcpipe.schemas.geometry import STAGES
from vcpipe.schemas.reports import Loading

#: The checkpoint that is used when none is named.
EMBEDDED_CHECKPOINT = Path(__file__).parent / "embedded"


def start_pipeline(
    model: str | Path | None = None,
    *,
    stages: tuple[str, ...] = STAGES,
    device: str | None = None,
    window: int = 8,
    tap: str | None = None,
    tts_history_frames: int | None = None,
    on_progress: Callable[[Loading], None] = lambda loading: None,
    listener: Listener | None = None,
) -> Pipeline:
    """Start the actors and wait until they are ready. Use it as a context manager, or call ``close()``.

    ``model``: checkpoint folder or Hub name; None takes the small one in the package. ``stages``: all
    four; perception alone is enough for transcription, tts and codec for speech.
    ``device``: "cpu", "gpu" or None for MLX's default. ``window``: most frames in flight. ``tap``: endpoint such as
    tcp://127.0.0.1:5599 on which everything is published. ``tts_history_frames``: last positions that the speech decoder sees
    at most; None leaves the model its own windows. Raises ConfigError for what the user can mend (a checkpoint that does not
    load among it), ActorStartupError where a stage fails otherwise.
    """
    checkpoint = EMBEDDED_CHECKPOINT if model is None else resolve_checkpoint(str(model))
    config = PipelineConfig(
        checkpoint, stages=stages, device=device, window=window, tap=tap, tts_history_frames=tts_history_frames
    )
    return Pipeline(config, on_progress, listener)
