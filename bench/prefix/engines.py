"""The flags of the prefix benchmark, and its engines, with pools as large as a workload needs."""

from __future__ import annotations

import atexit
import random
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from specmamba.bench.prefix.texts import Oracle, TextSource
from specmamba.bench.prefix.workloads import Sizes, Tokens, Workload, make_workload
from specmamba.config import MAX_DRAFT_TOKENS, EngineConfig
from specmamba.errors import ConfigError
from specmamba.flags.model_flags import PREFIX_CACHE_FLAGS, TIER_FLAGS
from specmamba.measure.report import ReportOptions

if TYPE_CHECKING:  # --help must not wait for torch
    from specmamba import LLM

SPARE_TOKENS = 2 * MAX_DRAFT_TOKENS  # KV of a running request besides its text: a draft, and slots that are given ahead
POOLS = ("max_total_tokens", "max_mamba_cache_size")
ORDER_FLAGS = ("schedule_policy", "schedule_max_overtakes")  # they matter only with cached prefixes
FOLDER_PREFIX = "specmamba-bench-"  # of folders for prefixes on disk
SHARING = ("shared", "chat", "branch", "agent", "pressure")
DEFAULT_PARTS = (*SHARING, "ttft", "disk", "writing", "costs")
PARTS = (*DEFAULT_PARTS, "swing", "elastic")


def _names(value: object) -> object:
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value


class PrefixBenchConfig(ReportOptions):
    """What the prefix cache spares, against an oracle and against no cache, and what it costs."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    workloads: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)],
        BeforeValidator(_names),
        Field(description=f"what to run, of {','.join(PARTS)}"),
    ] = DEFAULT_PARTS
    prompts: Annotated[
        Path | None,
        Field(description="take the text from the prompts of this file; none: bundled ones and held-out Python files"),
    ] = None
    concurrency: Annotated[
        int, Field(ge=1, description="requests of a wave, at least, while so many ask; the next comes after it")
    ] = 4
    output_tokens: Annotated[int, Field(ge=1, description="new tokens of every request")] = 16
    turn_tokens: Annotated[int, Field(ge=1, description="tokens of a question or a user's turn, usually")] = 48
    shared_tokens: Annotated[int, Field(ge=1, description="tokens of a system prompt, or of agents' instructions")] = (
        600
    )
    num_users: Annotated[int, Field(ge=1, description="shared: users of the system prompt")] = 24
    num_chats: Annotated[int, Field(ge=1, description="chat: conversations")] = 6
    num_turns: Annotated[int, Field(ge=1, description="chat: turns of each")] = 6
    num_documents: Annotated[int, Field(ge=1, description="branch: documents, and as many trees of thought")] = 2
    document_tokens: Annotated[int, Field(ge=1, description="branch: tokens of a document")] = 1000
    num_questions: Annotated[int, Field(ge=1, description="branch: questions to each document")] = 12
    thought_depth: Annotated[int, Field(ge=1, description="branch: levels of a tree of thought")] = 3
    thought_width: Annotated[int, Field(ge=1, description="branch: continuations of a thought that was kept")] = 4
    thoughts_kept: Annotated[int, Field(ge=1, description="branch: thoughts that are kept of a level")] = 2
    num_agents: Annotated[int, Field(ge=1, description="agent: agents")] = 3
    agent_steps: Annotated[int, Field(ge=1, description="agent: steps of each")] = 6
    tool_tokens: Annotated[int, Field(ge=1, description="agent: tokens of a tool's output, usually")] = 96
    pressure_requests: Annotated[int, Field(ge=1, description="pressure: requests, or a few more")] = 64
    pressure_share: Annotated[
        float, Field(gt=0, le=1, description="pressure: size of both pools, as a share of what would hold everything")
    ] = 0.1
    ttft_tokens: Annotated[int, Field(ge=2, description="ttft, disk: tokens of a prompt")] = 2000
    ttft_shared_tokens: Annotated[int, Field(ge=1, description="ttft: tokens of it that others had before")] = 1900
    rounds: Annotated[
        int, Field(ge=1, description="ttft, disk, writing, costs, elastic: rounds; medians over them")
    ] = 5
    writing_prompt_tokens: Annotated[int, Field(ge=1, description="writing: tokens of each prompt that is written")] = (
        256
    )
    writing_tokens: Annotated[int, Field(ge=1, description="writing: new tokens of each running request")] = 384
    cost_tokens: Annotated[int, Field(ge=1024, description="costs: tokens of the longest prompt in the tree")] = 32768
    cost_requests: Annotated[int, Field(ge=1, le=4096, description="costs: requests that decode together")] = 64

    swing_tokens: Annotated[
        int, Field(ge=256, description="swing, elastic: memory of both pools, as tokens whose KV it would hold")
    ] = 9000
    swing_chats: Annotated[int, Field(ge=1, description="swing: short conversations, of --num-turns turns")] = 24
    swing_documents: Annotated[int, Field(ge=1, description="swing: documents, with --num-questions questions")] = 4
    swing_document_tokens: Annotated[int, Field(ge=1, description="swing: tokens of a document")] = 1200
    swing_ratios: Annotated[
        Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Field(min_length=1)],
        BeforeValidator(_names),
        Field(description="swing: --mamba-full-memory-ratio of fixed pools"),
    ] = (0.1, 0.3, 0.9, 2.7)
    swing_rounds: Annotated[int, Field(ge=1, description="swing: rounds of both halves")] = 1

    @field_validator("workloads")
    @classmethod
    def _are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in PARTS:
                raise ValueError(f"{name!r} is none of {', '.join(PARTS)}")
        return tuple(part for part in PARTS if part in names)

    @model_validator(mode="after")
    def _flags_go_together(self) -> PrefixBenchConfig:
        if self.disable_radix_cache:
            raise ValueError("--disable-radix-cache: the cache is what is measured, and runs without it too; drop it")
        if self.ttft_shared_tokens >= self.ttft_tokens:
            raise ValueError(
                f"--ttft-shared-tokens {self.ttft_shared_tokens}: a prompt of {self.ttft_tokens} tokens needs one of "
                "its own; lower it, or raise --ttft-tokens"
            )
        if self.concurrency > self.max_running_requests:
            raise ValueError(
                f"--concurrency {self.concurrency}: only {self.max_running_requests} requests run together; raise "
                "--max-running-requests"
            )
        if "disk" in self.workloads and self.hicache_ratio == 0 and not self.hicache_size:
            raise ValueError(
                "--hicache-ratio 0: disk measures host memory too; raise it, or leave disk out of --workloads"
            )
        if self.plot is not None and not set(SHARING) & set(self.workloads):
            raise ValueError(f"--plot: the picture is of workloads: choose some of {', '.join(SHARING)}")
        return self

    @model_validator(mode="after")
    def _costs_have_pools_of_their_own(self) -> PrefixBenchConfig:
        if "costs" not in self.workloads:
            return self
        sizes = {"--max-total-tokens": self.max_total_tokens, "--max-mamba-cache-size": self.max_mamba_cache_size}
        given = [flag for flag, size in sizes.items() if size is not None]
        if given:
            raise ValueError(
                f"{', '.join(given)}: costs sizes its pools itself, by --cost-tokens and --cost-requests; drop it, or "
                "leave costs out of --workloads"
            )
        is_limited = "max_running_requests" in self.model_fields_set
        if is_limited and self.cost_requests > self.max_running_requests:
            raise ValueError(
                f"--cost-requests {self.cost_requests}: only {self.max_running_requests} requests run together; lower "
                "it, or raise --max-running-requests"
            )
        return self


@dataclass(frozen=True, slots=True)
class Demand:
    """Upper bounds of what a workload needs."""

    num_requests: int
    largest_wave: int  # requests that come together
    longest: int  # prompt and output
    distinct_tokens: int  # of all texts, common beginnings counted once
    kv_tokens: int  # of a pool that holds everything
    states: int  # of a pool that holds everything


@contextmanager
def own_place(config: PrefixBenchConfig) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A place for prefixes that no other engine finds: on disk, or in the store of the flags under a key of its own.

    Yields:
        A folder with all that is private to the place, removed at the end, in the folder of the flags if there is one;
        and the flags of engines that share the place. What was written to a store stays until the store evicts it.

    Raises:
        ConfigError: the file of the store's key cannot be read.
    """
    parent = config.hicache_storage_dir
    if parent is not None:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=parent) as name:
        folder = Path(name)
        if not is_store(config):
            yield folder, {"hicache_storage_dir": folder}
            return
        assert config.hicache_storage_key_file is not None
        try:
            shared = config.hicache_storage_key_file.expanduser().read_text("utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--hicache-storage-key-file {config.hicache_storage_key_file}: {error}") from None
        key = folder / "key"
        key.write_text(f"{shared.strip()} {secrets.token_hex(16)}", "utf8")
        yield folder, {"hicache_storage_key_file": key}


def is_store(config: PrefixBenchConfig) -> bool:
    """Whether prefixes go to a store, in place of a folder on disk."""
    return config.hicache_storage_backend == "mooncake"


def require_room_for_prompt(config: PrefixBenchConfig, llm: LLM) -> int:
    """Return the tokens of the prompt whose time to first token is measured.

    Raises:
        ConfigError: it does not fit the context.
    """
    length = config.ttft_tokens
    if length >= llm.engine.context_length:
        raise ConfigError(
            f"--ttft-tokens {length}: no output fits behind it in a context of {llm.engine.context_length}; lower it "
            "and --ttft-shared-tokens"
        )
    return length


def start_engine(config: PrefixBenchConfig, **flags: Any) -> LLM:
    """Start an engine with the flags of the command line; ``flags`` replace some of them.

    With prefixes on disk or in a store each engine has a place of its own there, so that none finds what another wrote;
    folders are removed when the process ends.

    Raises:
        ConfigError: the flags do not allow to start.
    """
    from specmamba import LLM

    outlives = config.hicache_storage_dir is not None or is_store(config)
    if outlives and not flags.keys() & {"hicache_storage_dir", "hicache_storage_key_file"}:
        stack = ExitStack()
        _, place = stack.enter_context(own_place(config))
        atexit.register(stack.close)
        flags |= place
    return LLM(**config.model_dump(include=set(EngineConfig.model_fields)) | flags)


@contextmanager
def sharing_memory(config: PrefixBenchConfig, num_tokens: int) -> Iterator[None]:
    """Let engines that start in here divide the memory of KV for so many tokens between their pools.

    Raises:
        ConfigError: no engine starts in it.
    """
    with start_engine(config, max_total_tokens=num_tokens, max_mamba_cache_size=config.max_running_requests) as known:
        plan, shape = known.engine.memory_plan, known.engine.model.cache_shape
        rest = plan.total_bytes - plan.kv_bytes - plan.state_bytes
        workbench = known.workbench
    with workbench.budget(rest + num_tokens * shape.kv_bytes_per_token):
        yield


def start_elastic_engine(config: PrefixBenchConfig, part: str) -> LLM:
    """Start an engine whose pools share the memory of ``sharing_memory``, for a part of the benchmark.

    Raises:
        ConfigError: pools are not elastic here, or not in so little memory.
    """
    llm = start_engine(config, elastic_pools="on")
    if llm.engine.stats().split is None:
        llm.close()
        raise ConfigError(
            f"--swing-tokens {config.swing_tokens}: pools are not elastic here, or not in so little: raise it, or "
            f"leave {part} out of --workloads"
        )
    return llm


def start_cold_engine(config: PrefixBenchConfig) -> LLM:
    """Start an engine without a cache, and without the flags that need one.

    Raises:
        ConfigError: the flags do not allow to start.
    """
    return start_engine(config, disable_radix_cache=True, **_defaults(PREFIX_CACHE_FLAGS), **_defaults(ORDER_FLAGS))


def without_tiers() -> dict[str, Any]:
    """Flags of an engine that keeps prefixes in its pools only."""
    return _defaults(TIER_FLAGS)


def _defaults(names: Iterable[str]) -> dict[str, Any]:
    return {name: EngineConfig.model_fields[name].default for name in names}


def start_cost_engine(config: PrefixBenchConfig, flag: str, **flags: Any) -> LLM:
    """Start an engine for ``costs``, which sizes its pools itself; ``flag`` names the flag that decides their sizes.

    Raises:
        ConfigError: it does not start.
    """
    if config.context_length is not None:
        fewest = config.context_length + SPARE_TOKENS + config.page_size
        flags["max_total_tokens"] = max(flags["max_total_tokens"], fewest)
    try:
        return start_engine(config, **flags)
    except ConfigError as error:
        sizes = " and ".join(f"--{name.replace('_', '-')} {flags[name]}" for name in POOLS)
        value = getattr(config, flag.removeprefix("--").replace("-", "_"))
        raise ConfigError(f"{flag} {value}: costs runs with {sizes}, which does not work; lower it: {error}") from None


def pool_flags(config: PrefixBenchConfig, demands: Iterable[Demand], share: float = 1.0) -> dict[str, int]:
    """Flags of pools for a share of the largest demand, and always for ``concurrency`` requests; given sizes stay."""
    demands = list(demands)
    running = config.concurrency * (max(demand.longest for demand in demands) + SPARE_TOKENS + 2 * config.page_size)
    kv = max(running, round(share * max(demand.kv_tokens for demand in demands)))
    if config.context_length is not None:
        kv = max(kv, config.context_length + SPARE_TOKENS + config.page_size)
    states = max(config.concurrency + 1, config.max_running_requests, round(share * max(d.states for d in demands)))
    sizes = dict(zip(POOLS, (kv, states), strict=True))
    return {name: size for name, size in sizes.items() if getattr(config, name) is None}


def demand_of(config: PrefixBenchConfig, name: str, source: TextSource, context_length: int) -> Demand:
    """The demand of a workload, from a rehearsal.

    Raises:
        ConfigError: a request does not fit the model's context, or a wave of them the running requests.
    """
    workload, oracle = make_workload(name, source, sizes_of(config), config.seed), Oracle()
    count = longest = largest = 0
    for wave in rehearse(workload, config.concurrency, config.output_tokens, wave_draws(config, name)):
        for text in wave:
            oracle.add(text)
        count, largest = count + len(wave), max(largest, len(wave))
        longest = max(longest, *map(len, wave))
    if longest > context_length:
        raise ConfigError(
            f"a request of the workload {name} has {longest} tokens with its output, which do not fit the context of "
            f"{context_length}: lower the flags that the help names for it, --shared-tokens or --turn-tokens"
        )
    if largest > config.max_running_requests:
        raise ConfigError(
            f"--max-running-requests {config.max_running_requests}: the workload {name} has {largest} requests that "
            "come together; raise it, or lower --concurrency, --thought-width or --thoughts-kept"
        )
    # states: where requests part, at the ends of prompts, of requests and of chunks, and at tracked intervals
    tracked = config.output_tokens // config.mamba_track_interval
    states = count * (4 + tracked) + oracle.num_tokens // config.chunked_prefill_size
    kv = oracle.num_tokens + 2 * config.page_size * count + (config.concurrency + 4) * (longest + SPARE_TOKENS)
    return Demand(count, largest, longest, oracle.num_tokens, kv, states + config.max_running_requests)


def rehearse(workload: Workload, size: int, output_tokens: int, draw: random.Random) -> Iterator[list[Tokens]]:
    """Prompts with made-up outputs of a whole workload, by wave.

    No two outputs begin alike, so that the workload becomes as large as it can.
    """
    waves = workload.waves(size, draw)
    wave, number = next(waves), 0
    while True:
        outputs = [(-number - i,) * output_tokens for i in range(1, len(wave) + 1)]  # no token of any model
        number += len(wave)
        yield [ask.prompt + output for ask, output in zip(wave, outputs, strict=True)]
        try:
            wave = waves.send(outputs)
        except StopIteration:
            return


def wave_draws(config: PrefixBenchConfig, name: str) -> random.Random:
    """Random numbers that choose the sessions of each wave: the same in every run of a workload."""
    return random.Random(f"{config.seed}/{name}/waves")


def sizes_of(config: PrefixBenchConfig) -> Sizes:
    """The sizes that the flags ask for."""
    return Sizes(**config.model_dump(include=set(Sizes.__dataclass_fields__)))
