"""``specmamba info --plan``: what each of N ranks takes of a model, and how many requests run on them at once.

No weights are read and nothing is allocated, so memory of devices that are not there can be planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from specmamba.cache.memory import MemoryPlan, free_memory, plan_memory
from specmamba.cache.memory.demand import Demand, largest_fitting
from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.config import EngineConfig
from specmamba.draft.draft_plan import DraftPlan, plan_drafts
from specmamba.engine.captured.step_memory import graph_token_bytes
from specmamba.engine.loading import load_models, require_target, resolve_device
from specmamba.errors import ConfigError
from specmamba.models.base import Models

MOST_REQUESTS = 4096  # the largest value of --max-running-requests
SIZES = (1, 2, 4, 8)  # numbers of ranks that are planned where --tp-size is not given
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one of ``tp_size`` ranks takes, in bytes, and what runs on all of them."""

    tp_size: int
    weights: int
    kv_per_token: int
    state_per_request: int
    speculation_per_request: int
    kv_pool_tokens: int  # under the flags' --max-running-requests
    state_slots: int
    total: int
    requests_at_once: dict[int, int | None]  # by their prompt and output tokens; None: longer than the context


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Why so many ranks cannot run the model."""

    tp_size: int
    problem: str


def plan_capacity(config: EngineConfig, gpu_memory: float | None, num_tokens: Sequence[int]) -> dict[str, Any]:
    """Plan one to ``--tp-size`` ranks (1, 2, 4, ...; up to 8 where it was not given), ready for JSON.

    Args:
        config: the flags of the engine.
        gpu_memory: GiB of one GPU, which need not be there; None: what is free on this machine's device now.
        num_tokens: lengths of the requests that are counted, prompt and output.

    Raises:
        CheckpointError: a checkpoint is incomplete, damaged or inconsistent, or cannot be had.
        UnsupportedModelError: there is no model for an architecture.
        ConfigError: the draft does not fit the target, or the flags ask for what is not there.
    """
    device = resolve_device(config.device) if gpu_memory is None else torch.device("cuda")
    memory = free_memory(device) if gpu_memory is None else int(gpu_memory * GIB)
    require_target(resolve_checkpoint(config.model_path, config.revision, needs_weights=False))
    plans = [_plan_ranks(config, size, device, memory, num_tokens) for size in _sizes(config)]
    return {
        "model": config.model if config.model is not None else "specmamba-demo",
        "device": device.type,
        "memory_bytes": memory,
        "mem_fraction_static": config.on_device(device.type).mem_fraction_static,
        "plans": [asdict(plan) for plan in plans],
    }


def _sizes(config: EngineConfig) -> list[int]:
    if "tp_size" not in config.model_fields_set:
        return list(SIZES)
    return sorted({1 << i for i in range(config.tp_size.bit_length())} | {config.tp_size})


def _plan_ranks(
    config: EngineConfig, size: int, device: torch.device, memory: int, num_tokens: Sequence[int]
) -> RankPlan | NoPlan:
    """Plan ``size`` ranks. Ranks on a CPU share its memory."""
    experts = size if config.ep_size > 1 else 1
    config = config.model_copy(update={"tp_size": size, "ep_size": experts}).on_device(device.type)
    budget = int(memory * config.mem_fraction_static) // (size if device.type == "cpu" else 1)
    folder = resolve_checkpoint(config.model_path, config.revision, needs_weights=False)
    try:
        with torch.inference_mode():
            models = load_models(folder, config, device, only_shapes=True)
        drafts = plan_drafts(config, models.draft_kind, models.target.target.vocab_size, models.block_size)
        of_token = graph_token_bytes(config, models, device)
        plan = _plan_memory(config, models, drafts, budget, of_token)
    except ConfigError as error:
        if size == 1 and "weights and the smallest pools need" not in str(error):  # so it is with any number of ranks
            raise
        return NoPlan(size, str(error))
    demand = _demand(config, models, drafts, of_token)
    return RankPlan(
        tp_size=size,
        weights=plan.weight_bytes,
        kv_per_token=demand.shape.kv_bytes_per_token,
        state_per_request=demand.shape.state_bytes_per_slot,
        speculation_per_request=plan.spec_bytes_per_request,
        kv_pool_tokens=plan.num_kv_tokens,
        state_slots=plan.num_state_slots,
        total=plan.total_bytes,
        requests_at_once={tokens: requests_at_once(demand, budget, tokens) for tokens in num_tokens},
    )


def requests_at_once(demand: Demand, budget_bytes: int, num_tokens: int) -> int | None:
    """Return how many requests of ``num_tokens`` tokens run together, each with its KV, state and tables.

    ``--max-running-requests`` is raised or lowered to that number, up to ``MOST_REQUESTS``; other flags are as they
    are, and pools are fixed. Nothing is left for cached prefixes then. 0: not even one fits. None: the context is
    shorter.
    """
    if num_tokens > demand.context:
        return None
    most = min(MOST_REQUESTS, demand.config.max_mamba_cache_size or MOST_REQUESTS)
    if demand.given_pages is not None:
        most = min(most, demand.given_pages // demand.pages_of(num_tokens))

    def fits(number: int) -> bool:
        of_number = demand.with_changes(max_running_requests=number)
        pages = demand.given_pages or number * demand.pages_of(num_tokens)
        return of_number.total_bytes(pages, of_number.fewest_state_slots) <= budget_bytes

    return largest_fitting(range(1, most + 1), fits) or 0


def _plan_memory(
    config: EngineConfig, models: Models, drafts: DraftPlan, budget: int, graph_token_bytes: int
) -> MemoryPlan:
    model, weights = models.target, models.weight_bytes
    sizes = model.cache_shape, model.context_length, model.target.vocab_size
    bounds = drafts.max_nodes, drafts.num_lookahead_slots
    return plan_memory(config, *sizes, *bounds, budget, weights, graph_token_bytes=graph_token_bytes)


def _demand(config: EngineConfig, models: Models, drafts: DraftPlan, graph_token_bytes: int) -> Demand:
    model, weights = models.target, models.weight_bytes
    sizes = model.cache_shape, model.context_length, model.target.vocab_size
    bounds = drafts.max_nodes, drafts.num_lookahead_slots
    return Demand(config, *sizes, *bounds, weights, graph_token_bytes=graph_token_bytes)
