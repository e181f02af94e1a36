"""The engines of the prefix benchmark: with a cache and without, their pools as large as a workload asks for."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specmamba import LLM
from specmamba.bench.prefix.oracle import Oracle
from specmamba.bench.prefix.texts import TextSource
from specmamba.bench.prefix.workloads import Sizes, Tokens, Workload, make_workload
from specmamba.config import MAX_DRAFT_TOKENS, EngineConfig
from specmamba.errors import ConfigError

if TYPE_CHECKING:
    from specmamba.bench.prefix.__main__ import PrefixBenchConfig

SPARE_TOKENS = 2 * MAX_DRAFT_TOKENS  # KV of a running request besides its text: a draft, and what it gets ahead
POOLS = ("max_total_tokens", "max_mamba_cache_size")
CACHE_FLAGS = ("mamba_radix_cache_strategy", "mamba_track_interval", "cache_eviction")
ORDER_FLAGS = ("schedule_policy", "schedule_max_overtakes")  # by cached prefixes, if at all


@dataclass(frozen=True, slots=True)
class Demand:
    """What a workload can take at the most."""

    num_requests: int
    largest_wave: int  # requests that come together
    longest: int  # prompt and output
    distinct_tokens: int  # of all texts, common beginnings counted once, if no two outputs begin alike
    kv_tokens: int  # that hold everything
    states: int  # likewise


def start_engine(config: PrefixBenchConfig, **flags: Any) -> LLM:
    """An engine with the flags of the command line, and others in their place.

    Raises:
        ConfigError: the flags do not allow to start.
    """
    return LLM(**config.model_dump(include=set(EngineConfig.model_fields)) | flags)


def start_cold_engine(config: PrefixBenchConfig) -> LLM:
    """An engine without a cache, and without the flags that need one.

    Raises:
        ConfigError: the flags do not allow to start.
    """
    defaults = {name: EngineConfig.model_fields[name].default for name in (*CACHE_FLAGS, *ORDER_FLAGS)}
    return start_engine(config, disable_radix_cache=True, **defaults)


def start_cost_engine(config: PrefixBenchConfig, flag: str, **flags: Any) -> LLM:
    """An engine for ``costs``, which sizes its pools itself; ``flag`` says how much they are to hold.

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
    """Sizes of pools that hold a share of the largest demand, and always ``concurrency`` requests; given sizes stay."""
    demands = list(demands)
    running = config.concurrency * (max(demand.longest for demand in demands) + SPARE_TOKENS + 2 * config.page_size)
    kv = max(running, round(share * max(demand.kv_tokens for demand in demands)))
    if config.context_length is not None:
        kv = max(kv, config.context_length + SPARE_TOKENS + config.page_size)
    states = max(config.concurrency + 1, config.max_running_requests, round(share * max(d.states for d in demands)))
    sizes = dict(zip(POOLS, (kv, states), strict=True))
    return {name: size for name, size in sizes.items() if getattr(config, name) is None}


def demand_of(config: PrefixBenchConfig, name: str, source: TextSource, context_length: int) -> Demand:
    """Rehearse a workload.

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
    # a request leaves a state where it parts from others, at its prompt's end, at its own, at chunk ends and intervals
    tracked = config.output_tokens // config.mamba_track_interval
    states = count * (4 + tracked) + oracle.num_tokens // config.chunked_prefill_size
    kv = oracle.num_tokens + 2 * config.page_size * count + (config.concurrency + 4) * (longest + SPARE_TOKENS)
    return Demand(count, largest, longest, oracle.num_tokens, kv, states + config.max_running_requests)


def rehearse(workload: Workload, size: int, output_tokens: int, draw: random.Random) -> Iterator[list[Tokens]]:
    """Prompts with made-up outputs of a whole workload, by wave, no two outputs alike: as large as it can become."""
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
    """Draws whose turn it is; always the same ones for a workload."""
    return random.Random(f"{config.seed}/{name}/waves")


def sizes_of(config: PrefixBenchConfig) -> Sizes:
    """The sizes that the flags ask for."""
    return Sizes(**config.model_dump(include=set(Sizes.__dataclass_fields__)))
