"""What an engine shows of itself between two steps: a sample for the live page, and reports of its prefix cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from specmamba.cache.prefix.inspection import Outline, View
from specmamba.core import DraftView
from specmamba.engine.scheduler import EngineStats, TenantStats
from specmamba.verify.record_buffers import RecordBuffers

if TYPE_CHECKING:
    from specmamba.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineSample:
    """Figures, drafts and cached prefixes, for some views."""

    stats: EngineStats
    tenants: Mapping[View, TenantStats]  # of the views that are not whole
    drafts: tuple[DraftView, ...]  # since the previous sample, the newest last
    num_pending: int  # records in the speculation buffers
    num_records: int  # capacity of the speculation buffers; 0 without records
    outlines: Mapping[View, Outline]  # empty: not requested


def take_sample(engine: Engine, views: Collection[View], max_nodes: int) -> EngineSample:
    """Read the engine, on its thread.

    Cheap: a few sums, and for each view at most ``max_nodes`` nodes of the prefix cache; 0: no outlines.
    """
    records, cache = engine.pools.state_buffers, engine.cache_manager.cache
    num_pending, num_records = 0, 0
    if isinstance(records, RecordBuffers):
        num_pending, num_records = records.num_pending, records.num_records
    return EngineSample(
        engine.stats(),
        {view: engine.stats_of(view.tenant) for view in views if not view.is_whole},
        tuple(draft for draft in engine.last_drafts() if len(draft.tokens) > 1),
        num_pending,
        num_records,
        {view: cache.outline(max_nodes, view) for view in views} if max_nodes else {},
    )


def cache_report(engine: Engine, view: View) -> dict[str, object]:
    """Settings of the prefix cache and the figures that a view may see, ready for JSON."""
    config, cache = engine.config, engine.cache_manager.cache
    tracks = config.mamba_radix_cache_strategy == "extra_buffer"
    settings = {
        "enabled": engine.cache_manager.is_on,
        "strategy": config.mamba_radix_cache_strategy,
        "track_interval": config.mamba_track_interval if tracks else None,
    }
    if view.is_whole:
        return settings | cache.summary()
    return {**settings, "policy": cache.policy, **asdict(cache.requests_of(view.tenant))}


def cache_text(engine: Engine, view: View) -> str:
    """The tree of the prefix cache as text."""
    if not engine.cache_manager.is_on:
        return "the prefix cache is off (--disable-radix-cache)"
    return engine.cache_manager.cache.render_text(view=view)
