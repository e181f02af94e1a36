"""The events of the live page: one sampler reads the engine, and every listener gets what its view shows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from specmamba.cache.prefix.inspection import WHOLE, Outline, View
from specmamba.errors import EngineStoppedError
from specmamba.server.api.service import Service
from specmamba.server.http.error_answers import ApiError
from specmamba.server.page.samples import (
    MAX_TREE_NODES,
    as_json,
    draft_event,
    drafts_of,
    stats_event,
    tenant_stats_event,
    tree_event,
)

if TYPE_CHECKING:
    from specmamba.engine.base_engine import BaseEngine
    from specmamba.engine.engine_sample import EngineSample

logger = logging.getLogger("specmamba")

MAX_LISTENERS = 16
MAX_LISTENERS_OF_TENANT = 4  # so that no tenant keeps the others out,
MAX_LISTENERS_OF_TENANTS = 12  # and all together not the operator
INTERVAL_S = 0.4
TREE_INTERVAL_S = 1.5
BUSY_AFTER_S = 2.0  # a "busy" event is sent for a step that takes longer, and again after each further interval


class Listener:
    """The events for one client. Of those that it has not received yet, only the newest of each kind is kept."""

    def __init__(self, events: dict[str, str], view: View = WHOLE) -> None:
        self.view = view
        self._pending = dict(events)
        self._is_open = True
        self._arrived = asyncio.Event()
        self._arrived.set()

    def put(self, name: str, data: str) -> None:
        if not self._is_open:
            return
        self._pending.pop(name, None)  # so that the order is that of the newest events
        self._pending[name] = data
        self._arrived.set()

    def close(self) -> None:
        """Accept no more events. Pending events are still delivered."""
        self._is_open = False
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[tuple[str, str]]:
        """Names and data of events, until the listener is closed."""
        while self._is_open or self._pending:
            await self._arrived.wait()
            self._arrived.clear()
            pending, self._pending = self._pending, {}
            for event in pending.items():
                yield event


class Feed:
    """Samples the engine while there are listeners, once for all of them. Used on one event loop.

    The engine records drafts in that time only. It is asked between two steps and never twice at a time, so a long
    step delays the next sample and nothing else.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine
        self._listeners: set[Listener] = set()
        self._latest: dict[View, dict[str, str]] = {}  # newest event of each kind, for new listeners
        self._sampler: asyncio.Task[None] | None = None

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def join(self, view: View = WHOLE) -> Listener:
        """Add a listener with a view; the first one starts the sampler.

        Raises:
            ApiError: 429; there are ``MAX_LISTENERS`` already, ``MAX_LISTENERS_OF_TENANT`` of the tenant, or
                ``MAX_LISTENERS_OF_TENANTS`` of all tenants.
        """
        if self._is_full_for(view):
            message = "too many clients listen to events already: close one of their pages, or try again later"
            raise ApiError(
                429, message, kind="rate_limit_error", code="too_many_listeners", headers={"Retry-After": "5"}
            )
        if self._sampler is None or self._sampler.done():
            self._latest = {}
            self._sampler = asyncio.create_task(self._run())
        if view not in self._latest:
            self._latest[view] = {"hello": as_json(self._hello())}
            self._watch()
        latest = self._latest[view]
        listener = Listener(latest, view)
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        """Remove a listener; the last one stops the sampler."""
        self._listeners.discard(listener)
        if all(listener.view != other.view for other in self._listeners):
            self._latest.pop(listener.view, None)
            self._watch()
        if not self._listeners and self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None

    def _is_full_for(self, view: View) -> bool:
        of_tenants = [other for other in self._listeners if not other.view.is_whole]
        same = sum(other.view == view for other in of_tenants)
        is_full = same >= MAX_LISTENERS_OF_TENANT or len(of_tenants) >= MAX_LISTENERS_OF_TENANTS
        return self.num_listeners >= MAX_LISTENERS or (not view.is_whole and is_full)

    def _watch(self) -> None:
        """Let the engine record drafts for the views that have listeners."""
        views = tuple(self._latest)
        self._command(lambda engine: engine.watch_drafts(views))

    def _hello(self) -> dict[str, Any]:
        described = self._engine.constants.description
        return {
            "model": self._service.model_names[0],
            "context_length": self._service.context_length,
            "engine": {name: described.get(name) for name in ("dtype", "device", "speculative_algorithm")},
            "interval": INTERVAL_S,
        }

    def _command(self, function: Callable[[BaseEngine], None]) -> None:
        """Call a function with the engine. Calls are executed in order, whichever task makes them."""
        with suppress(EngineStoppedError):  # the sampler publishes "end"
            self._engine.call(function)

    async def _run(self) -> None:
        try:
            await self._sample_until_stopped()
        except EngineStoppedError:
            self._publish_to_all("end", {"reason": "failed" if self._engine.failed is not None else "stopped"})
        except Exception as error:
            logger.error("the live page gets no more figures", exc_info=error)
            self._publish_to_all("end", {"reason": "failed"})
        for listener in self._listeners:
            listener.close()

    async def _sample_until_stopped(self) -> None:
        outlines: dict[View, Outline] = {}
        looked_at = float("-inf")
        while True:
            started = time.monotonic()
            with_outlines = started - looked_at >= TREE_INTERVAL_S
            looked_at = started if with_outlines else looked_at
            sample = await self._sample(with_outlines)
            for view in list(self._latest):
                self._publish_sample(view, sample)
            for view, outline in sample.outlines.items():
                if outline != outlines.get(view):
                    self._publish(view, "tree", tree_event(outline, self._service.tokenizer))
            outlines |= sample.outlines
            await asyncio.sleep(INTERVAL_S)

    def _publish_sample(self, view: View, sample: EngineSample) -> None:
        if view.is_whole:
            self._publish(view, "stats", stats_event(sample, self._service.metrics, time.time()))
        elif view in sample.tenants:
            self._publish(view, "stats", tenant_stats_event(sample.tenants[view], time.time()))
        if drafts := drafts_of(sample, view):
            self._publish(view, "draft", draft_event(drafts, self._service.tokenizer))

    async def _sample(self, with_outlines: bool) -> EngineSample:
        views = tuple(self._latest)
        max_nodes = MAX_TREE_NODES if with_outlines else 0

        def take(engine: BaseEngine) -> EngineSample:
            return engine.sample(views, max_nodes)

        future = asyncio.wrap_future(self._engine.call(take))
        waited = 0.0
        try:
            while not (await asyncio.wait({future}, timeout=BUSY_AFTER_S))[0]:
                waited += BUSY_AFTER_S
                self._publish_to_all("busy", {"seconds": waited})
            return future.result()
        finally:
            future.cancel()

    def _publish_to_all(self, name: str, event: dict[str, Any]) -> None:
        for view in list(self._latest):
            self._publish(view, name, event)

    def _publish(self, view: View, name: str, event: dict[str, Any]) -> None:
        if view not in self._latest:  # its last listener has left
            return
        data = self._latest[view][name] = as_json(event)
        for listener in self._listeners:
            if listener.view == view:
                listener.put(name, data)
