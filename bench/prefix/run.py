"""Runs the waves of a workload on engines with and without the cache, in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specmamba import LLM, SamplingParams
from specmamba.bench.prefix.engines import Demand, demand_of, pool_flags, sizes_of, start_engine, wave_draws
from specmamba.bench.prefix.texts import TextSource
from specmamba.bench.prefix.workloads import Ask, Kind, Tokens, make_workload
from specmamba.errors import RequestError
from specmamba.measure.report import progress_bar

if TYPE_CHECKING:
    from specmamba.bench.prefix.__main__ import PrefixBenchConfig

COLD = "without"  # the engine that has no cache, and whose outputs are the truth
WARM_UP_TOKENS = 64
COUNTERS = ("query_tokens", "hit_tokens", "inserted_tokens", "evicted_tokens", "evicted_states", "duplicate_states")
GAUGES = ("num_nodes", "num_tombstones", "num_states", "num_tokens")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as one engine answered it."""

    kind: Kind
    prompt: Tokens
    output: Tokens
    num_cached_tokens: int
    ttft_s: float  # since its wave was submitted


@dataclass(frozen=True, slots=True)
class Play:
    """A workload on one engine with a cache, and the same requests without."""

    name: str
    cache_eviction: str
    demand: Demand
    warm: list[Answer]  # in the order of submission
    cold: list[Answer]
    cache: dict[str, Any]  # what happened in the cache meanwhile, and what is in it at the end
    pools: dict[str, int]


def run_workloads(config: PrefixBenchConfig, cold: LLM, source: TextSource, names: Sequence[str]) -> list[Play]:
    """All workloads; ``pressure`` with both eviction policies.

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
    """One workload, every wave on every engine before the next one begins. Outputs without cache make the next wave."""
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
            turns.append(turns.pop(0))  # nobody always has the first turn
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
    """Run a text that is nobody's, so that no first call is measured, and forget it."""
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
    """What has been counted since, and what there is now."""
    now, cache = _counts(llm), llm.engine.stats().prefix_cache
    misses = {reason: count - before["miss_reasons"][reason] for reason, count in now.pop("miss_reasons").items()}
    counted = {name: count - before[name] for name, count in now.items()}
    return counted | {"miss_reasons": misses} | {name: getattr(cache, name) for name in GAUGES}


def _pools(llm: LLM) -> dict[str, int]:
    stats = llm.engine.stats()
    return {"kv_pool_tokens": stats.kv_total_tokens, "state_slots": stats.state_total_slots}
