"""The keyword arguments of ``LLM`` for type checkers and editors: the fields of ``EngineConfig`` behind ``model``.

``tests/project/test_types.py`` holds them to the configuration. Names of other runtimes (``other_names``) work when the
program runs and are none of these: a type checker and an editor know one name for each setting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict


class EngineFlags(TypedDict, total=False):
    """Flags of the engine, as ``specmamba serve --help`` describes them."""

    revision: str | None
    skip_tokenizer_init: bool
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantization: Literal["auto", "none", "int8", "int4", "fp8", "fp8-dynamic"]
    quantization_group_size: Literal[32, 64, 128]
    device: Literal["auto", "cpu", "cuda"]
    num_threads: int | None
    tp_size: int
    ep_size: int
    deterministic: bool
    seed: int
    context_length: int | None
    max_running_requests: int
    max_queued_requests: int
    chunked_prefill_size: int
    mem_fraction_static: float
    max_total_tokens: int | None
    max_mamba_cache_size: int | None
    mamba_full_memory_ratio: float
    elastic_pools: Literal["auto", "on", "off"]
    mamba_ssm_dtype: Literal["float32", "bfloat16", "float16"]
    kv_cache_dtype: Literal["auto", "int8", "fp8_e4m3"]
    page_size: int
    disable_cuda_graph: bool
    cuda_graph_max_bs: int | None
    disable_radix_cache: bool
    mamba_radix_cache_strategy: Literal["no_buffer", "extra_buffer"]
    mamba_track_interval: int
    mamba_spare_states: int
    cache_eviction: Literal["lru", "flops"]
    enable_hierarchical_cache: bool
    hicache_ratio: float | None
    hicache_size: float
    hicache_storage_backend: Literal["file", "mooncake"]
    hicache_storage_backend_extra_config: str | None
    hicache_storage_key_file: str | Path | None
    hicache_storage_dir: str | Path | None
    hicache_storage_size: float
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"]
    hicache_state_dtype: Literal["float32", "bfloat16", "float16"]
    schedule_policy: Literal["fcfs", "lpm"]
    schedule_max_overtakes: int
    speculative_algorithm: Literal["auto", "none", "mtp", "eagle", "eagle3", "dflash", "draft-model", "ngram", "suffix"]
    speculative_draft_model_path: str | None
    speculative_draft_model_revision: str | None
    speculative_draft_model_quantization: Literal["auto", "none", "int8", "int4", "fp8"]
    speculative_num_steps: int | None
    speculative_eagle_topk: int | None
    speculative_num_draft_tokens: int | None
    speculative_tree: str | Path | None
    speculative_state: Literal["records", "snapshots"]
    speculative_adaptive: Literal["auto", "off"]
    speculative_costs: str | Path | None
    speculative_accept: Literal["auto", "target", "rejection"]
    speculative_ngram_min_match_window_size: int | None
    speculative_ngram_max_match_window_size: int | None
    speculative_ngram_corpus: str | Path | None
    speculative_suffix_max_match: int | None
    speculative_suffix_factor: float | None
    speculative_suffix_min_probability: float | None
    speculative_suffix_shared_mib: int | None
    speculative_suffix_corpus: str | Path | None
