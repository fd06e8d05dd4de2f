"""Slots, queues, keys and origins, metrics: the parts of a server without a socket."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
from waiting import PATIENCE_S

from vcpipe.launch.server.loop_calls import LoopCalls, LoopEnded
from vcpipe.launch.server.metrics import Metrics
from vcpipe.launch.server.outbox import Outbox
from vcpipe.launch.server.pcm_buffer import PcmBuffer
from vcpipe.launch.server.protocol import Timings
from vcpipe.launch.server.reservation import Reservations
from vcpipe.launch.server.security import Gate, Origin, choose_subprotocol, is_loopback
from vcpipe.schemas.errors import ConfigError


# ------------------------------------------------------------------------------------------------------------------- slots
def test_second_reserve_fails_until_release() -> None:
    async def run() -> None:
        reservations = Reservations(1, grace_s=0.01)
        slot = reservations.try_reserve()
        assert slot is not None
        assert reservations.try_reserve() is None
        assert await reservations.reserve() is None
        slot.release()
        slot.release()
        assert reservations.taken == 0
        assert await reservations.reserve() is not None

    asyncio.run(run())


def test_many_that_come_at_once_get_the_slots_there_are() -> None:
    async def run() -> None:
        reservations = Reservations(3, grace_s=0.01)
        slots = await asyncio.gather(*(reservations.reserve() for _ in range(200)))
        assert sum(slot is not None for slot in slots) == reservations.taken == 3

    asyncio.run(run())


def test_a_newcomer_waits_for_a_slot_that_is_being_freed() -> None:
    async def run() -> None:
        reservations = Reservations(1, grace_s=0.01, leaving_s=PATIENCE_S)
        slot = reservations.try_reserve()
        assert slot is not None
        slot.leave()
        waiting = asyncio.ensure_future(reservations.reserve())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        slot.release()
        assert await waiting is not None

    asyncio.run(run())


def test_one_that_waits_and_goes_holds_nothing() -> None:
    async def run() -> None:
        reservations = Reservations(1, grace_s=10.0)
        slot = reservations.try_reserve()
        waiting = asyncio.ensure_future(reservations.reserve())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert slot is not None
        slot.release()
        assert reservations.taken == 0

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------------------------ queues
def test_an_outbox_holds_so_many() -> None:
    async def run() -> None:
        outbox = Outbox(2)
        assert outbox.put_now("a") and outbox.put_now("b") and not outbox.put_now("c")
        late = asyncio.ensure_future(outbox.put("c"))
        await asyncio.sleep(0)
        assert not late.done()
        assert [await outbox.get(), await outbox.get(), await outbox.get()] == ["a", "b", "c"]
        assert late.done()

    asyncio.run(run())


def test_a_closed_outbox_gives_what_it_has_and_takes_no_more() -> None:
    async def run() -> None:
        outbox = Outbox(1)
        await outbox.put("a")
        late = asyncio.ensure_future(outbox.put("b"))
        await asyncio.sleep(0)
        outbox.close()
        await late
        await outbox.put("c")
        assert [await outbox.get(), await outbox.get()] == ["a", None]

    asyncio.run(run())


def test_an_outbox_forgets_what_a_cancel_made_stale() -> None:
    async def run() -> None:
        outbox = Outbox(3)
        await outbox.put("audio", stale_on_cancel=True)
        await outbox.put("pong")
        await outbox.put("text", stale_on_cancel=True)
        outbox.drop_stale()
        outbox.close()
        assert [await outbox.get(), await outbox.get()] == ["pong", None]

    asyncio.run(run())


def test_work_that_begins_just_as_it_is_ended_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = asyncio.run_coroutine_threadsafe

    async def run() -> None:
        call = LoopCalls()

        def begin_late(*arguments: Any) -> Any:
            call.end()
            return begin(*arguments)

        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", begin_late)
        with pytest.raises(LoopEnded):
            await asyncio.to_thread(call, asyncio.sleep(PATIENCE_S))

    asyncio.run(run())


def test_pcm_comes_out_as_it_went_in() -> None:
    buffer = PcmBuffer()
    samples = np.arange(1000, dtype=np.float32)
    for start in range(0, 1000, 130):
        buffer.put(samples[start : start + 130])
    buffer.drop_tail(150)
    taken = [buffer.take(count) for count in (0, 1, 129, 300, 1000, 5)]
    assert [len(piece) for piece in taken] == [0, 1, 129, 300, 420, 0]
    np.testing.assert_array_equal(np.concatenate(taken), samples[:850])
    buffer.put(samples)
    assert (buffer.clear(), len(buffer), len(buffer.take(5))) == (1000, 0, 0)


# ---------------------------------------------------------------------------------------------------------------- security
@pytest.mark.parametrize(
    "origin",
    [None, "http://localhost:3000", "http://localhost", "https://127.0.0.1:9", "http://[::1]:1", "http://127.8.9.1"],
)
def test_no_origin_and_loopback_may_connect(origin: str | None) -> None:
    headers = {"host": "127.0.0.1:8080"} | ({} if origin is None else {"origin": origin})
    assert Gate().check_origin(headers, "ws") is None


FOREIGN = [
    "https://evil.example",
    "null",
    "",
    "http://localhost.evil.com",
    "http://evil-localhost.com",
    "http://notlocalhost",
    "http://localhost:80801",
    "http://localhost:x",
    "http://localhost@evil.example",
    "http://127.0.0.1.evil.example",
    "http://localhost/path",
    "http://localhost#",
    "file://localhost",
    "ws://localhost",
    "chrome-extension://localhost",
    "http://localhost http://evil.example",
    " http://localhost",
    "http://",
    "localhost",
    "http://[::2]",
    "http://0.0.0.0",
    "*",
]


@pytest.mark.parametrize("origin", FOREIGN)
def test_foreign_origins_may_not(origin: str) -> None:
    refusal = Gate().check_origin({"host": "127.0.0.1:8080", "origin": origin}, "ws")
    assert refusal is not None and refusal.status == 403


def test_the_servers_own_page_may_connect() -> None:
    gate = Gate()
    assert gate.check_origin({"host": "192.168.1.5:8080", "origin": "http://192.168.1.5:8080"}, "ws") is None
    for origin in ("http://192.168.1.5:8081", "https://192.168.1.5:8080", "http://192.168.1.6:8080"):
        assert gate.check_origin({"host": "192.168.1.5:8080", "origin": origin}, "ws") is not None
    assert gate.check_origin({"host": "192.168.1.5", "origin": "http://192.168.1.5"}, "wss") is not None


def test_under_a_name_the_own_page_needs_a_key_or_a_permission() -> None:
    """Anybody can let a name point here and serve a page under it."""
    headers = {"host": "voice.example", "origin": "https://voice.example"}
    assert Gate().check_origin(headers, "wss") is not None
    assert Gate("k").check_origin(headers, "wss") is None
    assert Gate(origins=["https://voice.example"]).check_origin(headers, "ws") is None


def test_allowed_origins_are_compared_exactly() -> None:
    gate = Gate(origins=["https://a.example", "http://b.example:81"])
    allowed = ("https://a.example", "https://a.example:443", "https://A.EXAMPLE", "http://b.example:81")
    assert all(gate.check_origin({"origin": origin}, "ws") is None for origin in allowed)
    foreign = (
        "http://a.example",
        "https://a.example:444",
        "https://xa.example",
        "http://b.example",
        "http://b.example:8",
    )
    assert all(gate.check_origin({"origin": origin}, "ws") is not None for origin in foreign)


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/x", "", "*"])
def test_an_origin_that_cannot_be_one_is_said_at_once(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allow-origin"):
        Gate(origins=[origin])


def test_keys() -> None:
    gate = Gate("s3cret")
    assert gate.check_key({"authorization": "Bearer s3cret"}) is None
    assert gate.check_key({"authorization": "bearer  s3cret "}) is None
    assert gate.check_key({}, ["realtime", "openai-insecure-api-key.s3cret"]) is None
    for headers, offered in [
        ({}, []),
        ({"authorization": "Bearer s3cre"}, []),
        ({"authorization": "Bearer s3crett"}, []),
        ({"authorization": "Basic s3cret"}, []),
        ({"authorization": "s3cret"}, []),
        ({"authorization": "Bearer "}, []),
        ({"authorization": "Bearer \udce4"}, []),
        ({}, ["openai-insecure-api-key.", "s3cret", "openai-insecure-api-key.other"]),
    ]:
        refusal = gate.check_key(headers, offered)
        assert refusal is not None and refusal.status == 401
    assert Gate().check_key({}) is None


@pytest.mark.parametrize("key", ["", "a b", "ä", "a\n"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        Gate(key)


def test_the_key_is_never_repeated_as_a_subprotocol() -> None:
    assert choose_subprotocol(["openai-insecure-api-key.K", "realtime", "openai-beta.realtime-v1"]) == "realtime"
    assert choose_subprotocol(["openai-insecure-api-key.K"]) is None
    assert choose_subprotocol([]) is None


def test_loopback_and_origin_names() -> None:
    assert all(map(is_loopback, ("localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "localhost.", "example.com", "")))
    assert Origin.parse("https://A.b") == Origin("https", "a.b", 443)


# ----------------------------------------------------------------------------------------------------------------- metrics
def test_metrics_are_prometheus_text() -> None:
    metrics = Metrics()
    before = {"perception": 1.0, "language": 1.0}
    metrics.frame(Timings(0, before | {"tts": 3.0, "codec": 90.0}, end_to_end_ms=95.0, lateness_ms=15.0))
    metrics.frame(Timings(1, before | {"tts": 4.0, "codec": 5000.0}, end_to_end_ms=10.0, lateness_ms=0.0))
    metrics.frame(Timings(0, {"perception": 3.0}, end_to_end_ms=500.0, lateness_ms=400.0))
    metrics.session_ended("done")
    metrics.session_ended("limit", "transcription")
    metrics.error("server_busy")
    metrics.refused("origin")
    text = metrics.text({"ready": 1}, {"tts": True, "codec": False})
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples["vcpipe_ready"] == "1"
    assert samples['vcpipe_stage_up{stage="codec"}'] == "0"
    assert (samples["vcpipe_frames_total"], samples["vcpipe_late_frames_total"]) == ("2", "1")
    assert samples['vcpipe_side_frames_total{task="transcription"}'] == "1"
    assert samples['vcpipe_sessions_total{end="done"}'] == "1"
    assert samples['vcpipe_transcription_sessions_total{end="limit"}'] == "1"
    assert samples['vcpipe_stage_seconds_bucket{stage="perception",le="+Inf"}'] == "3"
    assert samples['vcpipe_errors_total{code="server_busy"}'] == "1"
    assert samples['vcpipe_connections_refused_total{reason="origin"}'] == "1"
    assert samples['vcpipe_stage_seconds_bucket{stage="tts",le="0.005"}'] == "2"
    assert samples['vcpipe_stage_seconds_bucket{stage="codec",le="0.08"}'] == "0"
    assert samples['vcpipe_stage_seconds_bucket{stage="codec",le="2.56"}'] == "1"
    assert samples['vcpipe_stage_seconds_bucket{stage="codec",le="+Inf"}'] == "2"
    assert float(samples['vcpipe_stage_seconds_sum{stage="codec"}']) == pytest.approx(5.09)
    assert samples["vcpipe_frame_lateness_seconds_count"] == "2"
    for line in text.splitlines():
        assert re.fullmatch(
            r'# TYPE \w+ (gauge|counter|histogram)|\w+(\{\w+="[^"]+"(,\w+="[^"]+")*\})? [0-9.e+-]+', line
        )
