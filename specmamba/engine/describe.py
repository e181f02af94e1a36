"""What an engine says of itself."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from specmamba.models.checkpoint import read_json

if TYPE_CHECKING:
    from specmamba.cache.memory_plan import MemoryPlan
    from specmamba.engine.engine import Engine


def describe(engine: Engine) -> dict[str, object]:
    """Model, settings, sizes and versions, ready for JSON."""
    model, plan, drafts = engine.model, engine.memory_plan, engine.draft_plan
    draft = engine.models.draft
    return {
        "model": engine.config.model_path if engine.config.model is not None else "specmamba-demo",
        "architecture": model.architecture,
        "model_type": read_json(engine.folder / "config.json").get("model_type"),
        "parameters": model.num_parameters,
        "layers": model.num_layers,
        "dtype": str(model.cache_shape.dtype).removeprefix("torch."),
        "device": str(engine.device),
        "vocab_size": engine.vocab_size,
        "speculative_algorithm": drafts.algorithm,
        "speculative_draft_model_path": engine.config.speculative_draft_model_path,
        "draft_model": None if draft is None else engine.config.speculative_draft_model_path,
        "draft_architecture": None if draft is None else draft.architecture,
        "draft_parameters": None if draft is None else draft.num_parameters,
        "speculative_num_steps": drafts.num_steps,
        "speculative_eagle_topk": drafts.topk,
        "speculative_num_draft_tokens": drafts.max_nodes,
        "speculative_state": engine.config.speculative_state,
        "speculative_accept": engine.config.speculative_accept,
        **describe_memory(plan),
        "state_bytes_per_request": model.cache_shape.state_bytes_per_slot,
        "record_bytes_per_token": model.cache_shape.record_bytes_per_token,
        "cuda_graph_batch_sizes": [] if engine.runner.replays is None else list(engine.runner.replays.buckets),
        "prefix_cache": engine.prefixes.is_on,
        "prefix_cache_strategy": engine.config.mamba_radix_cache_strategy,
        "prefix_cache_eviction": engine.config.cache_eviction,
        "versions": {
            "specmamba": version("specmamba"),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
    }


def describe_memory(plan: MemoryPlan) -> dict[str, object]:
    """Who gets how many bytes, ready for JSON."""
    return {
        "context_length": plan.context_length,
        "max_running_requests": plan.num_running_requests,
        "kv_pool_tokens": plan.num_kv_tokens,
        "kv_pool_bytes": plan.kv_bytes,
        "state_slots": plan.num_state_slots,
        "state_pool_bytes": plan.state_bytes,
        "speculation_bytes": plan.spec_bytes,
        "speculation_bytes_per_request": plan.spec_bytes_per_request,
        "draft_state_bytes": plan.draft_bytes,
        "weight_bytes": plan.weight_bytes,
        "total_bytes": plan.total_bytes,
    }
