"""From a plan to a drafter."""

from __future__ import annotations

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.config import EngineConfig
from specmamba.draft.base import Drafter, NoDrafter
from specmamba.draft.mtp import MTPDrafter
from specmamba.draft.plan import DraftPlan
from specmamba.models.base import LoadedModel


def build_drafter(
    plan: DraftPlan, config: EngineConfig, model: LoadedModel, kv_pool: KVPool, table: RequestTable
) -> Drafter:
    """The drafter that a plan asks for."""
    if plan.algorithm == "none":
        return NoDrafter()
    assert model.draft_head is not None
    return MTPDrafter(model.draft_head, plan, kv_pool, table, model.target.hidden_size)
