"""The flags of the model, of memory, of the prefix cache and of the order of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from specmamba.flags.other_names import own_value
from specmamba.flags.settings import CommandLine

# Defaults on a GPU, which has more memory and faster products than a CPU: see ``ModelFlags.on_device``.
GPU_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "speculative_adaptive": "off",  # sizes of drafts are fixed: not measured there yet
        "max_running_requests": 64,
        "chunked_prefill_size": 8192,
        "mamba_spare_states": 0,  # each splits a chunk: not measured there yet
        "mem_fraction_static": 0.85,
    }
)

# Flags that mean nothing without prefixes in a store, of host memory, and those that need a prefix cache.
STORE_FLAGS = ("hicache_storage_key_file", "hicache_storage_backend_extra_config")
HOST_FLAGS = ("enable_hierarchical_cache", "hicache_ratio", "hicache_size")
TIER_FLAGS = (
    *HOST_FLAGS,
    "hicache_storage_dir",
    "hicache_storage_backend",
    "hicache_state_dtype",
    "hicache_storage_size",
    "hicache_write_policy",
    *STORE_FLAGS,
)
PREFIX_CACHE_FLAGS = (
    "mamba_radix_cache_strategy",
    "mamba_track_interval",
    "mamba_spare_states",
    "cache_eviction",
    *TIER_FLAGS,
)

_STORED_FORMATS = ("awq", "gptq", "compressed-tensors", "gguf", "modelopt", "mxfp4", "nvfp4", "bitsandbytes")


def _number(value: Any) -> Any:
    """Read a number of the command line or the environment, which choices of numbers do not do themselves."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _form_name(value: object) -> object:
    """Read a form of weights; formats of checkpoints, which other runtimes ask to be told, are none."""
    if isinstance(value, str) and value.lower().startswith(_STORED_FORMATS):
        raise ValueError("what a checkpoint stores is read from its files: leave this out")
    return "auto" if value is None or value == "None" else value  # the default of other runtimes, written out


class ModelFlags(CommandLine):
    """What every engine has, with drafts and without: model, memory, prefix cache, scheduling."""

    reads_environment = True
    needs_text: ClassVar[bool] = False  # the command reads or writes texts

    model: Annotated[
        str | None,
        Field(min_length=1, description="folder or hub id of a checkpoint, or a GGUF file; none: the bundled demo"),
    ] = None
    revision: Annotated[str | None, Field(description="branch, tag or commit, when --model is a hub id")] = None
    skip_tokenizer_init: Annotated[
        bool, Field(description="read no tokenizer: prompts and answers are token ids, and texts are refused")
    ] = False
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        BeforeValidator(own_value("dtype")),
        Field(description="type of weights and activations; auto: the checkpoint's own"),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4", "fp8", "fp8-dynamic"],
        BeforeValidator(_form_name),
        Field(
            description="auto: matrices stay in the codes that the checkpoint stores, where products have them; none: "
            "dequantized to --dtype; others: rounded when they are loaded, to 8-bit integers with a scale per output, "
            "4-bit ones with a scale per group of inputs, or FP8; fp8-dynamic (GPU): inputs to FP8 too, at every step"
        ),
    ] = "auto"
    quantization_group_size: Annotated[
        Literal[32, 64, 128],
        BeforeValidator(_number),
        Field(description="inputs that share a scale with --quantization int4"),
    ] = 32
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: cuda where there is one")] = "auto"
    num_threads: Annotated[
        int | None,
        Field(ge=1, le=1024, description="CPU threads; none: all cores, or one where a second gains nothing"),
    ] = None
    tp_size: Annotated[
        int,
        Field(
            ge=1, le=64, description="processes that share the model, each with a part of every layer (docs/scaling.md)"
        ),
    ] = 1
    ep_size: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="--tp-size: each of these processes has some of the experts; 1: a part of each expert",
        ),
    ] = 1
    deterministic: Annotated[
        bool,
        Field(
            description="the same bits for a request whatever is drafted, cached, chunked or run beside it "
            "(docs/exactness.md); CPU with native code"
        ),
    ] = False
    seed: Annotated[int, Field(ge=0, lt=2**63, description="seeds the requests that bring no seed of their own")] = 0

    context_length: Annotated[
        int | None, Field(ge=2, description="prompt and output tokens of one request at the most; none: the model's")
    ] = None
    max_running_requests: Annotated[
        int, Field(ge=1, le=4096, description="requests in a batch at the most (GPU: 64)")
    ] = 16
    max_queued_requests: Annotated[int, Field(ge=1, description="requests waiting at the most; more get a 429")] = 256
    chunked_prefill_size: Annotated[
        int, Field(ge=1, description="prompt tokens run in one step at the most (GPU: 8192)")
    ] = 512

    mem_fraction_static: Annotated[
        float, Field(gt=0, lt=1, description="share of the free memory that weights and pools may take (GPU: 0.85)")
    ] = 0.5
    max_total_tokens: Annotated[int | None, Field(ge=1, description="size of the KV pool in tokens; none: derived")] = (
        None
    )
    max_mamba_cache_size: Annotated[
        int | None, Field(ge=1, description="recurrent states in the state pool, running and cached; none: derived")
    ] = None
    mamba_full_memory_ratio: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="bytes of recurrent states for every byte of KV; with elastic pools: at the start",
        ),
    ] = 0.9
    elastic_pools: Annotated[
        Literal["auto", "on", "off"],
        Field(
            description="KV and recurrent states take memory from each other as requests need it; auto: under Linux on "
            "a CPU, where neither pool has a given size; on: likewise on an NVIDIA GPU"
        ),
    ] = "auto"
    mamba_ssm_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Field(description="type of recurrent states in the state pool; what is computed from them stays float32"),
    ] = "float32"
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8_e4m3"],
        BeforeValidator(own_value("kv_cache_dtype")),
        Field(description="type of stored keys and values, with a scale per token and head; auto: the model's dtype"),
    ] = "auto"
    page_size: Annotated[int, Field(ge=1, le=1024, description="tokens in a page of the KV pool")] = 1

    disable_cuda_graph: Annotated[bool, Field(description="run every step operator by operator, captured by none")] = (
        False
    )
    cuda_graph_max_bs: Annotated[
        int | None,
        Field(
            ge=1,
            le=4096,
            description="largest batch whose steps are padded to a bucket and captured; none: 64, or all that can run; "
            "a CPU without native kernels captures nothing, and runs what is given on the same buffers and padding",
        ),
    ] = None

    disable_radix_cache: Annotated[bool, Field(description="share no prefixes between requests")] = False
    mamba_radix_cache_strategy: Annotated[
        Literal["no_buffer", "extra_buffer"],
        Field(description="leave states at the ends of chunks and requests, or also while tokens are generated"),
    ] = "no_buffer"
    mamba_track_interval: Annotated[
        int, Field(ge=1, description="extra_buffer: generated tokens between two states that are left")
    ] = 256
    mamba_spare_states: Annotated[
        int, Field(ge=0, le=16, description="states in the last part of a prompt, for texts that part there (GPU: 0)")
    ] = 3
    cache_eviction: Annotated[
        Literal["lru", "flops"],
        Field(
            description="what leaves the prefix cache first: states that texts have passed, then what is oldest; or "
            "what is old and cheap to compute again"
        ),
    ] = "lru"
    enable_hierarchical_cache: Annotated[
        bool, Field(description="keep prefixes that the pools have no room for; the flags that say where imply this")
    ] = False
    hicache_ratio: Annotated[
        float | None,
        Field(
            ge=0,
            le=1024,
            description="host memory for prefixes, by the bytes of the pools; none: 0, or 2 on a GPU with "
            "--enable-hierarchical-cache",
        ),
    ] = None
    hicache_size: Annotated[
        float, Field(ge=0, le=1 << 20, description="GiB of host memory for prefixes; 0: by --hicache-ratio")
    ] = 0.0
    hicache_storage_backend: Annotated[
        Literal["file", "mooncake"],
        Field(
            description="where prefixes outlive the process: in the folder of --hicache-storage-dir, or in a Mooncake "
            "Store that several machines share"
        ),
    ] = "file"
    hicache_storage_backend_extra_config: Annotated[
        str | None, Field(description="mooncake: a JSON object that says where the store is: master_server_address ...")
    ] = None
    hicache_storage_key_file: Annotated[
        Path | None, Field(description="mooncake: a file that holds the key of all servers that share prefixes")
    ] = None
    hicache_storage_dir: Annotated[
        Path | None, Field(description="a folder for prefixes that memory has no room for and that outlive the process")
    ] = None
    hicache_storage_size: Annotated[
        float, Field(gt=0, le=1 << 20, description="GiB that the files of --hicache-storage-dir take at the most")
    ] = 16.0
    hicache_write_policy: Annotated[
        Literal["write_through", "write_through_selective", "write_back"],
        Field(
            description="when a prefix is written to disk or the store: as soon as it is cached, when a request hits "
            "it, or when it leaves the memory and at the end"
        ),
    ] = "write_through"
    hicache_state_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Field(description="type of recurrent states in these places; those in a state pool of 16 bits stay"),
    ] = "float32"
    schedule_policy: Annotated[
        Literal["fcfs", "lpm"],
        Field(description="who runs next: first come, first served, or the longest cached prefix first"),
    ] = "fcfs"
    schedule_max_overtakes: Annotated[
        int, Field(ge=0, description="lpm: a request that so many younger ones have overtaken is next")
    ] = 32

    @model_validator(mode="after")
    def _texts_need_a_tokenizer(self) -> Self:
        if self.needs_text and self.skip_tokenizer_init:
            raise ValueError("--skip-tokenizer-init: this command reads and writes texts: drop it")
        return self

    @model_validator(mode="after")
    def _cache_and_graphs_fit(self) -> Self:
        if (problem := _prefix_cache_problem(self) or _graph_problem(self) or _rank_problem(self)) is not None:
            raise ValueError(problem)
        return self

    def on_device(self, device_type: str) -> Self:
        """Return the flags for a device: on a GPU, those that were not given have the defaults of a GPU.

        Several ranks capture no steps there. A second call changes nothing.
        """
        defaults: dict[str, Any] = {**GPU_DEFAULTS} if device_type == "cuda" else {}
        if self.tp_size > 1 and device_type == "cuda":
            defaults["disable_cuda_graph"] = True
        assumed = defaults.keys() & type(self).model_fields.keys() - self.model_fields_set
        return self.model_copy(update={name: defaults[name] for name in assumed}) if assumed else self


def _prefix_cache_problem(config: ModelFlags) -> str | None:
    """Return what is wrong with the prefix cache flags, as a sentence that says what to change; None: nothing."""
    fields = type(config).model_fields

    def is_given(*names: str) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(config, name) != fields[name].default]

    # without a cache there are no spare states, so 0 of them, the default of a GPU, is no contradiction
    needing = [name for name in PREFIX_CACHE_FLAGS if name != "mamba_spare_states" or config.mamba_spare_states]
    if config.disable_radix_cache and (given := is_given(*needing)):
        return f"{', '.join(given)}: this needs the prefix cache: drop it, or --disable-radix-cache"
    if config.disable_radix_cache and config.schedule_policy == "lpm":
        return "--schedule-policy lpm needs the prefix cache: choose fcfs, or drop --disable-radix-cache"
    if (problem := _storage_problem(config, is_given)) is not None:
        return problem
    if (stored := config.hicache_state_dtype) != "float32":
        if not _outlives(config) and not any(getattr(config, name) for name in HOST_FLAGS):
            return "--hicache-state-dtype: this needs a place below the pools: --hicache-storage-dir or --hicache-size"
        if config.mamba_ssm_dtype not in ("float32", stored):
            return f"--hicache-state-dtype {stored}: the state pool has {config.mamba_ssm_dtype}: drop one of them"
    if config.hicache_size and config.hicache_ratio:
        return "--hicache-ratio, --hicache-size: both are the size of host memory for prefixes: drop one of them"
    if config.mamba_radix_cache_strategy == "no_buffer" and is_given("mamba_track_interval"):
        return "--mamba-track-interval needs --mamba-radix-cache-strategy extra_buffer"
    if config.schedule_policy == "fcfs" and is_given("schedule_max_overtakes"):
        return "--schedule-max-overtakes needs --schedule-policy lpm"
    return None


def _outlives(config: ModelFlags) -> bool:
    """Whether prefixes have a place that outlives the process."""
    return config.hicache_storage_dir is not None or config.hicache_storage_backend == "mooncake"


def _storage_problem(config: ModelFlags, is_given: Callable[..., list[str]]) -> str | None:
    """Return what is wrong with the flags of that place, likewise; ``is_given`` returns the flags of names."""
    store = "--hicache-storage-backend mooncake"
    if config.hicache_storage_backend == "mooncake":
        if given := is_given("hicache_storage_dir", "hicache_storage_size"):
            return f"{', '.join(given)}: this is for prefixes on disk: drop it, or {store}"
        if config.hicache_storage_key_file is None:
            return f"{store}: the servers that share prefixes need one key, by --hicache-storage-key-file"
    elif given := is_given(*STORE_FLAGS):
        return f"{', '.join(given)}: this needs {store}"
    if config.hicache_storage_dir is None and (given := is_given("hicache_storage_size")):
        return f"{', '.join(given)}: this needs --hicache-storage-dir, a folder for prefixes on disk"
    if not _outlives(config) and (given := is_given("hicache_write_policy")):
        return f"{', '.join(given)}: this needs --hicache-storage-dir, a folder for prefixes on disk, or {store}"
    return None


def _rank_problem(config: ModelFlags) -> str | None:
    """Return what is wrong with the flags of several ranks, likewise."""
    if config.ep_size not in (1, config.tp_size):
        return (
            f"--ep-size {config.ep_size}: experts are divided among all ranks or each expert is: choose 1, or "
            f"--tp-size {config.ep_size}"
        )
    if config.tp_size == 1:
        return None
    ranks, fields = f"--tp-size {config.tp_size}", type(config).model_fields
    of_tiers = [name for name in fields if name.startswith(("hicache_", "enable_hierarchical_cache"))]
    if given := [f"--{name.replace('_', '-')}" for name in of_tiers if getattr(config, name) != fields[name].default]:
        return f"{', '.join(given)}: prefixes below the pools need one process: drop it, or {ranks}"
    if config.cuda_graph_max_bs is not None and config.device == "cuda":
        return f"--cuda-graph-max-bs: on GPUs steps of several ranks are not captured: drop it, or {ranks}"
    is_open = "speculative_adaptive" not in config.model_fields_set
    if config.device == "cuda" and not is_open and getattr(config, "speculative_adaptive", "off") == "auto":
        return f"--speculative-adaptive auto: on GPUs drafts of several ranks have fixed sizes: drop it, or {ranks}"
    return None


def _graph_problem(config: ModelFlags) -> str | None:
    """Return what is wrong with the flags of captured steps, likewise."""
    largest = config.cuda_graph_max_bs
    if largest is not None and config.disable_cuda_graph:
        return "--cuda-graph-max-bs: nothing is captured with --disable-cuda-graph: drop one of them"
    most = config.on_device(config.device).max_running_requests
    if largest is not None and largest > most:
        return (
            f"--cuda-graph-max-bs {largest}: only {most} requests run together; lower it, or "
            "raise --max-running-requests"
        )
    return None
