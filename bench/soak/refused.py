"""Bad clients that get nothing from the engine: what they send is refused, or never becomes a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress

from specmamba.bench.soak.bad_clients import Fault, Mischief, Wire, connected

_LARGE = 1 << 30  # bytes that are announced and never sent


def _raw(data: bytes | Callable[[Mischief], bytes]) -> Fault:
    """Send these bytes, and see what comes."""

    async def fault(m: Mischief) -> str:
        async with connected(m.address) as wire:
            await wire.send(data if isinstance(data, bytes) else data(m))
            return await wire.status()

    return fault


def _post(content: bytes, head: str = "") -> Fault:
    def data(m: Mischief) -> bytes:
        lines = ("POST /v1/completions HTTP/1.1", f"Host: {m.host}", head or "Content-Type: application/json")
        return "\r\n".join((*lines, f"Content-Length: {len(content)}", "", "")).encode() + content

    return _raw(data)


def _fields(**fields: object) -> Fault:
    """A request with one thing wrong."""
    return _post(json.dumps({"prompt": "def main():", **fields}).encode())


async def slow_head(m: Mischief) -> str:
    """A byte now and then, for as long as the server lets that go on."""
    async with connected(m.address) as wire:
        return await _trickle(wire, b"GET /health HTTP/1.1\r\nX-Padding: " + b"a" * 600)


async def slow_body(m: Mischief) -> str:
    """Send the body a few bytes at a time."""
    async with connected(m.address) as wire:
        request = m.request(padding="a" * 600)
        await wire.send(request[:-600])
        return await _trickle(wire, request[-600:-1])


async def aborted_upload(m: Mischief) -> str:
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


def _oversize(m: Mischief) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {m.host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {_LARGE}\r\n\r\n".encode()


BESIDE: Mapping[str, Fault] = {
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
