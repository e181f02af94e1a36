"""What replicas tell the server, as values of JSON: deltas, figures, samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from specmamba.cache.prefix.inspection import Outline, View
from specmamba.core import DraftView, OutputDelta
from specmamba.engine.engine_sample import EngineSample
from specmamba.engine.scheduler import EngineStats, TenantStats

_DELTAS = TypeAdapter(list[OutputDelta])
_STATS = TypeAdapter(EngineStats)
_TENANT_STATS = TypeAdapter(TenantStats)
_PARTS_OF_SAMPLE: Mapping[str, TypeAdapter[Any]] = {
    "stats": _STATS,
    "tenants": TypeAdapter(list[tuple[View, TenantStats]]),
    "drafts": TypeAdapter(tuple[DraftView, ...]),
    "outlines": TypeAdapter(list[tuple[View, Outline]]),
}


def dump_deltas(deltas: list[OutputDelta]) -> list[dict[str, Any]]:
    """Deltas as values of JSON, without what has its default value, which would be most of them."""
    found: list[dict[str, Any]] = _DELTAS.dump_python(deltas, mode="json", exclude_defaults=True)
    return found


def load_deltas(values: object) -> list[OutputDelta]:
    """Deltas from values of JSON."""
    return _DELTAS.validate_python(values)


def dump_stats(stats: EngineStats) -> dict[str, Any]:
    """Figures as values of JSON."""
    found: dict[str, Any] = _STATS.dump_python(stats, mode="json")
    return found


def load_stats(value: object) -> EngineStats:
    """Figures from values of JSON."""
    return _STATS.validate_python(value)


def dump_tenant_stats(stats: TenantStats) -> dict[str, Any]:
    """Figures of a tenant as values of JSON."""
    found: dict[str, Any] = _TENANT_STATS.dump_python(stats, mode="json")
    return found


def load_tenant_stats(value: object) -> TenantStats:
    """Figures of a tenant from values of JSON."""
    return _TENANT_STATS.validate_python(value)


def dump_view(view: View) -> dict[str, Any]:
    """A view as values of JSON."""
    return asdict(view)


def load_view(value: Mapping[str, Any]) -> View:
    """A view from values of JSON."""
    return View(**value)


def dump_sample(sample: EngineSample) -> dict[str, Any]:
    """A sample as values of JSON."""
    parts = {
        "stats": sample.stats,
        "tenants": list(sample.tenants.items()),
        "drafts": sample.drafts,
        "outlines": list(sample.outlines.items()),
    }
    counts = {"num_pending": sample.num_pending, "num_records": sample.num_records}
    return {name: _PARTS_OF_SAMPLE[name].dump_python(part, mode="json") for name, part in parts.items()} | counts


def load_sample(value: Mapping[str, Any]) -> EngineSample:
    """A sample from values of JSON."""
    parts = {name: adapter.validate_python(value[name]) for name, adapter in _PARTS_OF_SAMPLE.items()}
    return EngineSample(
        parts["stats"],
        dict(parts["tenants"]),
        parts["drafts"],
        value["num_pending"],
        value["num_records"],
        dict(parts["outlines"]),
    )
