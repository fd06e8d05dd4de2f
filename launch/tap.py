"""``vcpipe tap``: print what a running pipeline publishes."""

from __future__ import annotations

import json
from typing import Any

from vcpipe.launch.console import stderr, warn
from vcpipe.pipeline.tap import TapSubscriber
from vcpipe.schemas.envelope import Header
from vcpipe.schemas.tap import TapEvent, TapSession, TapTiming


def follow(endpoint: str, topics: tuple[str, ...], timeout_s: float, as_json: bool) -> None:
    """Print messages until none came for ``timeout_s``; gaps in ``seq`` are said on stderr where all topics are read."""
    counts_gaps = topics == ("",)
    expected: int | None = None
    seen = 0
    with TapSubscriber(endpoint, topics) as tap:
        for topic, header, message in tap.messages(timeout_s):
            if counts_gaps and expected is not None and header.seq != expected:
                warn(f"{header.seq - expected} messages were missed before seq {header.seq}")
            expected = header.seq + 1
            seen += 1
            fields = _fields(message)
            if as_json:
                line = {"topic": topic, "seq": header.seq, "session": header.session, "frame_index": header.frame_index}
                print(json.dumps({**line, **fields}, ensure_ascii=False), flush=True)
            else:
                print(_line(topic, header, fields), flush=True)
    stderr.print(f"{seen} messages; nothing more for {timeout_s:g} s at {endpoint}", markup=False)


def _fields(message: TapEvent | TapTiming | TapSession) -> dict[str, Any]:
    """The fields that are set, as JSON types; samples are left out."""
    if isinstance(message, TapEvent):
        fields = {name: getattr(message, name) for name in ("token_id", "delta", "text", "sample_rate")}
        if message.audio_codes is not None:
            fields["audio_codes"] = message.audio_codes.tolist()
        return {name: value for name, value in fields.items() if value is not None}
    if isinstance(message, TapTiming):
        stages = {stage: round((done - begun) / 1e6, 3) for stage, _, begun, done, _ in message.stages}
        return {"stages_ms": stages, "end_to_end_ms": round((message.released_ns - message.sent_ns) / 1e6, 3)}
    return {"state": message.state} if message.error is None else {"state": message.state, "error": message.error}


def _line(topic: str, header: Header, fields: dict[str, Any]) -> str:
    shown = {name: value for name, value in fields.items() if name not in ("text", "audio_codes")}
    return f"{header.seq:>7} {header.session} {header.frame_index:>6} {topic} " + " ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in shown.items()
    )
