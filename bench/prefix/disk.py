"""Time to first token of a prompt in the pools, in host memory, on disk, and nowhere; and what writing it costs.

A round takes a new text. The engine with the disk computes it, and writes meanwhile; then it is asked for it four
times: from the pools, from host memory (all states evicted), from disk (all in memory flushed), and from disk with the
files out of the system's page cache (by ``posix_fadvise``, a request that the system usually follows). The engine
without a cache answers the same prompt before and after, and each figure is a ratio to the mean of these two.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmamba.bench.prefix.engines import (
    FOLDER_PREFIX,
    Demand,
    PrefixBenchConfig,
    parent_of_folders,
    pool_flags,
    require_room_for_prompt,
    start_engine,
)
from specmamba.bench.prefix.run import Answer, run_wave, warm_up
from specmamba.bench.prefix.texts import TextSource
from specmamba.bench.prefix.workloads import Ask

if TYPE_CHECKING:
    from specmamba import LLM

KINDS = ("writing", "memory", "host", "disk", "disk_dropped")
HOST_RATIO = 2.0  # of host memory to the pools, unless the flags say something else


def measure_disk(config: PrefixBenchConfig, cold: LLM, source: TextSource) -> dict[str, Any]:
    """Measure; ratios are medians over rounds.

    Raises:
        ConfigError: the prompt does not fit the context.
    """
    length = require_room_for_prompt(config, cold)
    demand = Demand(1, 1, length + 1, length, 2 * length, 8 + -(-length // config.chunked_prefill_size))
    with folder_for(config) as folder:
        flags: dict[str, Any] = {"hicache_storage_dir": folder, "hicache_write_policy": "write_through"}
        flags |= pool_flags(config, [demand]) | host_flags(config)
        with start_engine(config, **flags) as warm:
            for llm in (cold, warm):
                warm_up(llm, source, config)
            rounds = [_round(config, cold, warm, folder, source, number) for number in range(config.rounds)]
            stats = warm.engine.stats().disk
    assert stats is not None
    figures: dict[str, Any] = {"prompt_tokens": length, "rounds": config.rounds}
    for kind in KINDS:
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


@contextmanager
def folder_for(config: PrefixBenchConfig) -> Iterator[Path]:
    """A folder of its own on the disk that is measured: in the one of the flags, or where temporary files are."""
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=parent_of_folders(config)) as name:
        yield Path(name)


def _round(
    config: PrefixBenchConfig, cold: LLM, warm: LLM, folder: Path, source: TextSource, number: int
) -> dict[str, Any]:
    draw = random.Random(f"{config.seed}/disk/{number}")
    ask = Ask("user", source.cut(config.ttft_tokens, draw))
    before = _answer(cold, ask)
    answers = {"writing": _answer(warm, ask)}
    drain(warm)
    answers["memory"] = _answer(warm, ask)
    began = time.perf_counter()
    cache = warm.engine.cache_manager.cache
    cache.evict_states(warm.engine.pools.states.num_slots)
    evict_s = time.perf_counter() - began
    answers["host"] = _answer(warm, ask)
    for kind in ("disk", "disk_dropped"):
        drain(warm)
        warm.engine.flush_cache()
        if kind == "disk_dropped":
            _drop_page_cache(folder)
        answers[kind] = _answer(warm, ask)
    seconds = (before.ttft_s + _answer(cold, ask).ttft_s) / 2
    return {
        "ratios": {kind: answer.ttft_s / seconds for kind, answer in answers.items()},
        "evict_ratio": evict_s / seconds,
        "disk_s": answers["disk"].ttft_s + answers["disk_dropped"].ttft_s,
        "cached": min(answers[kind].num_cached_tokens for kind in KINDS[2:]),
        "different_texts": sum(answer.output != before.output for answer in answers.values()),
    }


def _answer(llm: LLM, ask: Ask) -> Answer:
    return run_wave(llm, [ask], 1)[0]


def drain(llm: LLM) -> None:
    """Wait until all that is to be written is written; without tiers there is nothing."""
    if (tiers := llm.engine.cache_manager.tiers) is not None:
        tiers.drain()


def _drop_page_cache(folder: Path) -> None:
    for file in folder.glob("*.entry"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
