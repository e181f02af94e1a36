"""The events of the live page: one sampler reads the engine, and every listener gets what it finds.

No event shows a prompt.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from specmamba.cache.prefix.inspection import Outline
from specmamba.core import DraftView, SpecStats
from specmamba.errors import EngineStoppedError
from specmamba.server.api.service import Service
from specmamba.server.api.tokenization import token_string
from specmamba.server.http.error_answers import ApiError
from specmamba.server.observe.metrics import Histogram, ServerMetrics, accepted_per_position
from specmamba.verify.record_buffers import RecordBuffers

if TYPE_CHECKING:
    from specmamba.engine.engine import Engine
    from specmamba.engine.scheduler import EngineStats
    from specmamba.models.tokenizer import Tokenizer

logger = logging.getLogger("specmamba")

MAX_DRAFTS, MAX_TREE_NODES = 8, 160
MAX_LISTENERS = 16
INTERVAL_S = 0.4
TREE_INTERVAL_S = 1.5
BUSY_AFTER_S = 2.0  # a "busy" event is sent for a step that takes longer, and again after each further interval


@dataclass(frozen=True, slots=True)
class Sample:
    """What the sampler reads of the engine between two steps."""

    stats: EngineStats
    drafts: tuple[DraftView, ...]  # since the previous sample, the newest last
    num_pending: int  # records in the speculation buffers
    num_records: int  # capacity of the speculation buffers; 0 without records
    outline: Outline | None  # None: not requested


def take_sample(engine: Engine, with_outline: bool) -> Sample:
    """Read the engine, on its thread. Cheap: a few sums, and at most ``MAX_TREE_NODES`` nodes of the prefix cache."""
    records = engine.pools.state_buffers
    num_pending, num_records = 0, 0
    if isinstance(records, RecordBuffers):
        num_pending, num_records = records.num_pending, records.num_records
    return Sample(
        engine.stats(),
        tuple(view for view in engine.last_drafts() if len(view.tokens) > 1)[-MAX_DRAFTS:],
        num_pending,
        num_records,
        engine.cache_manager.cache.outline(MAX_TREE_NODES) if with_outline else None,
    )


def as_json(value: Mapping[str, Any]) -> str:
    """JSON on one line, in ASCII: the data of an event must not contain line breaks."""
    return json.dumps(value, separators=(",", ":"))


def stats_event(sample: Sample, metrics: ServerMetrics, now: float) -> dict[str, Any]:
    """Queues, pools, and all counters since the start; ``now`` in seconds since 1970."""
    stats = sample.stats
    return {
        "time": now,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "preemptions": stats.num_preemptions,
        "pools": {
            "kv": _pool(stats.kv_used_tokens, stats.kv_cached_tokens, stats.kv_total_tokens),
            "states": _pool(stats.state_used_slots, stats.state_cached_slots, stats.state_total_slots),
            "records": _pool(sample.num_pending, 0, sample.num_records),
        },
        "spec": _spec(stats.spec),
        "cache": asdict(stats.prefix_cache),
        "latency": {
            "first_token": _histogram(metrics.time_to_first_token),
            "inter_token": _histogram(metrics.inter_token_latency),
        },
    }


def draft_event(sample: Sample, tokenizer: Tokenizer) -> dict[str, Any]:
    """The drafts of a sample, the newest last."""
    return {"drafts": [_draft(view, tokenizer) for view in sample.drafts]}


def tree_event(outline: Outline) -> dict[str, Any]:
    """The tree of the prefix cache: the fields of ``Outline``."""
    return asdict(outline)


def _pool(used: int, cached: int, total: int) -> dict[str, int]:
    return {"used": used, "cached": cached, "total": total}


def _spec(spec: SpecStats) -> dict[str, Any]:
    return {
        "steps": spec.num_verify_steps,
        "tokens": spec.num_verify_steps + spec.num_accepted_tokens,
        "drafts": spec.num_drafts,
        "drafted": spec.num_draft_tokens,
        "accepted": spec.num_accepted_tokens,
        "histogram": spec.accepted_histogram,
        "per_position": accepted_per_position(spec),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """The sum in seconds, and the counts at or below each bound; the last bound, infinity, is null."""
    (metric,) = histogram.collect()
    buckets, total = [], 0.0
    for sample in metric.samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            buckets.append([None if bound == float("inf") else bound, sample.value])
        elif sample.name.endswith("_sum"):
            total = sample.value
    return {"sum": total, "buckets": buckets}


def _draft(view: DraftView, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "request": view.request_id,
        "nodes": [_token(token, tokenizer) for token in view.tokens],
        "parents": view.parents,
        "path": view.path,
        "bonus": _token(view.bonus, tokenizer),
    }


def _token(token_id: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"id": token_id, "text": token_string(tokenizer, token_id)}


class Listener:
    """The events for one client. Of those that it has not received yet, only the newest of each kind is kept."""

    def __init__(self, events: dict[str, str]) -> None:
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
        self._latest: dict[str, str] = {}  # newest event of each kind, for new listeners
        self._sampler: asyncio.Task[None] | None = None

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def join(self) -> Listener:
        """Add a listener; the first one starts the sampler.

        Raises:
            ApiError: 429; there are ``MAX_LISTENERS`` already.
        """
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
        """Remove a listener; the last one stops the sampler."""
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
        """Call a function with the engine. Calls are executed in order, whichever task makes them."""
        with suppress(EngineStoppedError):  # the sampler publishes "end"
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
