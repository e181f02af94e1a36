"""Engines whose pools share a budget that tests choose to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from specmamba.cache.memory import MemoryPlan, plan_memory
from specmamba.cache.memory.elastic import FEWEST_SLOTS, SplitBounds
from specmamba.cache.shapes import CacheShape
from specmamba.config import EngineConfig
from specmamba.engine import engine as engine_module


def elastic_plan(made: MemoryPlan, shape: CacheShape, context: int) -> MemoryPlan:
    """A plan whose pools share what they have at the start."""
    page_bytes, slot_bytes = made.page_size * shape.kv_bytes_per_token, shape.state_bytes_per_slot
    pool_bytes = made.num_pages * page_bytes + made.num_state_slots * slot_bytes
    most_pages = (pool_bytes - FEWEST_SLOTS * slot_bytes) // page_bytes
    bounds = SplitBounds(
        pool_bytes, page_bytes, slot_bytes, most_pages, pool_bytes // slot_bytes, uses_huge_pages=False
    )
    longest = min(context, most_pages * made.page_size - made.num_lookahead_slots)
    return replace(made, elastic=bounds, context_length=longest)


@contextmanager
def elastic_pools(num_tokens: int, num_slots: int) -> Iterator[None]:
    """Engines that start here have pools of these sizes, elastic unless ``--elastic-pools off``."""

    def plan(config: EngineConfig, shape: CacheShape, context: int, *sizes: Any, is_elastic: bool) -> MemoryPlan:
        given = {"max_total_tokens": num_tokens, "max_mamba_cache_size": num_slots}
        made = plan_memory(config.model_copy(update=given), shape, context, *sizes)
        return elastic_plan(made, shape, config.context_length or context) if is_elastic else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "plan_memory", plan)
        yield
