"""Runs the waves of a workload on engines with and without the cache, in turns, and measures times to first token.

**ttft**: in every round three users ask different questions behind one text, and the cache is empty before the first.
The second user is the first that leaves the path of another in the middle: there is KV up to there but no recurrent
state, so it goes on from the end of a chunk and leaves a state where the two part. From the third user on all of the
shared text is spared, which is the figure (``ttft_shared_ratio``). Second and third user also run without the cache, in
turns with the runs with it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from specmamba import LLM, SamplingParams
from specmamba.bench.prefix.engines import (
    Demand,
    PrefixBenchConfig,
    demand_of,
    pool_flags,
    require_room_for_prompt,
    sizes_of,
    start_engine,
    wave_draws,
)
from specmamba.bench.prefix.texts import TextSource
from specmamba.bench.prefix.workloads import Ask, Kind, Tokens, make_workload
from specmamba.errors import ConfigError, RequestError
from specmamba.measure.command import in_turns
from specmamba.measure.report import progress_bar

COLD = "without"  # the engine without a cache, whose outputs are expected of the others
WARM_UP_TOKENS = 64
WITH, WITHOUT = "with_cache", "without_cache"
USERS = 3  # of a text, in a round of ttft
COUNTERS = ("query_tokens", "hit_tokens", "inserted_tokens", "evicted_tokens", "evicted_states", "duplicate_states")
GAUGES = ("num_nodes", "num_tombstones", "num_states", "num_tokens")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one engine to one request."""

    kind: Kind
    prompt: Tokens
    output: Tokens
    num_cached_tokens: int
    ttft_s: float  # since its wave was submitted


@dataclass(frozen=True, slots=True)
class Play:
    """The answers to a workload with a cache, and to the same requests without."""

    name: str
    cache_eviction: str
    demand: Demand
    warm: list[Answer]  # in the order of submission
    cold: list[Answer]
    cache: dict[str, Any]  # counts of what the cache did, and what it holds at the end
    pools: dict[str, int]


def run_workloads(config: PrefixBenchConfig, cold: LLM, source: TextSource, names: Sequence[str]) -> list[Play]:
    """Run workloads, ``pressure`` with both eviction policies.

    Raises:
        ConfigError: a workload fits neither the context nor the memory.
        RequestError: the model's numbers are not finite.
    """
    demands = {name: demand_of(config, name, source, cold.engine.context_length) for name in names}
    plays: list[Play] = []
    roomy = [name for name in names if name != "pressure"]
    if roomy:
        flags = pool_flags(config, [demands[name] for name in roomy])
        with start_engine(config, **flags) as warm:
            engines = {COLD: cold, config.cache_eviction: warm}
            for name in roomy:
                plays += play(config, engines, source, name, demands[name])
    if "pressure" in names:
        flags = pool_flags(config, [demands["pressure"]], config.pressure_share)
        with ExitStack() as stack:
            engines = {COLD: cold}
            for policy in ("lru", "flops"):
                engines[policy] = stack.enter_context(start_engine(config, **flags, cache_eviction=policy))
            plays += play(config, engines, source, "pressure", demands["pressure"])
    return plays


def play(
    config: PrefixBenchConfig, engines: dict[str, LLM], source: TextSource, name: str, demand: Demand
) -> list[Play]:
    """Run one workload, every wave on all engines in turns. The outputs without cache lead to the next wave."""
    answers: dict[str, list[Answer]] = {policy: [] for policy in engines}
    for llm in engines.values():
        warm_up(llm, source, config)
    before = {policy: _counts(llm) for policy, llm in engines.items()}
    waves = make_workload(name, source, sizes_of(config), config.seed).waves(
        config.concurrency, wave_draws(config, name)
    )
    turns, wave = list(engines), next(waves, None)
    with progress_bar(name, demand.num_requests) as advance:
        while wave is not None:
            for policy in turns:
                answers[policy] += run_wave(engines[policy], wave, config.output_tokens)
            turns = in_turns(turns, 1)  # no engine is always the first
            for _ in wave:
                advance()
            try:
                wave = waves.send([answer.output for answer in answers[COLD][-len(wave) :]])
            except StopIteration:
                wave = None
    return [
        Play(name, policy, demand, answers[policy], answers[COLD], _since(before[policy], llm), _pools(llm))
        for policy, llm in engines.items()
        if policy != COLD
    ]


def warm_up(llm: LLM, source: TextSource, config: PrefixBenchConfig) -> None:
    """Run a text that no workload has, so that no first call is measured, and empty the cache."""
    prompt = source.start + source.cut(WARM_UP_TOKENS, random.Random(config.seed))
    run_wave(llm, [Ask("user", prompt)] * config.concurrency, 4)
    llm.flush_cache()


def run_wave(llm: LLM, asks: Sequence[Ask], output_tokens: int) -> list[Answer]:
    """Submit requests together and run them to their ends, greedily.

    Raises:
        RequestError: the model's numbers are not finite.
    """
    engine = llm.engine
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    outputs: list[list[int]] = [[] for _ in asks]
    first: list[float | None] = [None] * len(asks)
    cached = [0] * len(asks)
    began = time.perf_counter()
    for number, ask in enumerate(asks):
        engine.add_request(str(number), ask.prompt, params)
    while engine.has_unfinished_requests:
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            if delta.error is not None:
                raise RequestError(delta.error)
            number = int(delta.request_id)
            outputs[number] += delta.token_ids
            if delta.token_ids and first[number] is None:
                first[number] = now
            cached[number] = delta.num_cached_tokens
    answers = []
    for ask, output, num_cached, at in zip(asks, outputs, cached, first, strict=True):
        assert at is not None  # no request ends without a token
        answers.append(Answer(ask.kind, ask.prompt, tuple(output), num_cached, at - began))
    return answers


def _counts(llm: LLM) -> dict[str, Any]:
    stats = llm.engine.stats()
    cache = stats.prefix_cache
    counts = {name: getattr(cache, name) for name in COUNTERS}
    return counts | {"preemptions": stats.num_preemptions, "miss_reasons": dict(cache.misses)}


def _since(before: dict[str, Any], llm: LLM) -> dict[str, Any]:
    """What was counted since ``before``, and what the cache holds now."""
    now, cache = _counts(llm), llm.engine.stats().prefix_cache
    misses = {reason: count - before["miss_reasons"][reason] for reason, count in now.pop("miss_reasons").items()}
    counted = {name: count - before[name] for name, count in now.items()}
    return counted | {"miss_reasons": misses} | {name: getattr(cache, name) for name in GAUGES}


def _pools(llm: LLM) -> dict[str, int]:
    stats = llm.engine.stats()
    return {"kv_pool_tokens": stats.kv_total_tokens, "state_slots": stats.state_total_slots}


def measure_ttft(config: PrefixBenchConfig, cold: LLM, source: TextSource) -> dict[str, Any]:
    """Measure times to first token; figures in milliseconds are medians over rounds.

    Raises:
        ConfigError: the prompt does not fit the context.
    """
    length = require_room_for_prompt(config, cold)
    states = USERS * (4 + config.mamba_spare_states + -(-length // config.chunked_prefill_size))
    kv = USERS * (length + 2 * config.page_size)
    demand = Demand(USERS, 1, length + 1, USERS * length, kv, states)
    with start_engine(config, **pool_flags(config, [demand])) as warm:
        for llm in (cold, warm):
            warm_up(llm, source, config)
        rounds = [_round(config, {WITH: warm, WITHOUT: cold}, source, number) for number in range(config.rounds)]
    return {
        "prompt_tokens": length,
        "shared_tokens": config.ttft_shared_tokens,
        "rounds": config.rounds,
        "different_texts": sum(one["different_texts"] for one in rounds),
        **_figures(rounds, "ttft_shared", 1),
        **_figures(rounds, "ttft_second_user", 0),
    }


def _round(config: PrefixBenchConfig, engines: dict[str, LLM], source: TextSource, number: int) -> dict[str, Any]:
    """Times and cached tokens of the second and the third user of a text, by engine."""
    draw = random.Random(f"{config.seed}/ttft/{number}")
    text = (source.start + source.cut(config.ttft_shared_tokens, draw))[: config.ttft_shared_tokens]
    own = config.ttft_tokens - len(text)
    first, *others = [Ask("user", text + question) for question in _different(source, own, draw, USERS)]
    engines[WITH].flush_cache()
    run_wave(engines[WITH], [first], 1)
    order = [WITH, WITHOUT] if number % 2 else [WITHOUT, WITH]
    answers: dict[str, list[Answer]] = {name: [] for name in order}
    for ask in others:
        for name in order:
            answers[name] += run_wave(engines[name], [ask], 1)
    return {
        "seconds": {name: [answer.ttft_s for answer in given] for name, given in answers.items()},
        "cached": [answer.num_cached_tokens for answer in answers[WITH]],
        "different_texts": sum(a.output != b.output for a, b in zip(answers[WITH], answers[WITHOUT], strict=True)),
    }


def _different(source: TextSource, length: int, draw: random.Random, count: int) -> list[Tokens]:
    """``count`` pieces whose first tokens differ. Raises ConfigError: the text has too few different tokens."""
    pieces: list[Tokens] = []
    for _ in range(100 * count):
        piece = source.cut(length, draw)
        if piece[0] not in {other[0] for other in pieces}:
            pieces.append(piece)
        if len(pieces) == count:
            return pieces
    raise ConfigError("--prompts: the text has next to no different tokens: give another one")


def _figures(rounds: list[dict[str, Any]], name: str, user: int) -> dict[str, Any]:
    warm, cold = ([one["seconds"][engine][user] for one in rounds] for engine in (WITH, WITHOUT))
    ratios = [a / b for a, b in zip(warm, cold, strict=True)]
    return {
        f"{name}_ratio": round(statistics.median(ratios), 4),
        f"{name}_ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        f"{name}_ms": {WITH: round(statistics.median(warm) * 1e3, 3), WITHOUT: round(statistics.median(cold) * 1e3, 3)},
        f"{name}_cached_tokens": min(one["cached"][user] for one in rounds),
    }
