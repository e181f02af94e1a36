"""What the prefix cache costs: its tree on long prompts, all its work on a real one, and bookkeeping while decoding.

- **Tree**: prompts of 1k, 2k, 4k ... tokens, and of ``--cost-tokens``, go into an empty tree in chunks: a match that
  finds nothing, then at every chunk end an insertion with a state, behind the node of the one before, which stays
  locked; then a match of the whole prompt. No model runs, so a prompt may be longer than its context, and only the
  tree's own work is measured. ``share_of_prefill`` sets this against prefill at the time per token of the real prompt
  below, whatever the length: attention makes the tokens of a longer prompt dearer and those of a shorter one cheaper,
  so the share is smaller than said for the one, and larger for the other. ``growth`` is the slope of log time over log
  tokens, and ``last_doubling`` the time of the longest prompt over that of half of it, null where there is none of
  half of it: 1 and 2 are linear.
- **Engine**: the longest prompt that fits the context (4,096 tokens at the most) runs through an engine whose cache is
  empty, and ``share`` is the part of its prefill that all of the cache's work takes: giving it memory (``acquire``,
  the match in it), and at every chunk end the copy of the state and of what the draft head needs, the insertion, and
  what becomes of the tokens' places (``leave_chunk``). The rest is the prefill that the tree is set against.
- **Decode**: decoding.py.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmamba import LLM
from specmamba.bench.prefix.decoding import decode_costs, stopwatch
from specmamba.bench.prefix.engines import PrefixBenchConfig, start_cost_engine, start_engine
from specmamba.bench.prefix.run import run_wave, warm_up
from specmamba.bench.prefix.texts import TextSource
from specmamba.bench.prefix.workloads import Ask
from specmamba.errors import ConfigError

Tokens = NDArray[np.int64]
SHORTEST, PREFILL_TOKENS = 1024, 4096
OWNER = "prefix benchmark"


def measure_costs(config: PrefixBenchConfig, source: TextSource) -> dict[str, Any]:
    """Measure tree, engine and decoding.

    Raises:
        ConfigError: the pools do not fit the memory, or the requests not together.
        RequestError: the model's numbers are not finite.
    """
    engine, seconds_per_token = _engine_costs(config, source)
    tree = _tree_costs(config, source, seconds_per_token)
    return {"tree": tree, "engine": engine, "decode": decode_costs(config, source)}


def tree_lengths(longest: int) -> list[int]:
    """Lengths of prompts: doubled from ``SHORTEST`` up to ``longest``, which is always one of them."""
    lengths = [SHORTEST]
    while 2 * lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return [*lengths, longest] if longest > SHORTEST else lengths


def _tree_costs(config: PrefixBenchConfig, source: TextSource, seconds_per_token: float) -> dict[str, Any]:
    lengths, chunk = tree_lengths(config.cost_tokens), config.chunked_prefill_size
    work: dict[int, list[tuple[float, float]]] = {length: [] for length in lengths}
    flags = {
        "max_total_tokens": lengths[-1] + 2 * config.page_size,
        "max_mamba_cache_size": -(-lengths[-1] // chunk) + 1,
    }
    with start_cost_engine(config, "--cost-tokens", **flags) as llm:
        for number in range(-1, config.rounds):  # the first one warms up
            for length in lengths:
                tokens = np.array(source.cut(length, random.Random(f"{config.seed}/costs/{number}")), dtype=np.int64)
                times = tree_work(llm, tokens, chunk)
                work[length] += [times] if number >= 0 else []
    inserts, matches = ({n: statistics.median(t[i] for t in times) for n, times in work.items()} for i in range(2))
    totals = {length: inserts[length] + matches[length] for length in lengths}
    has_half = lengths[-1] // 2 in lengths and lengths[-1] % 2 == 0
    return {
        "chunk_tokens": chunk,
        "tokens": lengths,
        "insert_ms": [round(seconds * 1e3, 4) for seconds in inserts.values()],
        "match_ms": [round(seconds * 1e3, 4) for seconds in matches.values()],
        "growth": _slope(totals),
        "last_doubling": round(totals[lengths[-1]] / totals[lengths[-1] // 2], 3) if has_half else None,
        "share_of_prefill": [round(totals[n] / (n * seconds_per_token), 6) for n in lengths],
    }


def tree_work(llm: LLM, tokens: Tokens, chunk_size: int) -> tuple[float, float]:
    """Time the tree: seconds to store a prompt chunk by chunk, and to match it afterwards.

    Args:
        llm: idle, with pools that hold the prompt and a state per chunk; its cache is emptied before and afterwards.
        tokens: [n] the prompt.
        chunk_size: tokens of a chunk.

    Raises:
        ConfigError: the KV pool does not hold the prompt.
    """
    llm.flush_cache()
    cache, kv = llm.engine.cache_manager.cache, llm.engine.pools.kv
    pages = kv.allocator.allocate(-(-len(tokens) // kv.page_size))
    if pages is None:
        raise ConfigError(f"a KV pool of {kv.num_tokens} tokens does not hold a prompt of {len(tokens)} tokens")
    slots = (pages[:, None] * kv.page_size + np.arange(kv.page_size)).reshape(-1)[: len(tokens)]
    ends = [*range(chunk_size, len(tokens), chunk_size), len(tokens)]
    ready = [_state_at(llm, end) for end in ends]  # outside the timed part: not the tree's work
    began = time.perf_counter()
    _store(llm, tokens, slots, dict(zip(ends, ready, strict=True)))
    stored = time.perf_counter()
    match = cache.match(tokens)
    matched = time.perf_counter()
    assert match.length == len(tokens)
    kv.allocator.release(pages, pinned=True)  # as a request's row does: now only the tree holds the pages
    llm.flush_cache()
    return stored - began, matched - stored


def _state_at(llm: LLM, position: int) -> int:
    """A slot of the state pool, marked as written up to ``position``, that the tree can take."""
    states = llm.engine.pools.states
    slot = states.reserve(OWNER)
    assert slot is not None
    states.begin_write(slot, OWNER)
    states.end_write(slot, position)
    states.donate(slot, OWNER, position)
    return slot


def _store(llm: LLM, tokens: Tokens, slots: Tokens, states: dict[int, int]) -> None:
    """Insert a prompt as the cache does while the prompt runs; ``states`` are state slots by chunk end."""
    cache = llm.engine.cache_manager.cache
    node = cache.match(tokens).node
    cache.lock(node)
    for end, slot in states.items():
        insertion = cache.insert(node, tokens[node.end : end], slots[node.end : end], slot)
        cache.move_lock(node, insertion.node)
        node = insertion.node
    cache.unlock(node)


def _engine_costs(config: PrefixBenchConfig, source: TextSource) -> tuple[dict[str, Any], float]:
    """The figures of a real prompt, and seconds per token of its prefill without the cache's work."""
    with start_engine(config) as llm:
        length = min(PREFILL_TOKENS, config.cost_tokens, llm.engine.context_length - 1)
        warm_up(llm, source, config)
        seconds = [
            prefill_work(llm, source.cut(length, random.Random(f"{config.seed}/prefill/{number}")))
            for number in range(config.rounds)
        ]
    parts = {name: statistics.median(one[name] for one in seconds) for name in seconds[0]}
    cache = [one["acquire"] + one["leave_chunk"] for one in seconds]
    rest = statistics.median(one["prefill"] - own for one, own in zip(seconds, cache, strict=True))
    shares = [own / one["prefill"] for one, own in zip(seconds, cache, strict=True)]
    figures = {
        "tokens": length,
        **{f"{name}_ms": round(value * 1e3, 4) for name, value in parts.items()},
        "share": round(statistics.median(shares), 6),
        "prefill_us_per_token": round(rest / length * 1e6, 3),
    }
    return figures, rest / length


def prefill_work(llm: LLM, prompt: tuple[int, ...]) -> dict[str, float]:
    """Time a prompt that finds nothing in the cache: seconds to its first token, and the cache's parts of them.

    Args:
        llm: idle; its cache is emptied before.
        prompt: fits the context.

    Raises:
        RequestError: the model's numbers are not finite.
    """
    llm.flush_cache()
    with stopwatch() as (seconds, watch):
        for name in ("acquire", "leave_chunk"):
            watch(llm.engine.cache_manager, name, name)
        (answer,) = run_wave(llm, [Ask("user", prompt)], 1)
    return {**seconds, "prefill": answer.ttft_s}


def _slope(times: dict[int, float]) -> float | None:
    """The slope of log time over log length by least squares; None for a single length."""
    if len(times) < 2:
        return None
    x, y = np.log(list(times)), np.log(list(times.values()))
    return round(float(np.polyfit(x, y, 1)[0]), 3)
