"""Who looks at the live page, and the one sampler that looks at the engine for all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from specmamba.cache.prefix.inspection import Outline
from specmamba.errors import EngineStoppedError
from specmamba.server.errors import ApiError
from specmamba.server.live_sample import Sample, as_json, draft_event, stats_event, take_sample, tree_event
from specmamba.server.service import Service

if TYPE_CHECKING:
    from specmamba.engine.engine import Engine

logger = logging.getLogger("specmamba")

MAX_LISTENERS = 16
INTERVAL_S = 0.4
TREE_INTERVAL_S = 1.5
BUSY_AFTER_S = 2.0  # so long a step is told of, again and again


class Listener:
    """Events for one client. Of those that it has not taken yet only the newest of each kind is kept."""

    def __init__(self, events: dict[str, str]) -> None:
        self._pending = dict(events)
        self._is_open = True
        self._arrived = asyncio.Event()
        self._arrived.set()

    def put(self, name: str, data: str) -> None:
        if not self._is_open:
            return
        self._pending.pop(name, None)  # what comes later is taken later
        self._pending[name] = data
        self._arrived.set()

    def close(self) -> None:
        """What is pending can still be taken."""
        self._is_open = False
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[tuple[str, str]]:
        """Names and data, until it is closed."""
        while self._is_open or self._pending:
            await self._arrived.wait()
            self._arrived.clear()
            pending, self._pending = self._pending, {}
            for event in pending.items():
                yield event


class Feed:
    """Samples the engine while anybody listens, once for all; belongs to one event loop.

    The engine records drafts in that time only. It is asked between two steps and never twice at a time, so a long
    step delays the next sample and nothing else.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine
        self._listeners: set[Listener] = set()
        self._latest: dict[str, str] = {}  # newest event of each kind, for who comes next
        self._sampler: asyncio.Task[None] | None = None

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def join(self) -> Listener:
        """Raises ApiError 429: too many listen already."""
        if len(self._listeners) >= MAX_LISTENERS:
            message = f"{MAX_LISTENERS} clients listen to events already: close one of their pages, or try again later"
            raise ApiError(
                429, message, kind="rate_limit_error", code="too_many_listeners", headers={"Retry-After": "5"}
            )
        if self._sampler is None or self._sampler.done():
            self._latest = {"hello": as_json(self._hello())}
            self._command(lambda engine: engine.watch_drafts(True))
            self._sampler = asyncio.create_task(self._run())
        listener = Listener(self._latest)
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        """The last one to leave stops the sampler."""
        self._listeners.discard(listener)
        if not self._listeners and self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None
            self._command(lambda engine: engine.watch_drafts(False))

    def _hello(self) -> dict[str, Any]:
        return {
            "model": self._service.model_names[0],
            "context_length": self._service.context_length,
            "engine": self._engine.constants.description,
            "interval": INTERVAL_S,
        }

    def _command(self, function: Callable[[Engine], None]) -> None:
        """In the order of these calls, however tasks come and go."""
        with suppress(EngineStoppedError):  # the sampler will notice
            self._engine.call(function)

    async def _run(self) -> None:
        try:
            await self._sample_until_stopped()
        except EngineStoppedError:
            self._publish("end", {"reason": "failed" if self._engine.failed is not None else "stopped"})
        except Exception as error:
            logger.error("the live page gets no more figures", exc_info=error)
            self._publish("end", {"reason": "failed"})
        for listener in self._listeners:
            listener.close()

    async def _sample_until_stopped(self) -> None:
        outline: Outline | None = None
        looked_at = float("-inf")
        while True:
            started = time.monotonic()
            with_outline = started - looked_at >= TREE_INTERVAL_S
            looked_at = started if with_outline else looked_at
            sample = await self._sample(with_outline)
            self._publish("stats", stats_event(sample, self._service.metrics, time.time()))
            if sample.drafts:
                self._publish("draft", draft_event(sample, self._service.tokenizer))
            if sample.outline is not None and sample.outline != outline:
                outline = sample.outline
                self._publish("tree", tree_event(outline))
            await asyncio.sleep(INTERVAL_S)

    async def _sample(self, with_outline: bool) -> Sample:
        future = asyncio.wrap_future(self._engine.call(lambda engine: take_sample(engine, with_outline)))
        waited = 0.0
        try:
            while not (await asyncio.wait({future}, timeout=BUSY_AFTER_S))[0]:
                waited += BUSY_AFTER_S
                self._publish("busy", {"seconds": waited})
            return future.result()
        finally:
            future.cancel()

    def _publish(self, name: str, event: dict[str, Any]) -> None:
        data = as_json(event)
        self._latest[name] = data
        for listener in self._listeners:
            listener.put(name, data)
