"""The share of bookkeeping in a step while many requests decode.

``--cost-requests`` requests run together, and of every step in which all of them decode, and none begins or ends, the
time in the scheduler (``make_room``, ``admit``, ``next_runs``) and in ``advance`` (text, stop conditions, and states
that are due, which ``leave`` counts apart) is set against the whole step. Both strategies of leaving states are
measured, whichever is set. ``extra_buffer`` leaves one every ``--mamba-track-interval`` tokens, or more often than
that: at least two are due in each request, so with a long interval its share is an upper bound.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from specmamba import LLM, SamplingParams
from specmamba.bench.prefix.engines import SPARE_TOKENS, PrefixBenchConfig, start_cost_engine
from specmamba.bench.prefix.texts import TextSource
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError, RequestError

PROMPT_TOKENS, DECODE_TOKENS = 96, 160  # of each request
LONGEST_INTERVAL = DECODE_TOKENS // 2
PARTS = ("scheduler", "leave", "advance")
Watch = Callable[[object, str, str], None]


def decode_costs(config: PrefixBenchConfig, source: TextSource) -> dict[str, Any]:
    """Measure both strategies of leaving states.

    Raises:
        ConfigError: the pools do not fit the memory, or the requests not together.
        RequestError: the model's numbers are not finite.
    """
    interval = min(config.mamba_track_interval, LONGEST_INTERVAL)
    return {
        "no_buffer": _share(config, source, None),
        "extra_buffer": _share(config, source, interval),
    }


def _share(config: PrefixBenchConfig, source: TextSource, interval: int | None) -> dict[str, Any]:
    count = config.cost_requests
    draw = random.Random(f"{config.seed}/decode")
    prompts = [source.start + source.cut(PROMPT_TOKENS, draw) for _ in range(count)]
    with start_cost_engine(config, "--cost-requests", **_flags(config, interval)) as llm:
        _use_all_memory(llm)
        steps = decode_steps(llm, prompts)
    num_states = round(sum(step["states"] for step in steps))
    if not steps or (interval is not None and not num_states):
        what = "no step had all of them" if not steps else "no state was due while all of them ran"
        raise ConfigError(f"--cost-requests {count}: {what}: lower it")
    whole = sum(step["step"] for step in steps)
    shares = {name: sum(step[name] for step in steps) / whole for name in PARTS}
    return {
        "requests": count,
        "track_interval": interval,
        "steps": len(steps),
        "states_left": num_states,
        "leave_ms_per_state": round(shares["leave"] * whole / num_states * 1e3, 4) if num_states else None,
        "step_ms": round(whole / len(steps) * 1e3, 4),
        "bookkeeping_share": round(sum(shares.values()), 5),
        "shares": {name: round(share, 5) for name, share in shares.items()},
    }


def _flags(config: PrefixBenchConfig, interval: int | None) -> dict[str, Any]:
    """Flags of an engine that holds all requests and all states that they leave."""
    count, num_tracked = config.cost_requests, DECODE_TOKENS // interval if interval else 0
    default = EngineConfig.model_fields["mamba_track_interval"].default
    strategy: dict[str, Any] = {"mamba_radix_cache_strategy": "no_buffer", "mamba_track_interval": default}
    if interval is not None:
        strategy = {"mamba_radix_cache_strategy": "extra_buffer", "mamba_track_interval": interval}
    room = PROMPT_TOKENS + DECODE_TOKENS + SPARE_TOKENS + config.page_size
    return strategy | {
        "max_running_requests": max(count, config.max_running_requests),
        "max_total_tokens": count * room,
        "max_mamba_cache_size": count * (4 + num_tracked),
        "max_queued_requests": max(count, config.max_queued_requests),
    }


def _use_all_memory(llm: LLM) -> None:
    """Write all pools once: the first use of memory takes longer, and must not count in the steps."""
    pools = llm.engine.pools
    for memory in (pools.states.recurrent, pools.states.conv, *pools.kv.k, *pools.kv.v):
        memory.zero_()


def decode_steps(llm: LLM, prompts: list[tuple[int, ...]]) -> list[dict[str, float]]:
    """Run requests, and time the steps in which all of them decode: seconds, whole and by part, and states left.

    Raises:
        RequestError: the model's numbers are not finite.
    """
    engine, scheduler = llm.engine, llm.engine.scheduler
    params = SamplingParams(max_tokens=DECODE_TOKENS, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    steps: list[dict[str, float]] = []
    with stopwatch() as (seconds, watch):
        for name in ("make_room", "admit", "next_runs"):
            watch(scheduler, name, "scheduler")
        watch(engine.cycle, "_advance", "advance")
        for name in ("leave_chunk", "leave_at", "leave_last"):
            watch(engine.cache_manager, name, "leave")
        while engine.has_unfinished_requests:
            is_full, before = len(scheduler.verifying) == len(prompts), _num_left(llm)
            seconds.update(dict.fromkeys(PARTS, 0.0))
            began = time.perf_counter()
            deltas = engine.step()
            elapsed = time.perf_counter() - began
            if any(delta.error for delta in deltas):
                raise RequestError(next(delta.error for delta in deltas if delta.error))
            if is_full and not any(delta.finish_reason for delta in deltas):
                steps.append({"step": elapsed, "states": _num_left(llm) - before, **seconds})
    return steps


def _num_left(llm: LLM) -> int:
    """The number of states left in the cache so far."""
    stats = llm.engine.stats().prefix_cache
    return stats.num_states + stats.evicted_states


@contextmanager
def stopwatch() -> Iterator[tuple[dict[str, float], Watch]]:
    """Time methods while the context lasts.

    The time of a watched method that another one calls counts for the inner one only. Methods are restored at the end.

    Yields:
        Seconds by part, and a function (object, name of a method, part) that adds a method's time to a part.
    """
    seconds: dict[str, float] = {}
    inner = [0.0]  # seconds of watched calls inside the one that runs, a level per call
    watched: list[tuple[object, str]] = []

    def watch(owner: object, name: str, part: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - began
                seconds[part] = seconds.get(part, 0.0) + elapsed - inner.pop()
                inner[-1] += elapsed

        setattr(owner, name, timed)
        watched.append((owner, name))

    try:
        yield seconds, watch
    finally:
        for owner, name in watched:
            delattr(owner, name)
