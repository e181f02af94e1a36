"""Bad clients. What each does is one coroutine; it says how that ended, in a word: a status, "closed", or its own end.

These here ask for answers as good clients do, and each takes the place of one. refused.py has those that get
nothing from the engine.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from specmamba.bench.soak.clients import Address, Requests

_PATIENCE_S = 60.0
_TINY_BUFFER = 2048
_LAST_CHUNK = b"0\r\n\r\n"
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Mischief:
    """What a bad client has to work with."""

    address: Address
    requests: Requests
    number: int
    random: random.Random

    @property
    def host(self) -> str:
        return self.requests.host

    def request(self, **fields: object) -> bytes:
        return self.requests.stream(self.number, **fields)


Fault = Callable[[Mischief], Awaitable[str]]


class Wire:
    """A connection of bare bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._tail = b""

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> str:
        """Of the answer, or "closed"."""
        line = await self.reader.readline()
        return line.split()[1].decode() if line.startswith(b"HTTP/") else "closed"

    async def has_more(self, size: int) -> bool:
        """Read up to ``size`` bytes of a streamed answer; False at its end, for the connection stays open."""
        data = await self.reader.read(size)
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        return bool(data) and self._tail != _LAST_CHUNK

    def reset(self) -> None:
        """Close without a farewell: the other side gets a reset."""
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def connected(address: Address, buffer: int | None = None) -> AsyncIterator[Wire]:
    """A connection that is closed with the context. ``buffer``: bytes that the kernel may keep of what comes."""
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)  # before it connects, or it is too late
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


async def commit(fault: Fault, mischief: Mischief, until: float = math.inf) -> str:
    """Do it; "closed": the server ended a connection on the way. At ``until`` (time.monotonic()) the client leaves."""
    left_s = until - time.monotonic()
    try:
        async with asyncio.timeout(max(0.0, min(_PATIENCE_S, left_s))):
            return await fault(mischief)
    except TimeoutError:
        return "silence" if left_s > _PATIENCE_S else "went home"
    except (OSError, asyncio.IncompleteReadError):
        return "closed"


async def hang_up_in_head(m: Mischief) -> str:
    """Close the connection in the middle of the request's head."""
    async with connected(m.address) as wire:
        await wire.send(m.request()[: m.random.randint(1, 60)])
        return "left"


async def hang_up_in_body(m: Mischief) -> str:
    """Close the connection in the middle of the request's body."""
    async with connected(m.address) as wire:
        await wire.send(m.request()[:-20])
        _leave(m, wire)
        return "left"


async def hang_up_before_answer(m: Mischief) -> str:
    """Close the connection after the request, before its answer."""
    async with connected(m.address) as wire:
        await wire.send(m.request())
        await asyncio.sleep(m.random.random() * 0.2)
        _leave(m, wire)
        return "left"


async def hang_up_mid_stream(m: Mischief) -> str:
    """Close the connection in the middle of a streamed answer."""
    async with connected(m.address) as wire:
        await wire.send(m.request())
        status = await wire.status()
        for _ in range(m.random.randint(1, 20)):
            if not await wire.has_more(4096):
                break
        _leave(m, wire)
        return status


async def stop_reading(m: Mischief) -> str:
    """Ask for much, read a little, and then nothing for longer than the server waits."""
    async with connected(m.address, _TINY_BUFFER) as wire:
        await wire.send(m.request(max_tokens=400, logprobs=5))
        status = await wire.status()
        await asyncio.sleep(m.random.uniform(2, 8))
        wire.reset()
        return status


async def read_slowly(m: Mischief) -> str:
    """Read a streamed answer much slower than it is produced."""
    async with connected(m.address, _TINY_BUFFER) as wire:
        await wire.send(m.request())
        status = await wire.status()
        while await wire.has_more(200):  # noqa: ASYNC110 -- it waits for nobody, it is slow
            await asyncio.sleep(0.05)
        return status


async def constrained(m: Mischief) -> str:
    """No fault, but more work than most: an answer that a schema binds, taken whole."""
    async with connected(m.address) as wire:
        await wire.send(
            m.request(json_schema=_SCHEMA, ignore_eos=False, stream=False, stream_options=None, max_tokens=48)
        )
        return await wire.status()


def _leave(m: Mischief, wire: Wire) -> None:
    """Close, with a reset every other time."""
    if m.random.random() < 0.5:
        wire.reset()


ON_A_STREAM: Mapping[str, Fault] = {
    function.__name__.replace("_", " "): function
    for function in (
        hang_up_in_head,
        hang_up_in_body,
        hang_up_before_answer,
        hang_up_mid_stream,
        stop_reading,
        read_slowly,
        constrained,
    )
}


def next_fault(faults: Mapping[str, Fault], count: int) -> tuple[str, Fault]:
    """In turns, so that even a short run has them all."""
    items: list[tuple[str, Any]] = list(faults.items())
    return items[count % len(items)]
