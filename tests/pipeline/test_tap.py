"""The tap: copies of everything for whoever listens, whenever they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq
from waiting import PATIENCE_S

from vcpipe.pipeline.pipeline import Pipeline
from vcpipe.pipeline.session import VoiceChatSession
from vcpipe.pipeline.tap import TapPublisher, TapSubscriber
from vcpipe.schemas.envelope import NO_FRAME
from vcpipe.schemas.errors import ConfigError, VcpipeError
from vcpipe.schemas.events import Event
from vcpipe.schemas.geometry import STAGES
from vcpipe.schemas.tap import TapEvent, TapSession, TapTiming


def step_until_heard(session: VoiceChatSession, tap: TapSubscriber) -> list[Any]:
    """Let single frames go until the tap hears of one: a subscription takes a moment to arrive."""
    for _ in range(290):
        session.step()
        if heard := list(tap.messages(timeout_s=0.05)):
            return heard
    raise AssertionError("the tap heard nothing")


def listen_until(tap: TapSubscriber, heard: list[Any], enough: Callable[[], bool]) -> None:
    """Append what the tap says until it is enough, however late it comes."""
    for message in tap.messages(PATIENCE_S):
        heard.append(message)
        if enough():
            return
    raise AssertionError(f"not enough: {heard}")


def test_a_late_subscriber_joins_and_sees_what_it_missed(pipeline: Pipeline, shared: Any) -> None:
    with pipeline.open_session(clock="stepped", seed=4) as session:
        session.feed(np.zeros(300 * 1280))
        session.step(5)
        reading = session.events()
        while session.frames_done < 4:
            next(reading)
        with TapSubscriber(shared.tap) as tap:
            heard = step_until_heard(session, tap)
            missed = heard[0][1].seq
            session.step(3)
            session.cancel()
            session.close()
            listen_until(tap, heard, lambda: heard[-1][2] == TapSession("ended"))
        deliveries = shared.all_heard_of(session.id)
    assert missed > 4  # all that went before, this session's first frames among it
    assert [header.seq for _, header, _ in heard] == list(range(missed, missed + len(heard)))
    assert {header.session for _, header, _ in heard} == {session.id}
    assert all(_says(message, delivery) for message, delivery in zip(heard, deliveries[-len(heard) :], strict=True))
    assert [topic for topic, _, _ in heard[-2:]] == ["event.cancelled", "session"]


def _says(heard: tuple[str, Any, Any], delivery: Any) -> bool:
    """Whether the tap's message is the copy of what the session was given."""
    topic, header, message = heard
    if isinstance(delivery, Event):
        assert (topic, header.frame_index) == (f"event.{delivery.kind}", delivery.frame_index)
        assert isinstance(message, TapEvent)
        same = (message.name, message.token_id, message.delta, message.text, message.sample_rate)
        assert same == (delivery.kind, delivery.token_id, delivery.delta, delivery.text, delivery.sample_rate)
        np.testing.assert_array_equal(message.samples, delivery.samples)
        np.testing.assert_array_equal(message.audio_codes, delivery.audio_codes)
        return True
    if isinstance(message, TapTiming):
        assert (topic, header.frame_index) == ("timing", delivery.frame_index)
        return [stage for stage, *_ in message.stages] == list(delivery.stages)
    return (topic, header.frame_index, message) == ("session", NO_FRAME, TapSession(delivery))


def test_a_topic_of_ones_own_shows_gaps_in_seq(pipeline: Pipeline, shared: Any) -> None:
    with pipeline.open_session(clock="stepped") as session, TapSubscriber(shared.tap, topics=("timing",)) as tap:
        session.feed(np.zeros(300 * 1280))
        heard = step_until_heard(session, tap)
        session.step(3)
        wanted = len(heard) + 3
        listen_until(tap, heard, lambda: len(heard) == wanted)
        session.cancel()
    assert {topic for topic, _, _ in heard} == {"timing"}
    steps = np.diff([header.seq for _, header, _ in heard])
    assert (steps > 1).all()
    assert sorted(stage for stage, *_ in heard[-1][2].stages) == sorted(STAGES)


def test_a_session_that_fails_says_so_on_the_tap(pipeline: Pipeline, shared: Any) -> None:
    with TapSubscriber(shared.tap, topics=("session",)) as tap:
        heard: list[Any] = []
        last_words = [TapSession("failed", "tts: this frame cannot be"), TapSession("ended")]
        deadline = time.monotonic() + PATIENCE_S
        # Until the subscription has arrived in time for a whole session.
        while heard[-2:] != last_words and time.monotonic() < deadline:
            with pytest.raises(VcpipeError), pipeline.open_session(system_prompt="tts:fail@0") as session:
                session.push_audio(np.zeros(1280))
            heard = [message for _, header, message in tap.messages(timeout_s=0.2) if header.session == session.id]
    assert heard[-2:] == last_words


def test_the_tap_never_waits_for_a_listener_that_does_not_read() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = TapPublisher(context, "inproc://deaf")
    deaf = context.socket(zmq.SUB)
    deaf.connect("inproc://deaf")
    deaf.subscribe("")
    started = time.monotonic()
    for index in range(20_000):
        publisher.publish("s", Event("assistant_text_delta", index, 1, "a", "a"))
    assert time.monotonic() - started < PATIENCE_S
    received = 0
    while deaf.poll(0):
        deaf.recv_multipart()
        received += 1
    assert 0 < received < 20_000
    context.destroy(linger=0)


def test_a_subscriber_needs_an_endpoint() -> None:
    with pytest.raises(ConfigError, match="'5599' is not an endpoint: .*; accepted: tcp://HOST:PORT, ipc://PATH"):
        TapSubscriber("5599")


def test_a_tap_that_says_nothing_ends(short_folder: Any) -> None:
    with TapSubscriber(f"ipc://{short_folder}/nobody") as tap:
        assert list(tap.messages(timeout_s=0.05)) == []
