"""A minimal HTTP client for load on the same machine: it takes as little processor time from the server as possible.

An answer is kept as raw bytes and parsed after its end.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from specmamba.errors import SpecmambaError

PATH = "/v1/completions"
_HEAD_END, _LAST_CHUNK = b"\r\n\r\n", b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection that stays open, for one request at a time.

    ``sent_at``, ``first_at`` and ``last_at`` are times of ``time.perf_counter()``: the latest request was sent, the
    first bytes of its answer's body arrived, and the last ones.
    """

    def __init__(self) -> None:
        self.sent_at = self.first_at = self.last_at = 0.0
        self._bytes = bytearray()
        self._head_size = self._end = 0  # 0: not known yet; _end: -1 for a body in chunks
        self._answer: asyncio.Future[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        if not self._head_size:
            self._read_head()
        if self._head_size and len(self._bytes) > self._head_size:
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
        if self._head_size and self._has_ended():
            answer, self._answer = self._answer, None
            if answer is not None and not answer.done():
                answer.set_result(bytes(self._bytes))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(SpecmambaError(f"the server hung up: {error or 'end of file'}"))

    async def ask(self, request: bytes) -> bytes:
        """Send a whole request and wait for its answer.

        Returns:
            The bytes of the answer, head included.

        Raises:
            SpecmambaError: the server hung up.
        """
        if self._transport is None or self._transport.is_closing():
            raise SpecmambaError("the connection is closed")
        self.sent_at, self.first_at = time.perf_counter(), 0.0
        self._bytes, self._head_size, self._end = bytearray(), 0, 0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _read_head(self) -> None:
        place = self._bytes.find(_HEAD_END)
        if place < 0:
            return
        self._head_size = place + len(_HEAD_END)
        length = _content_length(bytes(self._bytes[:place]))
        self._end = -1 if length is None else self._head_size + length

    def _has_ended(self) -> bool:
        return self._bytes.endswith(_LAST_CHUNK) if self._end < 0 else len(self._bytes) >= self._end


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The bytes of an answer, head included, and when they arrived: times, and how many bytes there were then."""

    data: bytes
    times: tuple[float, ...]
    sizes: tuple[int, ...]

    def arrived_at(self, end: int) -> float:
        """When the first ``end`` bytes were there."""
        return self.times[bisect_left(self.sizes, end)]


class TimedConnection(Connection):
    """A connection that keeps the time of everything that arrives."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[tuple[float, int]] = []

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), len(data)))
        super().data_received(data)

    async def ask_timed(self, request: bytes) -> TimedAnswer:
        """As ``ask``, with times."""
        self._pieces = []
        data = await self.ask(request)
        sizes = accumulate(length for _, length in self._pieces)
        return TimedAnswer(data, tuple(at for at, _ in self._pieces), tuple(sizes))


ConnectionT = TypeVar("ConnectionT", bound=Connection)
AnswerT = TypeVar("AnswerT")


def request_bytes(host: str, body: Mapping[str, Any]) -> bytes:
    """The bytes of a POST request with a JSON body to the completions of ``host`` ("address:port")."""
    data = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def num_tokens(answer: bytes) -> int:
    """The completion tokens in the usage of an answer, whole or streamed.

    Raises:
        SpecmambaError: the status is not 200, or the answer ended before its usage.
    """
    head, _, body = answer.partition(_HEAD_END)
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise SpecmambaError(f"the server answered {head[:60]!r}: {body[:300]!r}")
    whole = body if _content_length(head) is not None else _joined(body)
    events = [line.removeprefix(b"data: ") for line in whole.split(b"\n") if line.startswith(b"data: {")]
    last = json.loads(events[-1] if events else whole)
    if last.get("usage") is None:
        raise SpecmambaError(f"the answer broke off: {last}")
    return int(last["usage"]["completion_tokens"])


async def ask_all(address: tuple[str, int], requests: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Send requests on one connection per inner sequence, all at once; on a connection one after the other."""
    answers = await _on_connections(Connection, Connection.ask, address, requests)
    return [answer for of_one in answers for answer in of_one]


async def ask_all_timed(address: tuple[str, int], requests: Sequence[Sequence[bytes]]) -> list[list[TimedAnswer]]:
    """As ``ask_all``, with times; the answers of each connection in a list of its own."""
    return await _on_connections(TimedConnection, TimedConnection.ask_timed, address, requests)


async def _on_connections(
    kind: type[ConnectionT],
    ask: Callable[[ConnectionT, bytes], Awaitable[AnswerT]],
    address: tuple[str, int],
    requests: Sequence[Sequence[bytes]],
) -> list[list[AnswerT]]:
    loop = asyncio.get_running_loop()
    connections = [(await loop.create_connection(kind, *address))[1] for _ in requests]

    async def client(connection: ConnectionT, own: Sequence[bytes]) -> list[AnswerT]:
        return [await ask(connection, request) for request in own]

    try:
        return await asyncio.gather(*map(client, connections, requests))
    finally:
        for connection in connections:
            connection.close()


def _content_length(head: bytes) -> int | None:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return None


def _joined(chunked: bytes) -> bytes:
    parts, place = [], 0
    while (end := chunked.find(b"\r\n", place)) >= 0:
        size = int(chunked[place:end].partition(b";")[0], 16)
        parts.append(chunked[end + 2 : end + 2 + size])
        place = end + 4 + size
    return b"".join(parts)
