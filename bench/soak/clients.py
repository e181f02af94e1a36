"""Good clients, which stream one answer after the other, and the raw connections of bad ones."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from specmamba.bench.http_overhead.client import Connection, num_tokens, request_bytes
from specmamba.errors import SpecmambaError
from specmamba.measure.prompts import bundled_texts

_LAST_CHUNK = b"0\r\n\r\n"
_PATIENCE_S = 120.0  # for one answer
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Timing:
    """The latency of one answer in seconds: to its first text, and per token after that."""

    first_s: float
    per_token_s: float


@dataclass
class Tally:
    """What happened to the clients of one phase."""

    timings: list[Timing] = field(default_factory=list)
    num_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # of good clients, by message
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # of bad clients, by (fault, ending)


@dataclass(frozen=True, slots=True)
class Requests:
    """Makes seeded requests: bundled prompts, and answers of many lengths, so that clients do not run in step."""

    host: str
    prompts: Sequence[str]
    max_tokens: int
    seed: int

    @classmethod
    def to(cls, address: Address, max_tokens: int, seed: int) -> Requests:
        return cls(f"{address[0]}:{address[1]}", [text.text for text in bundled_texts()], max_tokens, seed)

    def stream(self, number: int, **fields: object) -> bytes:
        """A request for a streamed completion of 1/4 to all of ``max_tokens``; ``fields`` replace its own fields."""
        chosen = random.Random(f"{self.seed} {number}")
        return request_bytes(
            self.host,
            {
                "prompt": chosen.choice(self.prompts),
                "max_tokens": chosen.randint(max(1, self.max_tokens // 4), self.max_tokens),
                "temperature": 0.8,
                "seed": number,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **fields,
            },
        )


async def connect(address: Address) -> Connection:
    """Open a connection to a server."""
    return (await asyncio.get_running_loop().create_connection(Connection, *address))[1]


async def well_behaved(address: Address, next_request: Callable[[], bytes], until: float, tally: Tally) -> None:
    """Ask one request after the other until ``until`` (``time.monotonic()``), and read the last answer to its end."""
    connection: Connection | None = None
    while time.monotonic() < until:
        try:
            if connection is None:
                connection = await connect(address)
            async with asyncio.timeout(_PATIENCE_S):
                answer = await connection.ask(next_request())
            count = num_tokens(answer)
            tally.timings.append(timing(connection, count))
            tally.num_tokens += count
        except (SpecmambaError, OSError) as error:  # a TimeoutError is an OSError
            tally.failures[f"{type(error).__name__}: {error}"[:200]] += 1
            if connection is not None:
                connection.close()
            connection = None
            await asyncio.sleep(0.1)
    if connection is not None:
        connection.close()


def timing(connection: Connection, count: int) -> Timing:
    """The latency of the latest answer on a connection, which has ``count`` tokens."""
    spent_s = connection.last_at - connection.first_at
    return Timing(connection.first_at - connection.sent_at, spent_s / max(1, count - 1))


class Wire:
    """A connection that sends and receives raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._tail = b""

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> str:
        """Read the status of the answer, or "closed"."""
        line = await self.reader.readline()
        return line.split()[1].decode() if line.startswith(b"HTTP/") else "closed"

    async def has_more(self, size: int) -> bool:
        """Read up to ``size`` bytes of a streamed answer; False at its end, where the connection stays open."""
        data = await self.reader.read(size)
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        return bool(data) and self._tail != _LAST_CHUNK

    def reset(self) -> None:
        """Close at once with a TCP reset."""
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def connected(address: Address, buffer: int | None = None) -> AsyncIterator[Wire]:
    """A connection that is closed with the context. ``buffer``: size of the kernel's receive buffer in bytes."""
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)  # has no effect after connecting
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    wire = Wire(*await asyncio.open_connection(sock=connection, limit=buffer or 1 << 16))
    try:
        yield wire
    finally:
        wire.writer.close()
