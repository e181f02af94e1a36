"""Time to first token of a prompt in the pools, in host memory, on disk, and nowhere; and what writing it costs.

A round takes a new text. The engine with the disk computes it, and writes meanwhile; then it is asked for it four
times: from the pools, from host memory (all states evicted), from disk (all in memory flushed), and from disk with the
files out of the system's page cache (by ``posix_fadvise``, a request that the system usually follows). The engine
without a cache answers the same prompt before and after, and each figure is a ratio to the mean of these two. After the
rounds the engine ends, and a new one in the same place is asked for the prompts of all rounds (``restart``; on disk,
with the files out of the page cache).

With ``--hicache-storage-backend mooncake`` all of this is done with the store of the flags in place of the disk; there
is one figure then, ``store``, where the disk has two.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmamba.bench.prefix.engines import (
    Demand,
    PrefixBenchConfig,
    is_store,
    own_place,
    pool_flags,
    require_room_for_prompt,
    start_engine,
)
from specmamba.bench.prefix.run import Answer, run_wave, warm_up
from specmamba.bench.prefix.texts import TextSource
from specmamba.bench.prefix.workloads import Ask
from specmamba.measure.report import progress_bar

if TYPE_CHECKING:
    from specmamba import LLM

HOST_RATIO = 2.0  # of host memory to the pools, unless the flags say something else


def measure_disk(config: PrefixBenchConfig, cold: LLM, source: TextSource) -> dict[str, Any]:
    """Measure; ratios are medians over rounds.

    Raises:
        ConfigError: the prompt does not fit the context.
    """
    length = require_room_for_prompt(config, cold)
    demand = Demand(1, 1, length + 1, length, 2 * length, 8 + -(-length // config.chunked_prefill_size))
    with own_place(config) as (folder, place):
        flags: dict[str, Any] = place | {"hicache_write_policy": "write_through"}
        flags |= pool_flags(config, [demand]) | host_flags(config)
        with progress_bar("disk", 2 * config.rounds) as advance:
            with start_engine(config, **flags) as warm:
                for llm in (cold, warm):
                    warm_up(llm, source, config)
                rounds = []
                for number in range(config.rounds):
                    rounds.append(_round(config, cold, warm, folder, source, number))
                    advance()
                stats = stats_of_place(warm)
            with start_engine(config, **flags) as again:
                warm_up(again, source, config)
                for number, one in enumerate(rounds):
                    _add_restart(config, cold, again, folder, _ask(config, source, number), one)
                    advance()
    figures: dict[str, Any] = {"place": place_name(config), "prompt_tokens": length, "rounds": config.rounds}
    for kind in rounds[0]["ratios"]:
        ratios = [one["ratios"][kind] for one in rounds]
        figures[f"{kind}_ratio"] = round(statistics.median(ratios), 4)
        figures[f"{kind}_ratio_range"] = [round(min(ratios), 4), round(max(ratios), 4)]
    return {
        **figures,
        "cached_tokens": min(one["cached"] for one in rounds),
        "evict_ratio": round(statistics.median(one["evict_ratio"] for one in rounds), 4),
        "written_bytes_per_token": round(stats.written_bytes / (length * config.rounds)),
        "load_share": round(stats.load_seconds / sum(one["disk_s"] for one in rounds), 4),
        "lost_writes": sum(stats.lost_writes.values()),
        "different_texts": sum(one["different_texts"] for one in rounds),
    }


def host_flags(config: PrefixBenchConfig) -> dict[str, float]:
    """Flags of host memory, which is measured too: none where the command line gives its size."""
    return {} if config.hicache_size or config.hicache_ratio else {"hicache_ratio": HOST_RATIO}


def place_name(config: PrefixBenchConfig) -> str:
    """What is below host memory: "disk" or "store"."""
    return "store" if is_store(config) else "disk"


def stats_of_place(llm: LLM) -> Any:
    """The figures of the disk, or of the store, whichever an engine has, as ``EngineStats`` has them."""
    stats = llm.engine.stats()
    found = stats.disk or stats.store
    assert found is not None
    return found


def _ask(config: PrefixBenchConfig, source: TextSource, number: int) -> Ask:
    return Ask("user", source.cut(config.ttft_tokens, random.Random(f"{config.seed}/disk/{number}")))


def _round(
    config: PrefixBenchConfig, cold: LLM, warm: LLM, folder: Path, source: TextSource, number: int
) -> dict[str, Any]:
    ask = _ask(config, source, number)
    before = _answer(cold, ask)
    answers = {"writing": _answer(warm, ask)}
    drain(warm)
    answers["memory"] = _answer(warm, ask)
    began = time.perf_counter()
    cache = warm.engine.cache_manager.cache
    cache.evict_states(warm.engine.pools.states.num_slots)
    evict_s = time.perf_counter() - began
    answers["host"] = _answer(warm, ask)
    below = ("store",) if is_store(config) else ("disk", "disk_dropped")
    for kind in below:
        drain(warm)
        warm.engine.flush_cache()
        if kind == "disk_dropped":
            _drop_page_cache(folder)
        answers[kind] = _answer(warm, ask)
    drain(warm)  # what the last answer has left is not written while others are measured
    seconds = (before.ttft_s + _answer(cold, ask).ttft_s) / 2
    return {
        "ratios": {kind: answer.ttft_s / seconds for kind, answer in answers.items()},
        "evict_ratio": evict_s / seconds,
        "disk_s": sum(answers[kind].ttft_s for kind in below),
        "cached": min(answers[kind].num_cached_tokens for kind in ("host", *below)),
        "different_texts": sum(answer.output != before.output for answer in answers.values()),
    }


def _add_restart(config: PrefixBenchConfig, cold: LLM, again: LLM, folder: Path, ask: Ask, one: dict[str, Any]) -> None:
    """Add to a round what an engine that was started later takes for its prompt."""
    if not is_store(config):
        _drop_page_cache(folder)
    before = _answer(cold, ask)
    answer = _answer(again, ask)
    seconds = (before.ttft_s + _answer(cold, ask).ttft_s) / 2
    one["ratios"]["restart"] = answer.ttft_s / seconds
    one["cached"] = min(one["cached"], answer.num_cached_tokens)
    one["different_texts"] += answer.output != before.output
    drain(again)


def _answer(llm: LLM, ask: Ask) -> Answer:
    return run_wave(llm, [ask], 1)[0]


def drain(llm: LLM) -> None:
    """Wait until all that is to be written is written; without tiers there is nothing."""
    if (tiers := llm.engine.cache_manager.tiers) is not None:
        tiers.drain()


def _drop_page_cache(folder: Path) -> None:
    for file in folder.glob("*.entry"):
        with suppress(FileNotFoundError):  # it was removed for another one
            _drop_file(file)


def _drop_file(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
