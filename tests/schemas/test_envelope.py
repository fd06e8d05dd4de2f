"""The wire format: everything that can be said survives the way, everything else is refused by name."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import msgpack
import numpy as np
import pytest

from vcpipe.schemas import control, messages, reports, tap
from vcpipe.schemas.envelope import NO_FRAME, Codec, Header, join, pack, split, unpack_header
from vcpipe.schemas.errors import ProtocolError

HEADER = Header("sess_1", 2, 7, 11, 123_456_789_012_345)

_RNG = np.random.default_rng(0)
PROJECTED = _RNG.standard_normal((1, 1, 16)).astype(np.float32)
SAMPLES = _RNG.standard_normal(1764).astype(np.float32)
CODES = np.arange(31, dtype=np.int32)
PROMPT = _RNG.integers(-1, 1024, (38, 31)).astype(np.int32)
SPANS = [["rnnt", 5, 6]]

EXAMPLES: dict[Codec, list[Any]] = {
    messages.DATA: [
        messages.OpenSession(),
        messages.OpenSession(True, "Sei höflich. 你好", 2**64 - 1, False, False, 4, 9, PROMPT),
        messages.OpenSession(route=("tts", "codec"), task="speech"),
        messages.PcmFrame(SAMPLES[:1280]),
        messages.PcmFrame(SAMPLES[:0]),
        messages.Projected(PROJECTED),
        messages.TextStep(131071),
        messages.Codes(CODES),
        messages.EndOfStream(),
        messages.CloseSession(),
    ],
    control.CONTROL: [control.Cancel(), control.Shutdown()],
    reports.REPORTS: [
        reports.Opened("tts", 12.5),
        reports.Transcript(" héllo"),
        reports.Transcribed(31),
        reports.Tokens(5, 12),
        reports.Tokens(5, 6, "a", 1, "b", "c", 2, "d"),
        reports.AudioFrame(SAMPLES, CODES),
        reports.AudioFrame(SAMPLES[:0], CODES),
        reports.StageTiming("codec", 1, 2, 3, SPANS),
        reports.StageEnded("codec", 9),
        reports.SessionFailed("language", "too long; accepted: shorter"),
        reports.Loading("language", "layer 3", 0.25),
        reports.Ready("codec", 1, 4711, "gpu", "0.32.4", 1.5, 0.5, 1 << 40, ["odd"], PROMPT),
        reports.Ready("tts", 1, 4711, "cpu", "0.32.4", 1.5, 0.5, 0, []),
        reports.Beat("tts", 0, 1, 2, 3, 4),
        reports.Failed("tts", "RuntimeError: x", "Traceback ...", False),
        reports.Stopped("tts"),
    ],
    tap.TAP: [
        tap.TapEvent("audio", sample_rate=22050, samples=SAMPLES, audio_codes=CODES),
        tap.TapEvent("assistant_text_delta", 5, "a", "aa"),
        tap.TapTiming(1, 2, 3, [["codec", 1, 2, 3, SPANS]]),
        tap.TapSession("failed", "codec: no"),
    ],
}
ALL = [pytest.param(codec, message, id=message.KIND) for codec, examples in EXAMPLES.items() for message in examples]


def test_every_message_kind_has_an_example() -> None:
    for module, codec in (
        (messages, messages.DATA),
        (control, control.CONTROL),
        (reports, reports.REPORTS),
        (tap, tap.TAP),
    ):
        declared = {c for c in vars(module).values() if dataclasses.is_dataclass(c) and hasattr(c, "KIND")}
        assert {type(message) for message in EXAMPLES[codec]} == declared
        assert len({kind.KIND for kind in declared}) == len(declared)


@pytest.mark.parametrize(("codec", "message"), ALL)
def test_a_message_survives_the_wire(codec: Codec, message: Any) -> None:
    header, received = codec.unpack([bytes(part) for part in pack(HEADER, message)])
    assert header == HEADER
    assert type(received) is type(message)
    for f in dataclasses.fields(message):
        sent, got = getattr(message, f.name), getattr(received, f.name)
        if isinstance(sent, np.ndarray):
            assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
            np.testing.assert_array_equal(got, sent)
        else:
            assert (got, type(got)) == (sent, type(sent))


def test_arrays_travel_raw_in_parts_of_their_own() -> None:
    parts = pack(HEADER, reports.AudioFrame(SAMPLES, CODES))
    assert [bytes(part) for part in parts[2:]] == [SAMPLES.tobytes(), CODES.tobytes()]
    assert len(pack(HEADER, messages.OpenSession())) == 2


def test_a_strided_array_is_sent_in_its_own_order() -> None:
    _, received = messages.DATA.unpack(pack(HEADER, messages.OpenSession(prompt_codes=PROMPT.T)))
    np.testing.assert_array_equal(received.prompt_codes, PROMPT.T)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (messages.Codes(CODES.astype(np.int64)), "codes: field 'codes' is int64, expected int32"),
        (messages.Codes(CODES.reshape(1, 31)), r"codes: field 'codes' has shape \(1, 31\), expected \(None,\)"),
        (messages.Projected(PROJECTED[0]), r"projected: field 'projected' has shape \(1, 16\)"),
        (messages.Projected(np.zeros((1, 2, 16), np.float32)), r"has shape \(1, 2, 16\), expected \(1, 1, None\)"),
        (messages.PcmFrame(SAMPLES.astype(object)), "pcm_frame: field 'samples' is object, expected float32"),
        (messages.PcmFrame(None), "pcm_frame: field 'samples'"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_array_is_not_sent(message: Any, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        pack(HEADER, message)


def test_objects_are_not_pickled() -> None:
    with pytest.raises(TypeError):
        pack(HEADER, messages.TextStep(object()))  # type: ignore[arg-type]
    head = bytes(pack(HEADER, control.Cancel())[0])
    with pytest.raises(ProtocolError):
        messages.DATA.unpack([head, pickle.dumps({"kind": "text_step", "text_id": 5})])


def _received(body: Any, *arrays: bytes, codec: Codec = messages.DATA) -> Any:
    head = bytes(pack(HEADER, control.Cancel())[0])
    return codec.unpack([head, msgpack.packb(body), *arrays])[1]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"kind": "gossip"}, "unknown message kind 'gossip'; accepted: close_session, codes, end_of_stream"),
        ({"kind": "beat"}, "unknown message kind 'beat'"),
        ({"kind": ["codes"]}, "unknown message kind"),
        ({}, "unknown message kind None"),
        ([1, 2], "the body must be a map, not list"),
        ({"kind": "text_step"}, "text_step: field 'text_id' is missing"),
        ({"kind": "text_step", "text_id": 1, "mood": 2}, "text_step: unknown field 'mood'"),
        ({"kind": "text_step", "text_id": "1"}, "text_step: field 'text_id' is str, expected int"),
        ({"kind": "text_step", "text_id": 1.0}, "text_step: field 'text_id' is float, expected int"),
        ({"kind": "text_step", "text_id": True}, "text_step: field 'text_id' is bool, expected int"),
        ({"kind": "open_session", "system_prompt": 1}, "field 'system_prompt' is int, expected str or NoneType"),
        ({"kind": "open_session", "route": "tts"}, "open_session: field 'route' is str, expected tuple"),
        ({"kind": "codes", "codes": None}, "codes: field 'codes' is missing"),
        ({"kind": "codes", "codes": 5}, "codes: field 'codes' is not an array part"),
        ({"kind": "codes", "codes": ["int64", [31], 0]}, "codes: field 'codes' is int64, expected int32"),
        ({"kind": "codes", "codes": ["int32", [1, 31], 0]}, "codes: field 'codes' has shape"),
        ({"kind": "codes", "codes": ["int32", [30], 0]}, "codes: field 'codes' is not an array part"),
        ({"kind": "codes", "codes": ["int32", [31], 1]}, "codes: field 'codes' is not an array part"),
        ({"kind": "codes", "codes": ["int32", ["31"], 0]}, "codes: field 'codes' is not an array part"),
    ],
)
def test_what_is_not_a_message_is_refused_by_name(body: Any, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        _received(body, CODES.tobytes())


def test_a_torn_array_is_refused() -> None:
    with pytest.raises(ProtocolError, match="field 'codes' is not an array part"):
        _received({"kind": "codes", "codes": ["int32", [31], 0]}, CODES.tobytes()[:-1])


def test_a_field_added_later_takes_its_default() -> None:
    """A peer of the same protocol may be older: it leaves out what was added with a default."""
    assert _received({"kind": "open_session"}) == messages.OpenSession()
    assert _received({"kind": "tokens", "text_id": 1, "function_id": 2}, codec=reports.REPORTS) == reports.Tokens(1, 2)


def test_a_whole_number_is_good_for_a_float_field() -> None:
    assert _received({"kind": "opened", "stage": "tts", "duration_ms": 3}, codec=reports.REPORTS).duration_ms == 3


@pytest.mark.parametrize(
    "head", [b"", b"\xc1", msgpack.packb(5), msgpack.packb(["s", 0, 0, 0]), msgpack.packb([1] * 5)]
)
def test_a_broken_header_is_refused(head: bytes) -> None:
    with pytest.raises(ProtocolError, match="header"):
        unpack_header(head)


def test_parts_go_through_a_socket_in_one_packet() -> None:
    parts = pack(HEADER, reports.AudioFrame(SAMPLES, CODES))
    assert split(join(parts)) == parts


@pytest.mark.parametrize("packet", [b"", b"\xc1", msgpack.packb(5)])
def test_what_is_not_a_packet_is_refused(packet: bytes) -> None:
    with pytest.raises(ProtocolError, match="a packet must be"):
        split(packet)


def test_a_message_needs_header_and_body() -> None:
    with pytest.raises(ProtocolError, match="at least 2 parts, this one has 1"):
        messages.DATA.unpack([bytes(pack(HEADER, control.Cancel())[0])])
    assert NO_FRAME < 0
