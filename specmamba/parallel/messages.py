"""Lines of JSON between the processes of one machine, over sockets that only processes of the same user can reach.

The sockets have abstract names (``unix(7)``): no file is left behind, and the kernel tells who is at the other end.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

MAX_MESSAGE_BYTES = 1 << 28  # a prompt of a million tokens is a tenth of that
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_TIME = struct.Struct("ll")  # of the kernel: seconds, microseconds
_READ_BYTES = 1 << 16
_DECODER = json.JSONDecoder()


class Messages:
    """Messages over one connection: dictionaries of plain values. One thread reads, any number of them write."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, bytearray()
        self._num_scanned = 0  # bytes of the buffer that have no end of a line
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The descriptor, to wait for several connections."""
        return self._connection.fileno()

    def limit_sends(self, seconds: int) -> None:
        """Let ``send`` fail, with OSError, where the other side reads nothing for so long."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(seconds, 0))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises OSError: the other side has ended; ValueError: as ``encoded``."""
        self.send_line(encoded(message))

    def send_line(self, line: bytes) -> None:
        """Send a message that ``encoded`` gave. Raises OSError: the other side has ended."""
        with self._lock:
            self._connection.sendall(self._sealed(line))

    def receive(self) -> dict[str, Any] | None:
        """Wait for a message; None: the other side has ended.

        Raises:
            OSError: the connection is broken, or the message is too long.
            ValueError: what arrives is no message.
        """
        while (message := self._next()) is None:
            if not self._read():
                return None
        return message

    def arrived(self) -> Iterator[dict[str, Any]]:
        """All messages that have arrived, without waiting.

        Raises:
            EOFError: the other side has ended, and an earlier call has given its last message.
            OSError, ValueError: as ``receive``.
        """
        num_read = _READ_BYTES
        while True:
            while (message := self._next()) is not None:
                yield message
            if num_read < _READ_BYTES:
                return  # that was all: to ask for more would cost a call of the system for each message
            try:
                num_read = self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not num_read:
                raise EOFError

    def _next(self) -> dict[str, Any] | None:
        """Take the next whole message out of the buffer."""
        end = self._buffer.find(b"\n", self._num_scanned)
        if end < 0:
            self._num_scanned = len(self._buffer)
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._num_scanned = 0
        message = _DECODER.decode(self._opened(line).decode())
        if not isinstance(message, dict):
            raise ValueError("a message is a dictionary")
        return message

    def _sealed(self, line: bytes) -> bytes:
        """What goes over for a line, with its end; called under the lock."""
        return line

    def _opened(self, line: bytes) -> bytes:
        """The line that has come over, without its end. Raises ValueError: it is none of the other side."""
        return line

    def _read(self, flags: int = 0) -> int:
        """Read into the buffer. Returns the number of bytes; 0: the other side has ended."""
        if len(self._buffer) > MAX_MESSAGE_BYTES:
            raise OSError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        data = self._connection.recv(_READ_BYTES, flags)
        self._buffer += data
        return len(data)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def encoded(message: dict[str, Any]) -> bytes:
    """The line of a message. Raises ValueError: it is longer than the other side reads."""
    line = json.dumps(message).encode() + b"\n"
    if len(line) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message between ranks has {len(line)} bytes, and {MAX_MESSAGE_BYTES} is the most")
    return line


def listen(name: str, backlog: int) -> socket.socket:
    """Listen under an abstract name. Raises OSError: it is in use."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind("\0" + name)
        server.listen(backlog)
    except OSError:
        server.close()
        raise
    return server


def connect(name: str) -> Messages:
    """Connect to who listens under an abstract name. Raises OSError as ``connected``."""
    return Messages(connected(name))


def connected(name: str) -> socket.socket:
    """A connection with who listens under an abstract name.

    Raises:
        OSError: no process does, or it is another user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect("\0" + name)
        peer_process(connection)
    except OSError:
        connection.close()
        raise
    return connection


def peer_process(connection: socket.socket) -> int:
    """The id of the process at the other end. Raises OSError: it belongs to another user."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(given)
    if user != os.getuid():
        raise PermissionError(f"the process {process} at the other end belongs to another user")
    return int(process)
