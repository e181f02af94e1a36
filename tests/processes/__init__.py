"""What tests with processes beside them share: ports, and lines that a process may never write."""

from __future__ import annotations

import queue
import random
import socket
from contextlib import suppress
from threading import Thread
from typing import IO


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def unassigned_port() -> int:
    """A free port, of those that the system gives to none by itself: Ray's processes take many of the others."""
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


class Lines:
    """The lines that a process writes, each of which is waited for only so long: it may be stopped, or hang."""

    def __init__(self, stream: IO[str] | None) -> None:
        assert stream is not None
        self._stream, self._lines = stream, queue.SimpleQueue[str | None]()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stream:
            self._lines.put(line)
        self._lines.put(None)

    def next(self, timeout_s: float) -> str:
        """The next line.

        Raises:
            TimeoutError: there is none in this time.
            EOFError: there will be none.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no line within {timeout_s} s") from None
        if line is None:
            self._lines.put(None)
            raise EOFError("the process writes no more")
        return line

    def close(self) -> None:
        """Close the stream of a process that has ended."""
        self._reader.join(60)
        self._stream.close()
