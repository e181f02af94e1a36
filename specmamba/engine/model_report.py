"""Reports for programs: of a checkpoint, from its configs and tensor shapes only, and of an engine that was started."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch

from specmamba.cache.memory import MemoryPlan, free_memory, plan_memory
from specmamba.cache.memory.elastic import SplitBounds, elastic_chunk
from specmamba.cache.shapes import pending_capacity
from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.checkpoints.files import read_json
from specmamba.checkpoints.quantized.stored_report import StoredMatrices
from specmamba.config import TEXT_ALGORITHMS, WEIGHTLESS, EngineConfig
from specmamba.draft.draft_plan import DraftPlan, plan_drafts
from specmamba.engine.captured.step_memory import graph_token_bytes, products_below, walk
from specmamba.engine.loading import Crossovers, load_models, load_tokenizer, require_target, resolve_device
from specmamba.errors import CheckpointError, ConfigError
from specmamba.kernels import gpu
from specmamba.kernels.paged_attention import crossover
from specmamba.layers.attention import Attention, HeadGatedAttention
from specmamba.layers.feed_forward import MLP, GatedMLP, MoE
from specmamba.layers.gated_delta_net import GatedDeltaNet, KimiDeltaAttention
from specmamba.layers.latent_attention import LatentAttention
from specmamba.layers.mamba1 import Mamba1
from specmamba.layers.mamba2 import Mamba2
from specmamba.layers.short_conv import ShortConv
from specmamba.models.base import BlockHead, DraftKind, LoadedModel, Models
from specmamba.models.dflash import BlockAttention
from specmamba.version import __version__

# The names of layers, in the order in which they are listed.
KINDS: dict[type, str] = {
    Attention: "attention",
    BlockAttention: "attention",
    HeadGatedAttention: "attention",
    LatentAttention: "latent_attention",
    GatedDeltaNet: "gated_delta_net",
    KimiDeltaAttention: "kimi_delta_attention",
    Mamba1: "mamba1",
    Mamba2: "mamba2",
    ShortConv: "short_convolution",
    MoE: "mixture_of_experts",
    GatedMLP: "mlp",
    MLP: "mlp",
}
CHAIN, DYNAMIC, STATIC = "chain", "dynamic tree", "static tree"
DRAFT_SHAPES: dict[DraftKind, tuple[str, ...]] = {
    "mtp": (CHAIN, DYNAMIC, STATIC),
    "eagle": (CHAIN, DYNAMIC, STATIC),
    "eagle3": (CHAIN, DYNAMIC, STATIC),
    "dflash": (CHAIN, DYNAMIC),
    "draft-model": (CHAIN, DYNAMIC),
}


def model_info(config: EngineConfig) -> dict[str, Any]:
    """Describe a model under given flags, ready for JSON. It is quick and needs no memory, whatever the model's size.

    Bytes are those of these flags. Weights are not loaded (see ``load_models`` with ``only_shapes``).

    Raises:
        CheckpointError: a checkpoint is incomplete, damaged or inconsistent, or cannot be had.
        UnsupportedModelError: there is no model for an architecture.
        ConfigError: the draft does not fit the target, or the flags ask for what is not there.
    """
    device = resolve_device(config.device)
    config = config.on_device(device.type)
    folder = resolve_checkpoint(config.model_path, config.revision)
    require_target(folder)
    without = config.model_copy(update={"speculative_algorithm": "none", "speculative_draft_model_path": None})
    is_looked_for = config.speculative_algorithm not in WEIGHTLESS
    found_with = config if is_looked_for else config.model_copy(update={"speculative_algorithm": "auto"})
    with torch.inference_mode():
        alone = load_models(folder, without, device, only_shapes=True).target
        found = load_models(folder, found_with, device, only_shapes=True)
    used = found if is_looked_for else replace(found, target=alone, draft=None)
    plan = plan_drafts(config, used.draft_kind, alone.target.vocab_size, used.block_size)
    return {
        "model": config.model if config.model is not None else "specmamba-demo",
        "architecture": alone.architecture,
        "parameters": alone.num_parameters,
        "layers": {"blocks": alone.num_layers, **_layers(alone.target, set())},
        "hidden_size": alone.target.hidden_size,
        "vocab_size": alone.target.vocab_size,
        "context_length": alone.context_length,
        "dtype": _name(alone.cache_shape.dtype),
        "quantization": config.quantization,
        "mamba_ssm_dtype": _name(alone.cache_shape.state_dtype),
        "kv_cache_dtype": _kv_cache_dtype(config, alone),
        "device": str(device),
        "bytes": _bytes(alone, used, plan),
        "stored": [_stored(matrices, alone) for matrices in found.target.stored.matrices],
        "ignored": dict(found.target.stored.ignored),
        "memory": _memory(config, used, plan, device),
        "draft": _draft(config, found, alone),
        "drafts_with": _drafts_with(plan, used.target.cache_shape.folds_in_verify),
        "supported": _supported(found.draft_kind),
        "tokenizer": _tokenizer(config, folder, alone),
    }


def _stored(matrices: StoredMatrices, model: LoadedModel) -> dict[str, Any]:
    """Describe matrices that are stored alike; those in no other form run in the model's dtype."""
    return asdict(matrices) | {"runs_as": matrices.runs_as or _name(model.cache_shape.dtype)}


def _bytes(alone: LoadedModel, models: Models, plan: DraftPlan) -> dict[str, int]:
    """Return the bytes of the target alone, and those that drafting adds to its pools."""
    shape, both = alone.cache_shape, models.target.cache_shape
    return {
        "weights": alone.weight_bytes,
        "weights_per_step": _read_bytes(alone.target),
        "state_per_slot": shape.state_bytes_per_slot,
        "record_per_token": shape.record_bytes_per_token,
        "snapshot_per_node": shape.snapshot_bytes(1),
        "kv_per_token": shape.kv_bytes_per_token,
        "draft_per_slot": both.state_bytes_per_slot - shape.state_bytes_per_slot,
        "draft_kv_per_token": both.kv_bytes_per_token - shape.kv_bytes_per_token,
        "records_per_request": both.record_bytes(plan.max_nodes),
        "snapshots_per_request": both.snapshot_bytes(plan.max_nodes),
    }


def _memory(config: EngineConfig, models: Models, plan: DraftPlan, device: torch.device) -> dict[str, Any]:
    """Return the memory plan of an engine that would be started now, or the problem that prevents it."""
    model, free = models.target, free_memory(device)
    budget = int(free * config.mem_fraction_static)
    sizes = model.cache_shape, model.context_length, model.target.vocab_size, plan.max_nodes, plan.num_lookahead_slots
    try:
        chunk = elastic_chunk(config, model.cache_shape, device)
        of_token = graph_token_bytes(config, models, device)
        memory = plan_memory(config, *sizes, budget, models.weight_bytes, chunk, of_token)
    except ConfigError as error:
        return {"free_bytes": free, "problem": str(error)}
    return {"free_bytes": free, **describe_memory(memory), "table": memory.describe_lines()}


def _draft(config: EngineConfig, models: Models, alone: LoadedModel) -> dict[str, Any] | None:
    """Describe the draft head or draft model; None: there is none."""
    if models.draft_kind is None:
        return None
    path = config.speculative_draft_model_path
    where = {"kind": models.draft_kind, "path": path}
    draft = models.draft
    if draft is not None:
        return where | {
            "architecture": draft.architecture,
            "parameters": draft.num_parameters,
            "weight_bytes": draft.weight_bytes,
            "layers": {"blocks": draft.num_layers, **_layers(draft.target, set())},
        }
    both, seen = models.target, set[int]()
    _layers(both.target, seen)  # a head may refer to its target, whose layers are not counted again
    if isinstance(both.draft_head, BlockHead):
        where["variant"] = both.draft_head.variant
    return where | {
        "parameters": both.num_parameters - alone.num_parameters,
        "weight_bytes": both.weight_bytes - alone.weight_bytes,
        "layers": _layers(both.draft_head, seen),
    }


def _drafts_with(plan: DraftPlan, folds_in_verify: bool) -> dict[str, Any]:
    """Describe what these flags draft with."""
    return {
        "algorithm": plan.algorithm,
        "num_steps": plan.num_steps,
        "topk": plan.topk,
        "num_draft_tokens": plan.max_nodes,
        "pending_records": pending_capacity(plan.max_nodes, folds_in_verify),
    }


def _supported(draft: DraftKind | None) -> dict[str, Any]:
    """Return the choices of flags that this model supports with the draft that was found."""

    def choices(field: str) -> list[str]:
        return list(get_args(EngineConfig.model_fields[field].annotation))

    with_draft = {} if draft is None else {draft: list(DRAFT_SHAPES[draft])}
    return {
        "algorithms": {"none": [], **{name: [CHAIN, DYNAMIC] for name in TEXT_ALGORITHMS}, **with_draft},
        "dtype": [choice for choice in choices("dtype") if choice != "auto"],
        "quantization": choices("quantization"),
        "mamba_ssm_dtype": choices("mamba_ssm_dtype"),
        "kv_cache_dtype": choices("kv_cache_dtype"),
        "speculative_state": choices("speculative_state"),
        "speculative_accept": choices("speculative_accept"),
        "speculative_adaptive": choices("speculative_adaptive"),
    }


def _tokenizer(config: EngineConfig, folder: Path, model: LoadedModel) -> dict[str, Any]:
    """Describe the tokenizer; a model without one can be described, and served with --skip-tokenizer-init alone."""
    if config.skip_tokenizer_init:
        return {"is_skipped": True, "eos_token_ids": list(model.eos_token_ids)}
    try:
        tokenizer = load_tokenizer(folder)
    except CheckpointError as error:
        return {"problem": str(error)}
    return {
        "tokens": tokenizer.vocab_size,
        "has_chat_template": tokenizer.has_chat_template,
        "eos_token_ids": list(model.eos_token_ids),
    }


def _layers(part: object, seen: set[int]) -> dict[str, int]:
    """Count the layers of ``part`` by kind; objects whose id is in ``seen`` are skipped, the others are added to it."""
    layers = (each for each in walk(part, seen, _is_layer) if _is_layer(each))
    found = Counter(KINDS[type(layer)] for layer in layers)
    return {kind: found[kind] for kind in dict.fromkeys(KINDS.values()) if found[kind]}


def _is_layer(part: object) -> bool:
    return type(part) in KINDS


def _read_bytes(part: object) -> int:
    """Bytes of the matrices that a decode step of one request reads."""
    found = products_below(part, set())
    return sum(x.expert_bytes_per_token if isinstance(x, MoE) else x.nbytes for x in found)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_cache_dtype(config: EngineConfig, model: LoadedModel) -> str:
    """Return the type of stored keys and values as the flag names it, or the model's."""
    return _name(model.cache_shape.dtype) if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def describe_engine(
    config: EngineConfig,
    folder: Path,
    models: Models,
    drafts: DraftPlan,
    memory: MemoryPlan,
    device: torch.device,
    graph_batch_sizes: Sequence[int],
    crossovers: Crossovers,
) -> dict[str, object]:
    """Model, settings, sizes and versions of an engine that was started, ready for JSON.

    Args:
        config: the flags.
        folder: of the target's checkpoint.
        models: the target and what drafts for it.
        drafts: what is drafted.
        memory: bytes of the pools.
        device: of models and pools.
        graph_batch_sizes: batch sizes that steps are captured for; empty where no step is captured.
        crossovers: from which length on runs of a prefill gather their keys, by heads of layers.
    """
    model, draft = models.target, models.draft
    return {
        "model": config.model_path if config.model is not None else "specmamba-demo",
        "architecture": model.architecture,
        "model_type": read_json(folder / "config.json").get("model_type"),
        "parameters": model.num_parameters,
        "layers": model.num_layers,
        "dtype": _name(model.cache_shape.dtype),
        "kv_cache_dtype": _kv_cache_dtype(config, model),
        "device": str(device),
        "vocab_size": model.target.vocab_size,
        "speculative_algorithm": drafts.algorithm,
        "speculative_draft_model_path": config.speculative_draft_model_path,
        "draft_model": None if draft is None else config.speculative_draft_model_path,
        "draft_architecture": None if draft is None else draft.architecture,
        "draft_parameters": None if draft is None else draft.num_parameters,
        "speculative_num_steps": drafts.num_steps,
        "speculative_eagle_topk": drafts.topk,
        "speculative_num_draft_tokens": drafts.max_nodes,
        "speculative_adaptive": drafts.is_sized,
        **({"speculative_suffix": config.suffix_rules._asdict()} if drafts.algorithm == "suffix" else {}),
        "speculative_state": config.speculative_state,
        "speculative_accept": config.speculative_accept,
        **describe_memory(memory),
        "state_bytes_per_request": model.cache_shape.state_bytes_per_slot,
        "record_bytes_per_token": model.cache_shape.record_bytes_per_token,
        "cuda_graph_batch_sizes": list(graph_batch_sizes),
        "triton_operators": sorted(gpu.choice().operators) if gpu.runs_on(device) else [],
        "gathered_attention": [_describe_crossover(heads, least) for heads, least in crossovers.items()],
        "prefix_cache": memory.caches_prefixes,
        "prefix_cache_strategy": config.mamba_radix_cache_strategy,
        "prefix_cache_eviction": config.cache_eviction,
        **_describe_tiers(config),
        "versions": {
            "specmamba": __version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
    }


def _describe_crossover(heads: crossover.Heads, least: int | None) -> dict[str, object]:
    """Return what was measured for layers with these heads; None: keys are never gathered."""
    sizes = {"query_heads": heads.query_heads, "key_heads": heads.key_heads, "head_dim": heads.head_dim}
    return sizes | {"dtype": _name(heads.dtype), "from_queries": least}


def crossover_lines(crossovers: Crossovers) -> list[str]:
    """Lines of the start-up report: which form of attention the runs of a prefill take on a GPU."""
    lines = []
    for heads, least in crossovers.items():
        of_heads = f"{heads.query_heads} heads over {heads.key_heads} of {heads.head_dim}"
        form = "Triton" if least is None else f"PyTorch for {least:,} tokens and more, Triton for fewer"
        lines.append(f"attention in prefills, by times of both forms: {form} ({of_heads})")
    return lines


def _describe_tiers(config: EngineConfig) -> dict[str, object]:
    """Return the settings of prefixes below the pools; those of disk or store only where there is one."""
    names = ("hicache_ratio", "hicache_size")
    host: dict[str, object] = {name: value for name in names if (value := getattr(config, name))}
    has_store = config.hicache_storage_backend == "mooncake"
    if host or has_store or config.hicache_storage_dir is not None:
        host["hicache_state_dtype"] = config.hicache_state_dtype
    if has_store:
        host |= {"hicache_storage_backend": "mooncake", "hicache_write_policy": config.hicache_write_policy}
    if config.hicache_storage_dir is None:
        return host
    return host | {
        "hicache_storage_dir": str(config.hicache_storage_dir),
        "hicache_storage_size": config.hicache_storage_size,
        "hicache_write_policy": config.hicache_write_policy,
    }


def describe_memory(plan: MemoryPlan) -> dict[str, object]:
    """Return the sizes of all pools, ready for JSON."""
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
        "captured_step_bytes": plan.graph_bytes,
        "graph_pool_bytes": plan.graph_pool_bytes,
        "weight_bytes": plan.weight_bytes,
        "total_bytes": plan.total_bytes,
        "elastic_pools": None if plan.elastic is None else _describe_split(plan, plan.elastic),
    }


def _describe_split(plan: MemoryPlan, bounds: SplitBounds) -> dict[str, int]:
    """Return what elastic pools share, and how far each of them can grow; their sizes now are in the statistics."""
    return {
        "pool_bytes": bounds.pool_bytes,
        "most_kv_tokens": bounds.most_pages * plan.page_size,
        "most_state_slots": bounds.most_state_slots,
        "chunk_bytes": bounds.chunk_bytes,
        "end_bytes": plan.end_bytes,
    }
