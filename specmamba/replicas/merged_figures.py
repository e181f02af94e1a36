"""Figures of several replicas as those of one engine: sums, but for what only one of them can say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from operator import add
from typing import Any, TypeVar

from specmamba.cache.prefix.inspection import Outline, RequestStats, View, hit_rate
from specmamba.core import SizingStats, SpecStats
from specmamba.engine.engine_sample import EngineSample

T = TypeVar("T")
_SETTINGS = {"page_size", "track_interval"}  # numbers of a report that are the same for all


def merged(values: Sequence[T]) -> T:
    """One value for those of all replicas. Numbers are sums; texts are those of the first.

    Depth, gains and the reason of drafts' sizes are those of the replica with the most steps.
    """
    found: T = _merged([value for value in values if value is not None])
    return found


def _merged(given: Sequence[Any]) -> Any:
    match given:
        case []:
            return None
        case [SpecStats(), *_]:
            return reduce(add, given)
        case [SizingStats(), *_]:
            return _sizing(given)
        case [RequestStats(), *_]:
            return _with_rate(_fields_merged(given))
        case [dict() as first, *_]:
            return {key: merged([value.get(key) for value in given]) for key in first}
        case [bool() as first, *_]:
            return first
        case [int() | float(), *_]:
            return sum(given)
        case [first, *_]:
            return _fields_merged(given) if is_dataclass(first) else first


def merged_sample(samples: Sequence[EngineSample]) -> EngineSample:
    """One sample: the trees of cached prefixes stand one behind the other."""
    views: dict[View, list[Outline]] = {}
    for view, outline in (pair for sample in samples for pair in sample.outlines.items()):
        views.setdefault(view, []).append(outline)
    return EngineSample(
        merged([sample.stats for sample in samples]),
        merged([dict(sample.tenants) for sample in samples]),
        tuple(draft for sample in samples for draft in sample.drafts),
        sum(sample.num_pending for sample in samples),
        sum(sample.num_records for sample in samples),
        {view: _joined(outlines) for view, outlines in views.items()},
    )


def merged_report(reports: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """One report of the prefix cache; the hit rate is that of all requests."""
    found: dict[str, Any] = merged([dict(report) for report in reports])
    found |= {name: reports[0][name] for name in _SETTINGS if name in reports[0]}
    found["hit_rate"] = hit_rate(found["hit_tokens"], found["query_tokens"])
    return found


def _fields_merged(values: Sequence[Any]) -> Any:
    first = values[0]
    return replace(first, **{f.name: merged([getattr(v, f.name) for v in values]) for f in fields(first)})


def _sizing(values: Sequence[SizingStats]) -> SizingStats:
    busiest, total = max(values, key=lambda stats: stats.num_steps), sum(stats.num_steps for stats in values)
    error = sum(stats.calibration_error * stats.num_steps for stats in values) / max(total, 1)
    own = {"depth": busiest.depth, "gains": busiest.gains, "reason": busiest.reason, "calibration_error": error}
    found: SizingStats = replace(_fields_merged(values), **own)
    return found


def _with_rate(stats: RequestStats) -> RequestStats:
    return replace(stats, hit_rate=hit_rate(stats.hit_tokens, stats.query_tokens))


def _joined(outlines: Sequence[Outline]) -> Outline:
    nodes = tuple(node for outline in outlines for node in outline.nodes)
    return replace(outlines[0], nodes=nodes, num_left=sum(outline.num_left for outline in outlines))
