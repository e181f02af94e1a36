"""What the server measures, for Prometheus.

Latencies and token counts are recorded as deltas come from the engine. Figures that the engine keeps itself are read
from its statistics when somebody asks, so that they cost a running request nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specmamba.core import FinishReason, OutputDelta, SpecStats
from specmamba.server.observers import CallContext

if TYPE_CHECKING:
    from specmamba.cache.radix_stats import CacheStats
    from specmamba.engine.engine import EngineStats

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 1.0, 2.5)


class ServerMetrics:
    """The metrics of one application, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = Histogram(
            "specmamba_time_to_first_token_seconds",
            "From the arrival of a request to its first token",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_latency = Histogram(
            "specmamba_inter_token_latency_seconds",
            "Time per token after the first; the tokens of one step share its time",
            buckets=_INTER_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "specmamba_prompt_tokens", "Prompt tokens of requests that gave a token", registry=self.registry
        )
        self.generation_tokens = Counter(
            "specmamba_generation_tokens", "Tokens generated for requests", registry=self.registry
        )
        self.requests = Counter(
            "specmamba_requests", "Requests that ended, by reason", ["finish_reason"], registry=self.registry
        )
        self._engine = _EngineCollector()
        self.registry.register(self._engine)

    def observe(self, context: CallContext, index: int) -> RequestTimer:
        """The observer of a request."""
        return RequestTimer(self, context.arrived_at)

    def render(self, stats: EngineStats | None) -> bytes:
        """The text that Prometheus reads; without statistics the last ones known are given."""
        if stats is not None:
            self._engine.stats = stats
        return generate_latest(self.registry)


class RequestTimer:
    """Records one request into the metrics. Its deltas come in order from one thread, an abort from any."""

    def __init__(self, metrics: ServerMetrics, arrived_at: float) -> None:
        self._metrics = metrics
        self._latest_at = arrived_at
        self._has_token = False
        self._has_ended = False
        self._lock = threading.Lock()  # the engine ends a request while its client leaves

    def record(self, delta: OutputDelta) -> None:
        num_tokens = len(delta.token_ids)
        if num_tokens:
            self._record_tokens(delta, num_tokens)
        if delta.finish_reason is not None:
            self._record_end(delta.finish_reason)

    def record_abort(self) -> None:
        """The client left. Counts once, and not at all when the request had ended already."""
        self._record_end("abort")

    def _record_end(self, reason: FinishReason) -> None:
        with self._lock:
            had_ended, self._has_ended = self._has_ended, True
        if not had_ended:
            self._metrics.requests.labels(reason).inc()

    def _record_tokens(self, delta: OutputDelta, num_tokens: int) -> None:
        now = time.perf_counter()
        elapsed, self._latest_at = now - self._latest_at, now
        self._metrics.generation_tokens.inc(num_tokens)
        if not self._has_token:
            self._has_token = True
            self._metrics.time_to_first_token.observe(elapsed)
            self._metrics.prompt_tokens.inc(delta.num_prompt_tokens)
            return
        for _ in range(num_tokens):
            self._metrics.inter_token_latency.observe(elapsed / num_tokens)


class _EngineCollector(Collector):
    """The engine's own statistics as metrics."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def describe(self) -> list[Metric]:
        return []  # so that registering does not collect

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        stats = self.stats
        gauges = {
            "running_requests": ("Requests in the batch", stats.num_running),
            "waiting_requests": ("Requests in the queue", stats.num_waiting),
            "kv_used_tokens": ("Places in the KV pool that requests need", stats.kv_used_tokens),
            "kv_cached_tokens": ("Places in the KV pool that only the prefix cache holds", stats.kv_cached_tokens),
            "kv_total_tokens": ("Places in the KV pool", stats.kv_total_tokens),
            "state_used_slots": ("Recurrent states that requests need", stats.state_used_slots),
            "state_cached_slots": ("Recurrent states that only the prefix cache holds", stats.state_cached_slots),
            "state_total_slots": ("Recurrent states that the pool has room for", stats.state_total_slots),
            "spec_accept_length": (
                "Tokens gained per verify since the start, the bonus token included; 1 without drafts",
                stats.spec.accept_length,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"specmamba_{name}", text, value=value)
        yield CounterMetricFamily(
            "specmamba_preemptions", "Requests that gave up their memory to older ones", value=stats.num_preemptions
        )
        yield from _spec_counters(stats.spec)
        yield from _cache_counters(stats.prefix_cache)


def _cache_counters(cache: CacheStats) -> Iterator[Metric]:
    counters = {
        "query_tokens": ("Tokens of admitted requests that a cached prefix could have spared", cache.query_tokens),
        "hit_tokens": ("Tokens that a cached prefix did spare", cache.hit_tokens),
        "evicted_tokens": ("Tokens that left the prefix cache for want of room", cache.evicted_tokens),
        "evicted_states": ("Recurrent states that left the prefix cache for want of room", cache.evicted_states),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"specmamba_prefix_cache_{name}", text, value=value)
    by_reason = CounterMetricFamily(
        "specmamba_prefix_cache_miss", "Requests by why their cached prefix was not longer", labels=["reason"]
    )
    for reason, count in cache.misses.items():
        by_reason.add_metric([reason], count)
    yield by_reason


def _spec_counters(spec: SpecStats) -> Iterator[Metric]:
    counters = {
        "num_drafts": ("Verify steps of drafts", spec.num_verify_steps if spec.num_draft_tokens else 0),
        "num_draft_tokens": ("Tokens drafted, roots not counted", spec.num_draft_tokens),
        "num_accepted_tokens": ("Drafted tokens that the model agreed with", spec.num_accepted_tokens),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"specmamba_spec_decode_{name}", text, value=value)
    by_position = CounterMetricFamily(
        "specmamba_spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafts by their depth below the root; position 0 is the first drafted token",
        labels=["position"],
    )
    for position, count in enumerate(accepted_per_position(spec)):
        by_position.add_metric([str(position)], count)
    yield by_position


def accepted_per_position(spec: SpecStats) -> list[int]:
    """How often the draft at each depth was accepted: a step that accepted d drafts accepted positions 0 to d - 1."""
    at_least = list(accumulate(reversed(spec.accepted_histogram)))[::-1]
    return at_least[1:]
