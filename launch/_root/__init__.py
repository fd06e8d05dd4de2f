"""vcpipe: NemotronLabs-VoiceChat as a pipeline of actor processes in MLX.

    import vcpipe

    with vcpipe.start_pipeline() as pipeline, pipeline.open_session(seed=0) as session:
        for event in session.push_audio(samples):   # float32 mono PCM at 16 kHz
            print(event.kind, event.frame_index)
        session.flush()

Names are loaded when first used; nothing here imports MLX, the actors do in their own processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcpipe.actors.speech.turns import SpeechTurns
    from vcpipe.launch.library import start_pipeline
    from vcpipe.pipeline.pipeline import Pipeline
    from vcpipe.pipeline.session import VoiceChatSession
    from vcpipe.pipeline.tap import TapSubscriber
    from vcpipe.pipeline.tracks import OfflineResult
    from vcpipe.pipeline.transcription import LiveTranscription
    from vcpipe.schemas import errors
    from vcpipe.schemas.config import GenerateOptions, PipelineConfig, SessionOptions
    from vcpipe.schemas.events import Event
    from vcpipe.schemas.speech import SpeechChunk, SpeechOptions
    from vcpipe.schemas.streaming import StreamingSession, TranscriptDelta

__version__ = "0.1.0"

_HOMES = {
    "Event": "vcpipe.schemas.events",
    "GenerateOptions": "vcpipe.schemas.config",
    "LiveTranscription": "vcpipe.pipeline.transcription",
    "OfflineResult": "vcpipe.pipeline.tracks",
    "Pipeline": "vcpipe.pipeline.pipeline",
    "PipelineConfig": "vcpipe.schemas.config",
    "SessionOptions": "vcpipe.schemas.config",
    "SpeechChunk": "vcpipe.schemas.speech",
    "SpeechOptions": "vcpipe.schemas.speech",
    "SpeechTurns": "vcpipe.actors.speech.turns",
    "StreamingSession": "vcpipe.schemas.streaming",
    "TapSubscriber": "vcpipe.pipeline.tap",
    "TranscriptDelta": "vcpipe.schemas.streaming",
    "VoiceChatSession": "vcpipe.pipeline.session",
    "start_pipeline": "vcpipe.launch.library",
}

__all__ = [
    "Event",
    "GenerateOptions",
    "LiveTranscription",
    "OfflineResult",
    "Pipeline",
    "PipelineConfig",
    "SessionOptions",
    "SpeechChunk",
    "SpeechOptions",
    "SpeechTurns",
    "StreamingSession",
    "TapSubscriber",
    "TranscriptDelta",
    "VoiceChatSession",
    "__version__",
    "errors",
    "start_pipeline",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("vcpipe.schemas.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vcpipe' has no attribute {name!r}")
