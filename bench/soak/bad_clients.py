"""Bad clients of the soak benchmark: each fault is one coroutine, which returns how the server ended it.

An ending is an HTTP status, "closed" (the server closed the connection), or the client's own: "left", "never stopped".
``IN_PLACE_OF_STREAMS`` ask for answers as good clients do, and each takes the place of one. ``REFUSED`` send what the
server must refuse, or what never becomes a whole request.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specmamba.bench.soak.clients import Address, Requests, Wire, connected

_PATIENCE_S = 60.0
_TINY_BUFFER = 2048
_LARGE = 1 << 30  # bytes that are announced and never sent
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class FaultContext:
    """The arguments of a fault: where to connect, what to ask, and random numbers of its own."""

    address: Address
    requests: Requests
    number: int
    random: random.Random

    @property
    def host(self) -> str:
        return self.requests.host

    def request(self, **fields: object) -> bytes:
        return self.requests.stream(self.number, **fields)


Fault = Callable[[FaultContext], Awaitable[str]]


async def run_fault(fault: Fault, context: FaultContext, until: float = math.inf) -> str:
    """Run a fault until it ends, and at the latest until ``until`` (``time.monotonic()``).

    Returns:
        What the fault returned; "closed": the server closed the connection; "silence": no answer for ``_PATIENCE_S``;
        "went home": the client was stopped at ``until``.
    """
    left_s = until - time.monotonic()
    try:
        async with asyncio.timeout(max(0.0, min(_PATIENCE_S, left_s))):
            return await fault(context)
    except TimeoutError:
        return "silence" if left_s > _PATIENCE_S else "went home"
    except (OSError, asyncio.IncompleteReadError):
        return "closed"


async def hang_up_in_head(m: FaultContext) -> str:
    """Close the connection in the middle of the request's head."""
    async with connected(m.address) as wire:
        await wire.send(m.request()[: m.random.randint(1, 60)])
        return "left"


async def hang_up_in_body(m: FaultContext) -> str:
    """Close the connection in the middle of the request's body."""
    async with connected(m.address) as wire:
        await wire.send(m.request()[:-20])
        _leave(m, wire)
        return "left"


async def hang_up_before_answer(m: FaultContext) -> str:
    """Close the connection after the request, before its answer."""
    async with connected(m.address) as wire:
        await wire.send(m.request())
        await asyncio.sleep(m.random.random() * 0.2)
        _leave(m, wire)
        return "left"


async def hang_up_mid_stream(m: FaultContext) -> str:
    """Close the connection in the middle of a streamed answer."""
    async with connected(m.address) as wire:
        await wire.send(m.request())
        status = await wire.status()
        for _ in range(m.random.randint(1, 20)):
            if not await wire.has_more(4096):
                break
        _leave(m, wire)
        return status


async def stop_reading(m: FaultContext) -> str:
    """Ask for a long answer, read its beginning, and then nothing for longer than the server waits."""
    async with connected(m.address, _TINY_BUFFER) as wire:
        await wire.send(m.request(max_tokens=400, logprobs=5))
        status = await wire.status()
        await asyncio.sleep(m.random.uniform(2, 8))
        wire.reset()
        return status


async def read_slowly(m: FaultContext) -> str:
    """Read a streamed answer much slower than it is produced."""
    async with connected(m.address, _TINY_BUFFER) as wire:
        await wire.send(m.request())
        status = await wire.status()
        while await wire.has_more(200):  # noqa: ASYNC110 -- no event to wait for, the client is slow
            await asyncio.sleep(0.05)
        return status


async def constrained(m: FaultContext) -> str:
    """Ask for an answer constrained by a schema: valid, but more work for the server than other requests."""
    async with connected(m.address) as wire:
        await wire.send(
            m.request(json_schema=_SCHEMA, ignore_eos=False, stream=False, stream_options=None, max_tokens=48)
        )
        return await wire.status()


def _leave(m: FaultContext, wire: Wire) -> None:
    """Close with a reset, every other time; else the context closes as usual."""
    if m.random.random() < 0.5:
        wire.reset()


IN_PLACE_OF_STREAMS: Mapping[str, Fault] = {
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


def _raw(data: bytes | Callable[[FaultContext], bytes]) -> Fault:
    """Make a fault that sends these bytes and returns the status of the answer."""

    async def fault(m: FaultContext) -> str:
        async with connected(m.address) as wire:
            await wire.send(data if isinstance(data, bytes) else data(m))
            return await wire.status()

    return fault


def _post(content: bytes, head: str = "") -> Fault:
    def data(m: FaultContext) -> bytes:
        lines = ("POST /v1/completions HTTP/1.1", f"Host: {m.host}", head or "Content-Type: application/json")
        return "\r\n".join((*lines, f"Content-Length: {len(content)}", "", "")).encode() + content

    return _raw(data)


def _fields(**fields: object) -> Fault:
    """Make a fault that sends a completion request with these additional fields."""
    return _post(json.dumps({"prompt": "def main():", **fields}).encode())


async def slow_head(m: FaultContext) -> str:
    """Send the head byte by byte, for as long as the server allows it."""
    async with connected(m.address) as wire:
        return await _trickle(wire, b"GET /health HTTP/1.1\r\nX-Padding: " + b"a" * 600)


async def slow_body(m: FaultContext) -> str:
    """Send the body a few bytes at a time."""
    async with connected(m.address) as wire:
        request = m.request(padding="a" * 600)
        await wire.send(request[:-600])
        return await _trickle(wire, request[-600:-1])


async def aborted_upload(m: FaultContext) -> str:
    """Announce a large body, send a part of it and reset the connection."""
    async with connected(m.address) as wire:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {m.host}\r\nContent-Type: application/json\r\n"
        await wire.send(f"{head}Content-Length: 4000000\r\n\r\n".encode() + b'{"prompt": "' + b"a" * 300_000)
        wire.reset()
        return "left"


async def _trickle(wire: Wire, data: bytes) -> str:
    answer = asyncio.create_task(wire.status())
    try:
        for place in range(len(data)):
            await wire.send(data[place : place + 1])
            done, _ = await asyncio.wait({answer}, timeout=0.1)
            if done:
                return await answer
        return "never stopped"
    finally:
        answer.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await answer


def _oversize(m: FaultContext) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {m.host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {_LARGE}\r\n\r\n".encode()


REFUSED: Mapping[str, Fault] = {
    "no JSON": _post(b'{"prompt": "a", '),
    "deep JSON": _post(b"[" * 100_000),
    "no UTF-8": _post(b'{"prompt": "\xff\xfe"}'),
    "lone surrogate": _post(b'{"prompt": "\\ud800"}'),
    "wrong type": _fields(max_tokens="many"),
    "unknown field": _fields(no_such_field=1),
    "not a number": _post(b'{"prompt": "a", "temperature": NaN}'),
    "out of range": _fields(temperature=-1),
    "token out of range": _fields(prompt=[2**30]),
    "empty prompt": _fields(prompt=""),
    "no such model": _fields(model="no-such-model"),
    "no JSON announced": _post(b"a=b", "Content-Type: application/x-www-form-urlencoded"),
    "too large": _raw(_oversize),
    "garbage": _raw(lambda m: m.random.randbytes(200) + b"\r\n\r\n"),
    "wrong method": _raw(lambda m: f"DELETE /v1/completions HTTP/1.1\r\nHost: {m.host}\r\n\r\n".encode()),
    "no such path": _raw(lambda m: f"GET /no/such/path HTTP/1.1\r\nHost: {m.host}\r\n\r\n".encode()),
    "no HTTP version": _raw(b"GET /health SPDY/9\r\n\r\n"),
    "huge header": _raw(b"GET /health HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n"),
    "slow head": slow_head,
    "slow body": slow_body,
    "aborted upload": aborted_upload,
}


def next_fault(faults: Mapping[str, Fault], count: int) -> tuple[str, Fault]:
    """The fault of turn ``count``: they take turns, so that even a short run has all of them."""
    items: list[tuple[str, Any]] = list(faults.items())
    return items[count % len(items)]
