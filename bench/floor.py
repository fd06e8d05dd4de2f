"""What five hops cost without vcpipe: bare sockets hand the same number of bytes around the same number of processes.

``python -m vcpipe.bench.floor FROM TO BYTES`` is one of the processes: what it gets at FROM it answers with BYTES bytes at TO.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import zmq

#: A process that hears nothing for this long is left over.
_PATIENCE_MS = 60_000


def measure(sizes: Sequence[int], frames: int, warm: int, pause_s: float) -> list[float]:
    """Milliseconds of each round: from here through ``len(sizes) - 1`` processes and back, ``sizes`` bytes a hop."""
    with tempfile.TemporaryDirectory(prefix="vcpipe-") as folder, zmq.Context() as context:
        pipes = [f"ipc://{folder}/{hop}" for hop in range(len(sizes))]
        receiver, sender = _sockets(context, pipes[-1], pipes[0])
        relays = [
            subprocess.Popen([sys.executable, "-m", "vcpipe.bench.floor", pipe, following, str(size)])
            for pipe, following, size in zip(pipes, pipes[1:], sizes[1:], strict=False)
        ]
        try:
            # One more than asked for: the first waits for the processes to start.
            return [_round(sender, receiver, sizes[0], pause_s) for _ in range(1 + warm + frames)][1 + warm :]
        finally:
            for relay in relays:
                relay.kill()
                relay.wait()


def _round(sender: zmq.Socket[bytes], receiver: zmq.Socket[bytes], size: int, pause_s: float) -> float:
    payload = bytes(size)
    time.sleep(pause_s)
    started_ns = time.monotonic_ns()
    sender.send(payload)
    receiver.recv()
    return (time.monotonic_ns() - started_ns) / 1e6


def _sockets(
    context: zmq.Context[zmq.Socket[bytes]], origin: str, destination: str
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (receiver, sender):
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = _PATIENCE_MS
    receiver.bind(origin)
    sender.connect(destination)
    return receiver, sender


def _relay(origin: str, destination: str, size: int) -> None:
    receiver, sender = _sockets(zmq.Context(), origin, destination)
    payload = bytes(size)
    while True:
        receiver.recv()
        sender.send(payload)


if __name__ == "__main__":
    _relay(sys.argv[1], sys.argv[2], int(sys.argv[3]))
