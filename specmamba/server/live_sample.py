"""One look at the engine, and the events that the live page gets of it. Neither shows any prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from specmamba.cache.prefix.inspection import Outline
from specmamba.cache.spec_buffers import SpecBuffers
from specmamba.core import DraftView, SpecStats
from specmamba.server.engine_metrics import accepted_per_position
from specmamba.server.histogram import Histogram
from specmamba.server.logprobs import token_string
from specmamba.server.metrics import ServerMetrics

if TYPE_CHECKING:
    from specmamba.engine.engine import Engine, EngineStats
    from specmamba.models.tokenizer import Tokenizer

MAX_DRAFTS, MAX_TREE_NODES = 8, 160


@dataclass(frozen=True, slots=True)
class Sample:
    """What the engine thread is asked for between two steps."""

    stats: EngineStats
    drafts: tuple[DraftView, ...]  # since the sample before, the newest last
    num_pending: int  # records in the speculation buffers
    num_records: int  # that they have room for; 0 where there are no records
    outline: Outline | None  # None: not asked for


def take_sample(engine: Engine, with_outline: bool) -> Sample:
    """Runs on the engine thread: a few sums, and at most ``MAX_TREE_NODES`` nodes of the prefix cache."""
    records = engine.pools.records
    num_pending, num_records = 0, 0
    if isinstance(records, SpecBuffers):
        num_pending, num_records = records.num_pending, records.num_records
    return Sample(
        engine.stats(),
        tuple(view for view in engine.last_drafts() if len(view.tokens) > 1)[-MAX_DRAFTS:],
        num_pending,
        num_records,
        engine.prefixes.cache.outline(MAX_TREE_NODES) if with_outline else None,
    )


def as_json(value: Mapping[str, Any]) -> str:
    """On one line, in ASCII: an event's data may hold no line break."""
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
    """The newest drafts, the newest last."""
    return {"drafts": [_draft(view, tokenizer) for view in sample.drafts]}


def tree_event(outline: Outline) -> dict[str, Any]:
    """The prefix cache's tree, node by node as ``Outline`` has them."""
    return asdict(outline)


def _pool(used: int, cached: int, total: int) -> dict[str, int]:
    return {"used": used, "cached": cached, "total": total}


def _spec(spec: SpecStats) -> dict[str, Any]:
    return {
        "steps": spec.num_verify_steps,
        "drafts": spec.num_drafts,
        "drafted": spec.num_draft_tokens,
        "accepted": spec.num_accepted_tokens,
        "tokens": spec.num_verify_steps + spec.num_accepted_tokens,
        "histogram": spec.accepted_histogram,
        "per_position": accepted_per_position(spec),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """Sum in seconds, and counts at or below each bound; the last bound, infinity, is null."""
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
