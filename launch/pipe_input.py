"""Bytes of a pipe, whose reader another thread can bring to an end.

A thread that waits in a read cannot be joined, and a process that ends meanwhile is in trouble: so it waits for the pipe or
for :meth:`PipeInput.stop`, whichever comes first.
"""

from __future__ import annotations

import io
import os
import select
from typing import IO, Any


class PipeInput(io.RawIOBase):
    """``stream``, a pipe or terminal from which nothing was read yet. Closing it closes ``stream``, unless ``keep_open``."""

    def __init__(self, stream: IO[bytes], *, keep_open: bool = False) -> None:
        self._stream = None if keep_open else stream
        self._fd = stream.fileno()
        self._wake_reader, self._wake_writer = os.pipe()

    def readable(self) -> bool:
        """See RawIOBase."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See RawIOBase: what is there, at least a byte; 0 at the end, and once it was stopped."""
        ready, _, _ = select.select([self._fd, self._wake_reader], [], [])
        if self._wake_reader in ready:
            return 0
        return os.readv(self._fd, [buffer])

    def wait(self, seconds: float) -> bool:
        """Whether a read would give something, or the end, within so long."""
        ready, _, _ = select.select([self._fd, self._wake_reader], [], [], seconds)
        return bool(ready)

    def stop(self) -> None:
        """This is the end, whatever else the pipe may hold. Any thread."""
        os.write(self._wake_writer, b"\0")

    def close(self) -> None:
        """See RawIOBase."""
        if not self.closed:
            super().close()
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            if self._stream is not None:
                self._stream.close()
