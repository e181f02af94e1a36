"""What the live page shows: one sample of the engine, and the events that are made of it for each view.

Of prompts the beginnings of cached pieces are shown. A tenant's events show the drafts, the prefixes and the figures of
its own requests only, and no text under a salt: the clients of one key may be kept apart by salts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from specmamba.cache.prefix.inspection import CacheStats, Outline, OutlineNode, View
from specmamba.core import DraftView, SpecStats
from specmamba.server.api.tokenization import token_string
from specmamba.server.observe.metrics import Histogram, ServerMetrics, accepted_per_position

if TYPE_CHECKING:
    from specmamba.engine.engine_sample import EngineSample
    from specmamba.engine.scheduler import TenantStats
    from specmamba.models.text.tokenizer import Tokenizer

MAX_DRAFTS, MAX_TREE_NODES = 8, 160
MAX_TEXT = 80  # characters of a node of the prefix cache


def drafts_of(sample: EngineSample, view: View) -> tuple[DraftView, ...]:
    """The newest drafts that a view shows."""
    return tuple(draft for draft in sample.drafts if view.shows(draft.tenant))[-MAX_DRAFTS:]


def as_json(value: Mapping[str, Any]) -> str:
    """JSON on one line, in ASCII: the data of an event must not contain line breaks."""
    return json.dumps(value, separators=(",", ":"))


def stats_event(sample: EngineSample, metrics: ServerMetrics, now: float) -> dict[str, Any]:
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
        "split": None if stats.split is None else asdict(stats.split),
        "spec": _spec(stats.spec),
        "sizing": None if stats.sizing is None else asdict(stats.sizing),
        "cache": asdict(stats.prefix_cache),
        "tiers": {
            name: asdict(tier)
            for name, tier in (("host", stats.host), ("disk", stats.disk), ("store", stats.store))
            if tier is not None
        },
        "latency": {
            "first_token": _histogram(metrics.time_to_first_token),
            "inter_token": _histogram(metrics.inter_token_latency),
        },
    }


def tenant_stats_event(stats: TenantStats, now: float) -> dict[str, Any]:
    """``stats_event`` with the figures of one tenant: its requests, its drafts, its hits; all others are 0 or null."""
    hits = asdict(stats.requests)
    return {
        "time": now,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "preemptions": 0,
        "pools": {name: _pool(0, 0, 0) for name in ("kv", "states", "records")},
        "split": None,
        "spec": _spec(stats.spec),
        "sizing": None,  # it depends on the requests of all
        "cache": dict.fromkeys(_SIZES, 0) | hits,
        "tiers": {},
        "latency": {name: {"sum": 0.0, "buckets": []} for name in ("first_token", "inter_token")},
    }


def draft_event(drafts: Collection[DraftView], tokenizer: Tokenizer) -> dict[str, Any]:
    """Drafts, the newest last."""
    return {"drafts": [_draft(draft, tokenizer) for draft in drafts]}


def tree_event(outline: Outline, tokenizer: Tokenizer) -> dict[str, Any]:
    """The tree of the prefix cache: the fields of ``Outline``, with texts in place of tokens."""
    return {"nodes": [_outlined(node, tokenizer) for node in outline.nodes], "num_left": outline.num_left}


_SIZES = tuple(field.name for field in fields(CacheStats))


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


def _outlined(node: OutlineNode, tokenizer: Tokenizer) -> dict[str, Any]:
    shown = asdict(node)
    beginning = shown.pop("beginning")
    return shown | {"text": None if beginning is None else _beginning(beginning, tokenizer)[:MAX_TEXT]}


def _beginning(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    if not tokenizer.has_text:
        return " ".join(map(str, tokens))
    return tokenizer.decode(tokens, skip_special_tokens=False)


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
