"""A relay in front of a prefill server that cuts what it sends, or changes a byte of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Relay:
    """Passes one connection after the other on to a port."""

    def __init__(self, port: int, cut_at: int | None, flip_at: int | None) -> None:
        self._target, self._cut_at, self._flip_at = port, cut_at, flip_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                back = threading.Thread(target=self._pass_on, args=(client, server, None, None), daemon=True)
                back.start()
                self._pass_on(server, client, self._cut_at, self._flip_at)
                back.join(60)
                client.close()
                server.close()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket, cut_at: int | None, flip_at: int | None) -> None:
        count = 0
        with suppress(OSError):
            while data := source.recv(65_536 if cut_at is None else min(65_536, cut_at - count) or 1):
                if cut_at is not None and count >= cut_at:
                    break
                if flip_at is not None and 0 <= flip_at - count < len(data):
                    at = flip_at - count
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                count += len(data)
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(port: int, cut_at: int | None = None, flip_at: int | None = None) -> Iterator[Relay]:
    own = Relay(port, cut_at, flip_at)
    try:
        yield own
    finally:
        own.close()


@contextmanager
def silent_server() -> Iterator[int]:
    """The port of a server that takes connections and never answers, as one whose process is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
