"""Requests to one server, or to a prefill and a decode server without a router: the same body to both, with a room."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx

from specmamba.bench.handoffs.servers import Way
from specmamba.bench.serving.events import events_of
from specmamba.errors import SpecmambaError

PATH = "/v1/completions"
LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 600.0
_rooms = itertools.count(1)  # each is used once


@dataclass(frozen=True, slots=True)
class Event:
    """A part of a stream that brought tokens; a step's tokens come together."""

    time: float  # of time.perf_counter()
    tokens: int


@dataclass(frozen=True, slots=True)
class Stream:
    """A streamed answer."""

    began: float  # when it was sent
    events: tuple[Event, ...]

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.events[0].time - self.began


@dataclass(frozen=True, slots=True)
class Traffic:
    """Streams, and the long prompts that arrived meanwhile."""

    streams: tuple[Stream, ...]
    arrivals: tuple[Stream, ...]


class Clients:
    """Connections with the servers of one way. Use it as an asynchronous context manager."""

    def __init__(self, way: Way) -> None:
        self._way, self._stack = way, AsyncExitStack()

    async def __aenter__(self) -> Clients:
        clients = [httpx.AsyncClient(base_url=each.url, timeout=_TIMEOUT_S) for each in self._way.servers]
        self._opened = [await self._stack.enter_async_context(client) for client in clients]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        on_first: Callable[[], None] | None = None,
        *,
        is_held: bool = False,
    ) -> Stream:
        """Continue a prompt greedily, however it might end.

        Args:
            prompt: token ids.
            max_tokens: new tokens.
            on_first: called with the first token.
            is_held: with two servers, ask the second one when the first one has run the prompt, and count from then.

        Raises:
            SpecmambaError: a server has ended, or refuses the request.
        """
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        try:
            if self._way.prefill is None:
                return await self._stream(body, on_first)
            prefill, room = self._opened[0], next(_rooms)
            body |= {"bootstrap_host": LOOPBACK, "bootstrap_port": self._way.port, "bootstrap_room": room}
            if is_held:
                await _post(prefill, body)
                return await self._stream(body, on_first)
            stream, _ = await asyncio.gather(self._stream(body, on_first), _post(prefill, body))
            return stream
        except httpx.HTTPError as error:
            for server in self._way.servers:
                server.check(1.0)
            raise SpecmambaError(f"a request has failed: {type(error).__name__}: {error}") from error

    async def _stream(self, body: dict[str, Any], on_first: Callable[[], None] | None) -> Stream:
        usage = {"include_usage": True, "continuous_usage_stats": True}
        began, events, total = time.perf_counter(), list[Event](), 0
        async with self._opened[-1].stream("POST", PATH, json=body | {"stream": True, "stream_options": usage}) as got:
            await _check(got)
            async for event in events_of(got):
                if "error" in event:
                    raise SpecmambaError(f"a stream has failed: {event['error']}")
                if not event["choices"] or (tokens := event["usage"]["completion_tokens"]) == total:
                    continue
                events.append(Event(time.perf_counter(), tokens - total))
                total = tokens
                if on_first is not None and len(events) == 1:
                    on_first()
        if total != body["max_tokens"]:
            raise SpecmambaError(f"a stream has ended with {total} of {body['max_tokens']} tokens")
        return Stream(began, tuple(events))


async def send_traffic(
    clients: Clients,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    arrival: Callable[[int], Awaitable[Stream]] | None,
    interval_s: float,
) -> Traffic:
    """Run one stream for each prompt; while all of them run, long prompts arrive.

    Args:
        clients: send the streams.
        prompts: of the streams.
        max_tokens: of each stream.
        arrival: sends long prompt number i; None: none arrive.
        interval_s: from one arrival to the next; the first comes with the last stream's first token.

    Raises:
        SpecmambaError: as ``Clients.ask``.
    """
    begun = [asyncio.Event() for _ in prompts]
    running = [
        asyncio.ensure_future(clients.ask(prompt, max_tokens, event.set))
        for prompt, event in zip(prompts, begun, strict=True)
    ]
    arrived: list[asyncio.Future[Stream]] = []

    async def arrive() -> None:
        assert arrival is not None
        for event in begun:
            await event.wait()
        for number in itertools.count():
            arrived.append(asyncio.ensure_future(arrival(number)))
            await asyncio.sleep(interval_s)

    arriving = None if arrival is None else asyncio.ensure_future(arrive())
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if arriving is not None:
            arriving.cancel()
    streams = await asyncio.gather(*running)
    return Traffic(tuple(streams), tuple(await asyncio.gather(*arrived)))


async def _post(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    await _check(await client.post(PATH, json=body))


async def _check(answer: httpx.Response) -> None:
    if answer.status_code != httpx.codes.OK:
        await answer.aread()
        raise SpecmambaError(f"a server answered {answer.status_code}: {answer.text[:300]}")
