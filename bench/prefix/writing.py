"""Time between tokens of running requests while prefixes of others are written to disk, beside an engine without one.

In a round, streams decode together; every ``ARRIVAL_STEPS`` steps one more request comes, with a new prompt and one
token to answer, so that a prefix is left in the cache each time: the engine with the disk writes it. Both engines get
the same texts, in turns, and have a prefix cache. With ``--hicache-storage-backend mooncake`` the store of the flags is
written to in place of the disk. Steps that compute a part of a prompt are counted too: both have the same ones.
Reported are the ratios of the 50th and the 99th percentile of all gaps of a round.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specmamba.bench.prefix.disk import drain, place_name, stats_of_place
from specmamba.bench.prefix.engines import Demand, PrefixBenchConfig, own_place, pool_flags, start_engine, without_tiers
from specmamba.bench.prefix.run import warm_up
from specmamba.bench.prefix.texts import TextSource
from specmamba.errors import ConfigError
from specmamba.measure.command import in_turns
from specmamba.measure.report import median_with_range, percentile, progress_bar
from specmamba.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specmamba import LLM

ARRIVAL_STEPS = 8  # between two arrivals
STREAM_PROMPT = 32  # tokens
MIN_GAPS = 100  # of a round: fewer have no 99th percentile
WITH, WITHOUT = "with", "without"


def measure_writing(config: PrefixBenchConfig, source: TextSource, context_length: int) -> dict[str, Any]:
    """Measure; figures are medians over rounds.

    Raises:
        ConfigError: streams or prompts do not fit the context, or there is no place for a prompt beside the streams.
    """
    length, written = config.writing_prompt_tokens, config.writing_tokens
    if max(length + 1, STREAM_PROMPT + written) >= context_length:
        raise ConfigError(
            f"--writing-prompt-tokens {length}, --writing-tokens {written}: they do not fit a context of "
            f"{context_length}: lower them"
        )
    if config.max_running_requests < 2:
        raise ConfigError("--max-running-requests 1: writing has a prompt beside running requests; raise it")
    num_prompts = written // ARRIVAL_STEPS + 1
    tokens = num_prompts * (length + 1) + config.concurrency * (STREAM_PROMPT + written)
    states = num_prompts * (4 + length // config.chunked_prefill_size) + 4 * config.concurrency
    longest = max(length + 1, STREAM_PROMPT + written)
    flags = pool_flags(config, [Demand(num_prompts, config.concurrency + 1, longest, tokens, 2 * tokens, states)])
    with own_place(config) as (_, place):
        place["hicache_write_policy"] = "write_through"
        none = flags | without_tiers()
        with start_engine(config, **flags | place) as warm, start_engine(config, **none) as plain:
            engines = {WITH: warm, WITHOUT: plain}
            for llm in engines.values():
                warm_up(llm, source, config)
            rounds = _rounds(config, engines, source)
            stats = stats_of_place(warm)
    return figures_of(rounds) | {
        "place": place_name(config),
        "streams": config.concurrency,
        "prompt_tokens": length,
        "rounds": config.rounds,
        "written_bytes": stats.written_bytes,
        "lost_writes": sum(stats.lost_writes.values()),
    }


def _rounds(config: PrefixBenchConfig, engines: dict[str, LLM], source: TextSource) -> list[dict[str, list[float]]]:
    """The gaps of every round, in seconds, by engine; a first round, in which steps are recorded, is left out."""
    rounds = []
    with progress_bar("writing", (config.rounds + 1) * len(engines)) as advance:
        for number in range(config.rounds + 1):
            gaps = {}
            for name in in_turns(list(engines), number):
                gaps[name] = _gaps(config, engines[name], source, number)
                advance()
            rounds.append(gaps)
    return rounds[1:]


def _gaps(config: PrefixBenchConfig, llm: LLM, source: TextSource, number: int) -> list[float]:
    """Run the streams of a round and the prompts beside them; then wait until all is written."""
    engine, draw = llm.engine, random.Random(f"{config.seed}/writing/{number}")
    long = SamplingParams(max_tokens=config.writing_tokens, temperature=0.0, ignore_eos=True)
    streams = {f"stream {stream}" for stream in range(config.concurrency)}
    for name in sorted(streams):
        engine.add_request(name, source.cut(STREAM_PROMPT, draw), long)
    last: dict[str, float] = {}
    gaps: list[float] = []
    for step in itertools.count():
        if not streams:
            break
        if step % ARRIVAL_STEPS == 0:
            prompt = source.cut(config.writing_prompt_tokens, draw)
            engine.add_request(f"prompt {step}", prompt, SamplingParams(max_tokens=1, temperature=0.0))
        deltas = [delta for delta in engine.step() if delta.request_id in streams]
        now = time.perf_counter()
        for delta in deltas:
            if delta.request_id in last:
                gaps.append(now - last[delta.request_id])
            last[delta.request_id] = now
        streams -= {delta.request_id for delta in deltas if delta.finish_reason is not None}
    while engine.has_unfinished_requests:
        engine.step()
    drain(llm)
    engine.flush_cache()
    return gaps


def figures_of(rounds: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Ratios of percentiles of the engine with a disk over those without; the times themselves, in milliseconds.

    Raises:
        ConfigError: a round has too few gaps.
    """
    if min(len(gaps) for each in rounds for gaps in each.values()) < MIN_GAPS:
        raise ConfigError(f"--writing-tokens: fewer than {MIN_GAPS} times between tokens; raise it, or --concurrency")
    figures: dict[str, Any] = {}
    for q in (50, 99):
        times = {name: [1e3 * percentile(each[name], q) for each in rounds] for name in (WITH, WITHOUT)}
        figures[f"p{q}_ms"] = {name: median_with_range(values, 3) for name, values in times.items()}
        ratios = [one / other for one, other in zip(times[WITH], times[WITHOUT], strict=True)]
        figures[f"p{q}_ratio"] = median_with_range(ratios, 3)
    return figures
