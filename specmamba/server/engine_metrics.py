"""Figures that the engine keeps itself, as metrics: they are read when somebody asks, and cost a request nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specmamba.core import SpecStats

if TYPE_CHECKING:
    from specmamba.cache.prefix.inspection import CacheStats
    from specmamba.engine.engine import EngineStats


class EngineCollector(Collector):
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
        yield from spec_counters(stats.spec)
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


def spec_counters(spec: SpecStats) -> Iterator[Metric]:
    """Prometheus counters of drafts and acceptance."""
    counters = {
        "num_drafts": ("Verify steps that had a draft", spec.num_drafts),
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
