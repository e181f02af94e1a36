"""What an engine shows of itself between two steps: a sample for the live page, and reports of its prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from specmamba.cache.prefix.inspection import Outline, View
from specmamba.config import EngineConfig
from specmamba.core import DraftView
from specmamba.engine.cache_manager import CacheManager
from specmamba.engine.scheduler import EngineStats, TenantStats


@dataclass(frozen=True, slots=True)
class EngineSample:
    """Figures, drafts and cached prefixes, for some views."""

    stats: EngineStats
    tenants: Mapping[View, TenantStats]  # of the views that are not whole
    drafts: tuple[DraftView, ...]  # since the previous sample, the newest last
    num_pending: int  # records in the speculation buffers
    num_records: int  # capacity of the speculation buffers; 0 without records
    outlines: Mapping[View, Outline]  # empty: not requested


def cache_report(config: EngineConfig, manager: CacheManager, view: View) -> dict[str, object]:
    """Settings of the prefix cache and the figures that a view may see, ready for JSON."""
    tracks = config.mamba_radix_cache_strategy == "extra_buffer"
    settings = {
        "enabled": manager.is_on,
        "strategy": config.mamba_radix_cache_strategy,
        "track_interval": config.mamba_track_interval if tracks else None,
    }
    if view.is_whole:
        return settings | manager.cache.summary()
    return {**settings, "policy": manager.cache.policy, **asdict(manager.cache.requests_of(view.tenant))}


def cache_text(manager: CacheManager, view: View) -> str:
    """The tree of the prefix cache as text."""
    if not manager.is_on:
        return "the prefix cache is off (--disable-radix-cache)"
    return manager.cache.render_text(view=view)
