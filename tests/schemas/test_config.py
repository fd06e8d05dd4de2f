"""Options are checked once, where they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vcpipe.schemas.config import GenerateOptions, PipelineConfig, SessionOptions
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import FrameGeometry


def test_one_frame_is_80_ms_on_both_sides() -> None:
    geometry = FrameGeometry()
    assert (geometry.frame_samples, geometry.output_samples, geometry.frame_ns) == (1280, 1764, 80_000_000)


@pytest.mark.parametrize(("seconds", "frames"), [(None, None), (0.05, 0), (0.08, 1), (2.32, 28), (2.4, 30), (4.0, 50)])
def test_the_limit_in_frames_is_truncated_in_double_precision(seconds: float | None, frames: int | None) -> None:
    assert SessionOptions(max_streaming_seconds=seconds).max_frames(0.08) == frames


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"seed": -1}, "seed must be an integer from 0 to .*, not -1"),
        ({"seed": 2**64}, "seed must be"),
        ({"seed": 1.5}, "not 1.5"),
        ({"seed": True}, "not True"),
        ({"max_streaming_seconds": 0.0}, "max_streaming_seconds must be a positive number of seconds, not 0.0"),
        ({"max_streaming_seconds": -3.0}, "not -3.0"),
        ({"max_streaming_seconds": float("nan")}, "not nan"),
        ({"max_streaming_seconds": float("inf")}, "not inf"),
        ({"clock": "lunar"}, "clock 'lunar' is unknown; accepted: file, wall, stepped"),
    ],
)
def test_session_options_are_checked(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SessionOptions(**fields)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"max_frames": 1}, "max_frames must be at least 2, not 1"),
        ({"extra_decoding_seconds": -0.1}, "extra_decoding_seconds must not be negative, got -0.1"),
        ({"extra_decoding_seconds": float("nan")}, "extra_decoding_seconds"),
        ({"seed": "7"}, "seed must be an integer"),
    ],
)
def test_generate_options_are_checked(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        GenerateOptions(**fields)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"device": "tpu"}, "device 'tpu' is unknown; accepted: cpu, gpu"),
        ({"stages": ()}, "stages none: accepted are consecutive ones of perception, language, tts, codec"),
        ({"stages": ("tts", "perception")}, "stages tts, perception: accepted are consecutive ones of"),
        ({"stages": ("language", "codec")}, "stages language, codec: accepted are consecutive ones of"),
        ({"stages": ("asr",)}, "stages asr: accepted are consecutive ones of"),
        ({"window": 0}, "window must be at least 1 frame, not 0"),
        ({"tts_history_frames": 0}, "tts_history_frames must be an integer from 1 to 2147483647, not 0"),
        ({"tts_history_frames": 2**31}, "not 2147483648"),
        ({"tts_history_frames": 12.5}, "not 12.5"),
        ({"tts_history_frames": True}, "not True"),
        (
            {"endpoints": {"codecs.in": "tcp://127.0.0.1:9"}},
            "'codecs.in' .*; accepted: reports, perception.in, .*codec",
        ),
    ],
)
def test_a_pipeline_config_is_checked(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PipelineConfig(Path("."), **fields)


def test_an_event_as_json_holds_what_is_set_and_no_samples() -> None:
    audio = Event(
        "audio", 3, samples=np.zeros(1764, np.float32), sample_rate=22050, audio_codes=np.arange(2, dtype=np.int32)
    )
    assert audio.to_json() == {"kind": "audio", "frame_index": 3, "sample_rate": 22050, "audio_codes": [0, 1]}
    text = Event("assistant_text_delta", 0, 0, "", "")
    assert text.to_json() == {"kind": "assistant_text_delta", "frame_index": 0, "token_id": 0, "delta": "", "text": ""}
    assert Event("done", 4).to_json() == {"kind": "done", "frame_index": 4}
