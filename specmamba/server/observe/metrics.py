"""The metrics of a server, in Prometheus' format.

Latencies and token counts are recorded as deltas come from the engine, calls when they end; the engine's own figures
are read when ``/metrics`` is requested. Each figure is written by one thread only, so that none needs a lock.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specmamba.cache.prefix.inspection import without_salts
from specmamba.core import ChainStats, FinishReason, OutputDelta, SizingStats, SpecStats
from specmamba.server.observe.call_record import AbortReason, CallRecord
from specmamba.server.observe.logs import num_dropped_lines
from specmamba.server_config import ServerConfig

if TYPE_CHECKING:
    from specmamba.cache.prefix.inspection import CacheStats
    from specmamba.cache.split import SplitStats
    from specmamba.cache.tiers.tier_stats import TierStats
    from specmamba.engine.replica_control import ReplicaStats
    from specmamba.engine.scheduler import EngineStats
    from specmamba.transfer.handoff_stats import HandoffStats

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 1.0, 2.5)
_WHOLE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_OUR_PREFIX, _VLLM_PREFIX = "specmamba_spec_decode", "vllm:spec_decode"


class Histogram:
    """A histogram that one thread writes and any thread reads, without a lock.

    A step gives a request several tokens, which are observations of one value: ``observe`` counts them at once.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """``bounds``: ascending upper bounds; a value is counted at the first bound that is not below it."""
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> list[Metric]:
        counts = list(accumulate(self._counts))
        bounds = [*(str(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(bounds, counts, strict=True))
        return [HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)]


def engine_metrics(stats: EngineStats, with_salts: bool) -> Iterator[Metric]:
    """The engine's statistics; ``with_salts`` as of ``ServerMetrics.render``."""
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
    preempted = "Requests that gave up their memory to older ones"
    yield CounterMetricFamily("specmamba_preemptions", preempted, value=stats.num_preemptions)
    if stats.split is not None:
        yield from _split_counters(stats.split)
    yield from spec_counters(stats.spec)
    if stats.sizing is not None:
        yield from _sizing_metrics(stats.sizing)
    if stats.chain is not None:
        yield from _chain_counters(stats.chain)
    yield from _cache_counters(stats.prefix_cache, with_salts)
    if stats.host is not None:
        yield from _tier_metrics("prefix_host", "host memory", stats.host)
    if stats.disk is not None:
        yield from _tier_metrics("prefix_disk", "disk", stats.disk)
    if stats.store is not None:
        yield from _tier_metrics("prefix_store", "the store", stats.store)
    if stats.handoffs is not None:
        yield from _handoff_metrics(stats.handoffs)
    if stats.replicas is not None:
        yield from _replica_metrics(stats.replicas)


def _split_counters(split: SplitStats) -> Iterator[Metric]:
    """What has moved between elastic pools; their sizes now are the gauges of all engines."""
    counters = {
        "pool_moves": ("Times that KV pool or state pool gave memory to the other", split.num_moves),
        "pool_moved_tokens": ("Places of KV that were copied for it", split.moved_tokens),
        "pool_moved_states": ("Recurrent states that were copied for it", split.moved_states),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"specmamba_{name}", text, value=value)


def _replica_metrics(replicas: ReplicaStats) -> Iterator[Metric]:
    """How many replicas are in each state, what they have to do, and how often their number has followed that."""
    family = GaugeMetricFamily("specmamba_replicas", "Replicas by their state", labels=["state"])
    for state, count in replicas.states.items():
        family.add_metric([state], count)
    yield family
    queued = "Tokens that replicas have yet to compute, running requests counted as some"
    yield GaugeMetricFamily("specmamba_replica_queued_tokens", queued, value=replicas.queued_tokens)
    started = "Processes that were started for each replica: more than one where it was started again"
    yield _labelled("replica_starts", started, "replica", replicas.num_started.items())
    counts = (("up", replicas.num_grown), ("down", replicas.num_shrunk))
    yield _labelled("replica_scalings", "Replicas that were started or ended for the load", "direction", counts)


def _handoff_metrics(handoffs: HandoffStats) -> Iterator[Metric]:
    """What a prefill server has handed over, or a decode server taken over."""
    counters = {
        "handoffs": ("Prompts that were handed over, or taken over", handoffs.num_handoffs),
        "handoff_bytes": ("Bytes of KV and states in them", handoffs.num_bytes),
        "handoff_seconds": ("Time from the question for a prompt to its end, of all of them", handoffs.seconds),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"specmamba_{name}", text, value=value)
    failed = "Handoffs that came to nothing"
    yield _labelled("handoff_failures", failed, "reason", handoffs.failures.items())
    held = "Prompts that are held for decode servers, or that are being asked for"
    yield GaugeMetricFamily("specmamba_open_handoffs", held, value=handoffs.num_open)


def _tier_metrics(prefix: str, where: str, tier: TierStats) -> Iterator[Metric]:
    """The prefixes in a tier: what there is, what requests got of it, and what was written."""
    gauges = {
        "entries": (f"Entries of prefixes, in {where}", tier.num_entries),
        "bytes": (f"Bytes of prefixes in {where}", tier.num_bytes),
        "max_bytes": (f"Bytes that prefixes may take in {where}", tier.max_bytes),
        "bytes_in_flight": ("Bytes that wait to be written or read", tier.bytes_in_flight),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"specmamba_{prefix}_{name}", text, value=value)
    counters = {
        "hits": f"Requests that got a longer prefix from {where} than from the pools",
        "hit_tokens": f"Tokens that were loaded from {where}",
        "load_seconds": "Time from a request's question to its prefix in the pools, of all hits",
        "loaded_bytes": "Bytes that were loaded for hits",
        "writes": "Entries that were written",
        "written_bytes": "Bytes that were written",
        "evictions": "Entries that were removed for want of room",
        "damaged": "Entries that were found damaged, and removed",
    }
    yield from _counters(prefix, tier, counters)
    yield _labelled(f"{prefix}_miss", f"Requests that got nothing from {where}", "reason", tier.misses.items())
    lost = "Entries that were not written"
    yield _labelled(f"{prefix}_lost_writes", lost, "reason", tier.lost_writes.items())


def _chain_counters(chain: ChainStats) -> Iterator[Metric]:
    """How often the device had the next step before one was read."""
    texts = {
        "num_steps": "Decoding steps",
        "num_chained": "Decoding steps that were read after the next one was launched",
        "num_discarded": "Rows of decoding steps that were computed in vain",
        "num_for_host": "Decoding steps that were read first because the host had a part in the next one",
        "num_for_requests": "Decoding steps that were read first because requests came that may not join, or all ended",
        "num_for_memory": "Decoding steps that were read first for memory, or to leave a state",
    }
    yield from _counters("step_chain", chain, texts)


def _sizing_metrics(sizing: SizingStats) -> Iterator[Metric]:
    """The counters of the sizing of drafts, and what it thinks now."""
    counters = {
        "num_steps": "Decoding steps",
        "num_plain_steps": "Decoding steps without drafts",
        "num_probes": "Decoding steps that drafted only to see whether drafts would pay",
        "num_requests": "Requests of all decoding steps",
        "num_nodes": "Nodes that were verified, roots included",
        "num_draft_levels": "Depths of all drafts, summed",
        "predicted_seconds": "Time of all decoding steps, as it was predicted",
        "measured_seconds": "Time of all decoding steps, as it was measured",
        "decision_seconds": "Time of all decisions about the size of drafts",
    }
    yield from _counters("draft_sizing", sizing, counters)
    gauges = {
        "depth": ("Depth of drafts now; 0: off", sizing.depth),
        "calibration_error": ("Error of the probabilities of acceptance, 0 to 1", sizing.calibration_error),
        "gain": ("Tokens per second over plain decoding, predicted now for the best depth", max(sizing.gains)),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"specmamba_draft_sizing_{name}", text, value=value)


def _counters(
    prefix: str, stats: CacheStats | TierStats | SizingStats | SpecStats | ChainStats, texts: Mapping[str, str]
) -> Iterator[Metric]:
    """One counter for each of these attributes of ``stats``, given with their help texts."""
    for name, text in texts.items():
        yield CounterMetricFamily(f"specmamba_{prefix}_{name}", text, value=getattr(stats, name))


def _labelled(name: str, text: str, label: str, counts: Iterable[tuple[str, int]]) -> Metric:
    """One counter with a value for each value of a label."""
    family = CounterMetricFamily(f"specmamba_{name}", text, labels=[label])
    for value, count in counts:
        family.add_metric([value], count)
    return family


def _cache_counters(cache: CacheStats, with_salts: bool) -> Iterator[Metric]:
    counters = {
        "query_tokens": "Tokens of admitted requests that a cached prefix could have spared",
        "hit_tokens": "Tokens that a cached prefix did spare",
        "evicted_tokens": "Tokens that left the prefix cache for want of room",
        "evicted_states": "Recurrent states that left the prefix cache for want of room",
    }
    yield from _counters("prefix_cache", cache, counters)
    text = "Requests by why their cached prefix was not longer"
    misses = cache.misses if with_salts else without_salts(cache.misses)
    yield _labelled("prefix_cache_miss", text, "reason", misses.items())


def spec_counters(spec: SpecStats) -> Iterator[Metric]:
    """The counters of speculation."""
    counters = {
        "num_drafts": "Verify steps that had a draft",
        "num_draft_tokens": "Tokens drafted, roots not counted",
        "num_accepted_tokens": "Drafted tokens that the model agreed with",
    }
    yield from _counters("spec_decode", spec, counters)
    text = "Accepted drafts by their depth below the root; position 0 is the first drafted token"
    counts = ((str(position), count) for position, count in enumerate(accepted_per_position(spec)))
    yield _labelled("spec_decode_num_accepted_tokens_per_pos", text, "position", counts)


def accepted_per_position(spec: SpecStats) -> list[int]:
    """How often the draft at each depth was accepted: a step that accepted d drafts accepted positions 0 to d - 1."""
    at_least = list(accumulate(reversed(spec.accepted_histogram)))[::-1]
    return at_least[1:]


def vllm_counters(spec: SpecStats, model_name: str) -> Iterator[Metric]:
    """The counters of speculation with vLLM's names and labels, for tools that read those (``--metrics-compat vllm``).

    Such tools compute the acceptance length as one plus accepted tokens per draft. It equals
    ``specmamba_spec_accept_length`` where every step has a draft; steps without one (n-grams that found nothing,
    requests that want no drafts) count in the latter only.
    """
    labels = {"model_name": model_name, "engine": "0"}
    for ours in spec_counters(spec):
        theirs = CounterMetricFamily(ours.name.replace(_OUR_PREFIX, _VLLM_PREFIX), ours.documentation)
        for sample in ours.samples:
            theirs.add_sample(theirs.name + "_total", {**labels, **sample.labels}, sample.value)
        yield theirs


class ServerMetrics(Collector):
    """The metrics of one application, in a registry of its own."""

    def __init__(self, config: ServerConfig | None = None) -> None:
        """Without ``config`` there are no metrics under vLLM's names."""
        self.registry = CollectorRegistry()
        self.time_to_first_token = Histogram(
            "specmamba_time_to_first_token_seconds",
            "From the arrival of a request to its first token",
            _FIRST_TOKEN_BUCKETS,
        )
        self.inter_token_latency = Histogram(
            "specmamba_inter_token_latency_seconds",
            "Time per token after the first; the tokens of one step share its time",
            _INTER_TOKEN_BUCKETS,
        )
        self.call_latency = Histogram(
            "specmamba_e2e_request_latency_seconds",
            "From the arrival of a call to the end of its whole answer",
            _WHOLE_BUCKETS,
        )
        self.prompt_tokens = self.generation_tokens = 0
        requests = Counter(
            "specmamba_requests", "Requests that ended, by reason", ["finish_reason"], registry=self.registry
        )
        self._requests = {reason: requests.labels(reason) for reason in get_args(FinishReason)}
        self._errors = Counter(
            "specmamba_request_errors",
            "Calls that got no whole answer: refused, timed out, failed, or left by their client",
            ["reason"],
            registry=self.registry,
        )
        self._stats: EngineStats | None = None  # the newest that are known
        self._with_salts = False
        self._vllm_name = config.model_name if config is not None and config.metrics_compat == "vllm" else None
        self.registry.register(self)

    def observe(self, record: CallRecord, index: int) -> RequestTimer:
        """A new observer for one choice of a call."""
        return RequestTimer(self, record.arrived_at)

    def count_end(self, reason: FinishReason) -> None:
        self._requests[reason].inc()

    def record_call(self, call: CallRecord) -> None:
        """Count a call that has ended. Called on the event loop."""
        outcome = call.outcome
        if outcome is not None:
            self._errors.labels(_bounded(outcome, call.status)).inc()
        elif call.num_choices:
            self.call_latency.observe(call.total_s)

    def render(self, stats: EngineStats | None, with_salts: bool = False) -> bytes:
        """The text of ``/metrics``.

        Args:
            stats: of the engine; None: it did not answer, and its previous figures are shown.
            with_salts: tell misses of another salt apart from other misses, which reveals whether a text is cached.
        """
        if stats is not None:
            self._stats = stats
        self._with_salts = with_salts
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        return []  # so that registering does not collect

    def collect(self) -> Iterator[Metric]:
        """The metrics that are not objects of prometheus_client."""
        for histogram in (self.time_to_first_token, self.inter_token_latency, self.call_latency):
            yield from histogram.collect()
        prompts = "Prompt tokens of requests that gave a token"
        yield CounterMetricFamily("specmamba_prompt_tokens", prompts, value=self.prompt_tokens)
        generated = "Tokens generated for requests"
        yield CounterMetricFamily("specmamba_generation_tokens", generated, value=self.generation_tokens)
        dropped = "Log lines that could not be written, or not in time"
        yield CounterMetricFamily("specmamba_log_lines_dropped", dropped, value=num_dropped_lines())
        if self._stats is not None:
            yield from engine_metrics(self._stats, self._with_salts)
            if self._vllm_name is not None:
                yield from vllm_counters(self._stats.spec, self._vllm_name)


class RequestTimer:
    """Records the times and tokens of one engine request. Deltas come in order from one thread, an abort from any."""

    def __init__(self, metrics: ServerMetrics, arrived_at: float) -> None:
        """``arrived_at``: as ``time.perf_counter()``."""
        self._metrics = metrics
        self._latest_at = arrived_at
        self._has_token = False
        self._has_ended = False
        self._lock = threading.Lock()  # the engine may end a request while its client disconnects

    def record(self, delta: OutputDelta) -> None:
        num_tokens = len(delta.token_ids)
        if num_tokens:
            self._record_tokens(delta, num_tokens)
        if delta.finish_reason is not None:
            self._record_end(delta.finish_reason)

    def record_abort(self, reason: AbortReason = "disconnect") -> None:
        """Count the request as aborted, unless it has ended already."""
        self._record_end("abort")

    def _record_end(self, reason: FinishReason) -> None:
        with self._lock:
            had_ended, self._has_ended = self._has_ended, True
        if not had_ended:
            self._metrics.count_end(reason)

    def _record_tokens(self, delta: OutputDelta, num_tokens: int) -> None:
        now = time.perf_counter()
        elapsed, self._latest_at = now - self._latest_at, now
        metrics = self._metrics
        metrics.generation_tokens += num_tokens
        if self._has_token:
            metrics.inter_token_latency.observe(elapsed / num_tokens, num_tokens)
            return
        self._has_token = True
        metrics.time_to_first_token.observe(elapsed)
        metrics.prompt_tokens += delta.num_prompt_tokens


def _bounded(reason: str, status: int) -> str:
    """A label with few values: validation errors have very many codes."""
    return "invalid_request" if status in (400, 422) and reason != "context_length_exceeded" else reason
