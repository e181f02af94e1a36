"""What the server measures, for Prometheus.

Latencies and token counts are recorded as deltas come from the engine, calls when they end. Each figure has one thread
that writes it, so that none needs a lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from specmamba.core import FinishReason, OutputDelta
from specmamba.server.calls import CallRecord
from specmamba.server.engine_metrics import EngineCollector, accepted_per_position
from specmamba.server.histogram import Histogram
from specmamba.server.observers import AbortReason, CallContext
from specmamba.server.vllm_metrics import vllm_counters
from specmamba.server_config import ServerConfig

if TYPE_CHECKING:
    from specmamba.engine.engine import EngineStats

__all__ = ["RequestTimer", "ServerMetrics", "accepted_per_position"]

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 1.0, 2.5)
_WHOLE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class ServerMetrics:
    """The metrics of one application, in a registry of its own."""

    def __init__(self, config: ServerConfig | None = None) -> None:
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
        self._engine = EngineCollector()
        self._vllm_name = config.model_name if config is not None and config.metrics_compat == "vllm" else None
        self.registry.register(_Collected(self))

    def observe(self, context: CallContext, index: int) -> RequestTimer:
        """The observer of a request."""
        return RequestTimer(self, context.arrived_at)

    def count_end(self, reason: FinishReason) -> None:
        self._requests[reason].inc()

    def record_call(self, call: CallRecord) -> None:
        """Of a call that is over; on the event loop."""
        outcome = call.outcome
        if outcome is not None:
            self._errors.labels(_bounded(outcome, call.status)).inc()
        elif call.num_choices:
            self.call_latency.observe(call.total_s)

    def render(self, stats: EngineStats | None) -> bytes:
        """The text that Prometheus reads; without statistics the last ones known are given."""
        if stats is not None:
            self._engine.stats = stats
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What has no metric object of prometheus_client's own."""
        for histogram in (self.time_to_first_token, self.inter_token_latency, self.call_latency):
            yield from histogram.collect()
        prompts = "Prompt tokens of requests that gave a token"
        yield CounterMetricFamily("specmamba_prompt_tokens", prompts, value=self.prompt_tokens)
        generated = "Tokens generated for requests"
        yield CounterMetricFamily("specmamba_generation_tokens", generated, value=self.generation_tokens)
        yield from self._engine.collect()
        if self._vllm_name is not None and self._engine.stats is not None:
            yield from vllm_counters(self._engine.stats.spec, self._vllm_name)


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

    def record_abort(self, reason: AbortReason = "disconnect") -> None:
        """The request was given up. Counts once, and not at all when it had ended already."""
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


class _Collected(Collector):
    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []  # so that registering does not collect

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect()


def _bounded(reason: str, status: int) -> str:
    """A label of few values: a wrong field has a code for each way to be wrong."""
    return "invalid_request" if status in (400, 422) and reason != "context_length_exceeded" else reason
