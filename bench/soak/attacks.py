"""Attacks on a server by clients with a valid key or none: each is one coroutine, repeated by several attackers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from specmamba.bench.soak.clients import Address, Wire, connected

GOOD_KEY, BAD_KEY, OPERATOR_KEY = "good", "bad", "operator"
_HOLD_S = 3.0  # idle connections are kept open
_PACE_S = 0.01  # between cheap requests: attackers share the processor with the server here
_SHORT_CHUNKS = ("--chunked-prefill-size", "128")  # they bound how long a prompt of another client delays a stream
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
# Masks of this rule take long, and a walk that begins with a usual letter never comes to it.
_BOMB = 'root ::= [^q]* | "q" bomb\nbomb ::= ("{salt}" | [^"] part part part part part)\npart ::= [^"] part part | ""'
_NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attacker connects, and random numbers of its own."""

    address: Address
    random: random.Random

    def post(self, path: str, body: Mapping[str, object], *headers: str) -> bytes:
        """A request of the attacker's key."""
        return post(self.address, path, json.dumps(body).encode(), BAD_KEY, *headers)


@dataclass(frozen=True, slots=True)
class Attack:
    """What attackers do, and the flags of the server that they find."""

    act: Callable[[Place], Awaitable[None]]
    num_attackers: int
    flags: tuple[str, ...] = ()
    template: str | None = None  # the chat template of the served checkpoint
    stalls_log: bool = False  # the server's log is a full pipe


def post(address: Address, path: str, data: bytes, key: str, *headers: str) -> bytes:
    """The bytes of a POST request with a JSON body."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {address[0]}:{address[1]}",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


async def _to_the_end(wire: Wire, request: bytes) -> None:
    """Send a request that asks to close the connection, and read until it is closed."""
    await wire.send(request)
    while await wire.reader.read(1 << 16):
        pass


async def grammar_bombs(place: Place) -> None:
    """A grammar that is compiled quickly, whose masks take long in a branch that its check does not enter."""
    grammar = _BOMB.replace("{salt}", f"salt{place.random.randrange(1 << 40)}")
    body = {"prompt": "x", "ebnf": grammar, "max_tokens": 64, "logit_bias": {"113": 100}, "temperature": 0.8}
    async with connected(place.address) as wire:
        await _to_the_end(wire, place.post(_COMPLETIONS, body, "Connection: close"))


async def floods(place: Place) -> None:
    """As many choices as a call may have."""
    body = {"prompt": "x", "n": 16, "max_tokens": 400, "temperature": 0.8, "ignore_eos": True, "stream": True}
    async with connected(place.address) as wire:
        await _to_the_end(wire, place.post(_COMPLETIONS, body, "Connection: close"))


async def long_prompts(place: Place) -> None:
    """Prompts that fill the context, each another one."""
    prompt = [place.random.randrange(1, 250) for _ in range(1900)]
    async with connected(place.address) as wire:
        body = {"prompt": prompt, "max_tokens": 4, "n": 4}
        await _to_the_end(wire, place.post(_COMPLETIONS, body, "Connection: close"))


async def listed_logprobs(place: Place) -> None:
    """A scored prompt for each of many choices."""
    prompt = [place.random.randrange(1, 250) for _ in range(1900)]
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 20, "n": place.random.choice((4, 16))}
    async with connected(place.address) as wire:
        await _to_the_end(wire, place.post(_COMPLETIONS, body, "Connection: close"))


async def idle_connections(place: Place) -> None:
    """Connections that send nothing, or a part of a request."""
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connected(place.address)) for _ in range(16)]
        for wire in wires[::2]:
            await wire.send(b"POST /v1/compl")
        await asyncio.sleep(_HOLD_S)


async def blank_lines(place: Place) -> None:
    """Blank lines in place of a request."""
    async with connected(place.address) as wire:
        for _ in range(200):
            await wire.send(b"\r\n" * 8192)


async def connect_and_close(place: Place) -> None:
    """Connections that are reset as soon as they are open, or in the middle of a wrong request."""
    for _ in range(16):
        async with connected(place.address) as wire:
            if place.random.random() < 0.7:
                await wire.send(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            wire.reset()
        await asyncio.sleep(_PACE_S)


async def half_closed(place: Place) -> None:
    """Requests whose sender closes its side, and leaves before the answer."""
    async with connected(place.address) as wire:
        await wire.send(place.post(_COMPLETIONS, {"prompt": "x", "max_tokens": 200, "ignore_eos": True}))
        wire.writer.write_eof()
        await asyncio.sleep(place.random.uniform(0, 0.3))


async def template_bombs(place: Place) -> None:
    """Conversations for a chat template that does not come to an end."""
    async with connected(place.address) as wire:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        await _to_the_end(wire, place.post(_CHAT, body, "Connection: close"))


async def wrong_keys(place: Place) -> None:
    """Requests with keys that the server does not know, and to addresses of the operator."""
    async with connected(place.address) as wire:
        for _ in range(50):
            key = str(place.random.random())
            await wire.send(post(place.address, place.random.choice((_COMPLETIONS, "/flush_cache")), b"{}", key))
            await wire.status()
            await wire.reader.readuntil(b"}}")
            await asyncio.sleep(_PACE_S)


async def listeners(place: Place) -> None:
    """Live pages that stay open, and questions about the cache."""
    host = f"Host: {place.address[0]}\r\nAuthorization: Bearer {BAD_KEY}\r\n\r\n"
    async with connected(place.address) as page, connected(place.address) as reports:
        await page.send(f"GET /events HTTP/1.1\r\n{host}".encode())
        for _ in range(20):
            await reports.send(f"GET /cache?format=text HTTP/1.1\r\n{host}".encode())
            await reports.reader.read(1 << 16)
            await asyncio.sleep(0.05)


async def logged_requests(place: Place) -> None:
    """Requests that are logged."""
    async with connected(place.address) as wire:
        for _ in range(20):
            await wire.send(place.post("/tokenize", {"prompt": "x" * 50}, f"X-Request-Id: {'x' * 100}"))
            await wire.status()
            await wire.reader.readuntil(b"}")
            await asyncio.sleep(_PACE_S)


ATTACKS: Mapping[str, Attack] = {
    "grammar bombs": Attack(grammar_bombs, 16),
    "floods of choices": Attack(floods, 17),
    "long prompts": Attack(long_prompts, 8, _SHORT_CHUNKS),
    "listed logprobs": Attack(listed_logprobs, 8, _SHORT_CHUNKS),
    "idle connections": Attack(idle_connections, 8, ("--max-connections", "64")),
    "blank lines": Attack(blank_lines, 8),
    "connect and close": Attack(connect_and_close, 8),
    "half-closed": Attack(half_closed, 16),
    "template bombs": Attack(template_bombs, 8, template=_NESTED),
    "wrong keys": Attack(wrong_keys, 8),
    "listeners": Attack(listeners, 16),
    "stalled log": Attack(logged_requests, 8, stalls_log=True),
}
