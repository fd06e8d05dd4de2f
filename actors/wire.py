"""An actor's sockets: data in, data out, reports, control. One place for their options."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import zmq

from vcpipe.schemas.control import CONTROL
from vcpipe.schemas.envelope import NO_FRAME, Codec, Header, Message, join, pack, split
from vcpipe.schemas.errors import ConfigError, StageTimeoutError
from vcpipe.schemas.messages import DATA

#: A peer that takes nothing for this long is gone or stuck.
SEND_TIMEOUT_S = 120.0
_POLL_MS = 50


@dataclass(frozen=True, slots=True)
class StageEndpoints:
    """Where an actor binds (``data_in``, ``control``) and where it connects (``data_out``, ``reports``)."""

    data_in: str
    control: str
    reports: str
    data_out: str | None


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context whose sockets never hold up the end of the process: pyzmq's own default lingers for ever."""
    context = zmq.Context()
    context.linger = 0
    return context


def bind(socket: zmq.Socket[bytes], endpoint: str, who: str) -> None:
    """Bind; ConfigError where the endpoint is taken or none."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{who} cannot bind {endpoint!r}: {error.strerror}; give a free endpoint such as "
            "tcp://127.0.0.1:5599 or ipc:///tmp/vcpipe.sock"
        ) from None


class Sender:
    """A PUSH socket that numbers and stamps what it sends. For one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.PUSH)
        # Without it a message for a peer that is not there (yet) would sit in a pipe nobody reads.
        self.socket.immediate = True
        self.socket.connect(endpoint)
        self._seq = 0

    def send(self, message: Message, session: str = "", epoch: int = 0, frame_index: int = NO_FRAME) -> None:
        """Send, waiting at most :data:`SEND_TIMEOUT_S` for the peer; then StageTimeoutError."""
        deadline = time.monotonic() + SEND_TIMEOUT_S
        while not self.try_send(message, session, epoch, frame_index):
            self.socket.poll(_POLL_MS, zmq.POLLOUT)
            if time.monotonic() > deadline:
                where = self.socket.last_endpoint
                raise StageTimeoutError(f"{message.KIND}: nobody took it at {where!r} in {SEND_TIMEOUT_S:.0f} s")

    def try_send(self, message: Message, session: str = "", epoch: int = 0, frame_index: int = NO_FRAME) -> bool:
        """Send if the peer has room now; returns whether it had."""
        header = Header(session, epoch, frame_index, self._seq, time.monotonic_ns())
        try:
            self.socket.send(join(pack(header, message)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._seq += 1
        return True


class StageWire:
    """All sockets of an actor's main thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: StageEndpoints) -> None:
        self.context = context
        self._endpoints = endpoints
        self._control = context.socket(zmq.PULL)
        bind(self._control, endpoints.control, "the stage")
        self._data = context.socket(zmq.PULL)
        bind(self._data, endpoints.data_in, "the stage")
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(self._data, zmq.POLLIN)
        self.reports = Sender(context, endpoints.reports)
        self.out = Sender(context, endpoints.data_out) if endpoints.data_out else None

    def new_reporter(self) -> Sender:
        """A further report socket, for another thread."""
        return Sender(self.context, self._endpoints.reports)

    def wait(self, timeout_ms: int) -> tuple[bool, bool]:
        """Until control or data is there, or the time is over. Returns which of them is."""
        readable = [socket for socket, _ in self._poller.poll(timeout_ms)]
        return self._control in readable, self._data in readable

    def wait_writable(self) -> None:
        """Until the next stage has room, at most a poll's length."""
        if self.out is not None:
            self.out.socket.poll(_POLL_MS, zmq.POLLOUT)

    def next_control(self) -> tuple[Header, Any] | None:
        """A control message that is there now."""
        # Asking first costs a tenth of the exception that says there is none.
        if not zmq.zmq_poll([(self._control, zmq.POLLIN)], 0):
            return None
        return receive(self._control, CONTROL)

    def next_data(self) -> tuple[Header, Any]:
        """The data message that :meth:`wait` saw; its arrays are views of the received buffers."""
        return receive(self._data, DATA)


def receive(socket: zmq.Socket[bytes], codec: Codec) -> tuple[Header, Any]:
    """The message that a poll saw on ``socket``."""
    return codec.unpack(split(socket.recv(zmq.NOBLOCK)))
