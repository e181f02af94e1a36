"""The figures of the prefix benchmark, from answers.

- ``hit_rate``: prompt tokens that the cache spared, over all prompt tokens of the workload. What counts is what a
  request found when it was first admitted.
- ``oracle_hit_rate``: the same for a cache without bounds (texts.py); ``ratio_to_oracle`` is the one over the
  other, null where there was nothing to spare. ``by_kind`` has these of every kind of request.
- ``ttft_ms``: from the submission of a request's wave to its first token, the wait for others of the wave in it, with
  and without the cache, of the same requests; ``ttft_ratio`` is the one median over the other. The engine without the
  cache always has enough memory: ``pressure`` compares an engine that is short of memory with one that is not.
- ``largest_wave``: requests of a workload that were submitted together, at the most.
- ``distinct_tokens``: of prompts and outputs, common beginnings counted once.
- ``miss_reasons``: requests by why they did not hit more, where something of the prompt was missing: ``never_stored``
  (no request has run it, or none left a state there), ``evicted``, ``page_grid``, ``salt``.
- ``lost_most``: the requests that fell furthest behind the oracle.
- ``different_texts``: requests whose greedy output with the cache is not the one without.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from specmamba.bench.prefix.engines import PrefixBenchConfig, sizes_of
from specmamba.bench.prefix.run import Answer, Play
from specmamba.bench.prefix.texts import TextSource, distinct_tokens, oracle_hits
from specmamba.measure.prompts import model_name
from specmamba.measure.report import machine, versions

NOTHING = {"different_texts": 0}
MAX_LOST = 5  # requests that are named


def full_report(
    config: PrefixBenchConfig,
    description: dict[str, object],
    num_threads: int,
    source: TextSource,
    plays: Sequence[Play],
    ttft: dict[str, Any] | None,
    disk: dict[str, Any] | None,
    writing: dict[str, Any] | None,
    costs: dict[str, Any] | None,
    swing: dict[str, Any] | None,
    elastic: dict[str, Any] | None,
) -> dict[str, Any]:
    """The report as a JSON object; ``description`` and ``num_threads`` are those of the engine without the cache."""
    workloads = [workload_figures(each) for each in plays]
    different = sum(
        each["different_texts"] for each in (*workloads, ttft or NOTHING, disk or NOTHING, swing or NOTHING)
    )
    return {
        "model": model_name(description),
        "dtype": description["dtype"],
        "device": description["device"],
        "machine": machine(),
        "threads": num_threads,
        "versions": versions(),
        "algorithm": description["speculative_algorithm"],
        "num_draft_tokens": description["speculative_num_draft_tokens"],
        "state": config.speculative_state,
        "strategy": config.mamba_radix_cache_strategy,
        "track_interval": config.mamba_track_interval,
        "page_size": config.page_size,
        "chunked_prefill_size": config.chunked_prefill_size,
        "schedule_policy": config.schedule_policy,
        "prompts": "bundled" if config.prompts is None else config.prompts.name,
        "text": {"documents": len(source.documents), "tokens": source.num_tokens},
        "seed": config.seed,
        "concurrency": config.concurrency,
        "output_tokens": config.output_tokens,
        "sizes": {name: getattr(sizes_of(config), name) for name in sizes_of(config).__dataclass_fields__},
        "pressure_share": config.pressure_share,
        "different_texts": different,
        "workloads": workloads,
        "ttft": ttft,
        "disk": disk,
        "writing": writing,
        "costs": costs,
        "swing": swing,
        "elastic": elastic,
    }


def workload_figures(play: Play) -> dict[str, Any]:
    """The figures of one workload on one engine."""
    hits = [answer.num_cached_tokens for answer in play.warm]
    oracle = oracle_hits((answer.prompt, answer.output) for answer in play.warm)
    times = {"with_cache": _spread(play.warm), "without_cache": _spread(play.cold)}
    kinds = sorted({answer.kind for answer in play.warm})
    return {
        "workload": play.name,
        "cache_eviction": play.cache_eviction,
        "requests": len(play.warm),
        "output_tokens": sum(len(answer.output) for answer in play.warm),
        "largest_wave": play.demand.largest_wave,
        "distinct_tokens": distinct_tokens((*answer.prompt, *answer.output) for answer in play.warm),
        **play.pools,
        **_rates(play.warm, hits, oracle),
        "by_kind": {kind: _rates(*_of_kind(kind, play.warm, hits, oracle)) for kind in kinds},
        "ttft_ms": times,
        "ttft_ratio": _ratio(times["with_cache"]["p50"], times["without_cache"]["p50"]),
        "ttft_p90_ratio": _ratio(times["with_cache"]["p90"], times["without_cache"]["p90"]),
        "different_texts": sum(a.output != b.output for a, b in zip(play.warm, play.cold, strict=True)),
        **play.cache,
        "lost_most": _lost_most(play.warm, hits, oracle),
    }


def _rates(answers: Sequence[Answer], hits: Sequence[int], oracle: Sequence[int]) -> dict[str, Any]:
    tokens = sum(len(answer.prompt) for answer in answers)
    return {
        "prompt_tokens": tokens,
        "hit_rate": round(sum(hits) / tokens, 5),
        "oracle_hit_rate": round(sum(oracle) / tokens, 5),
        "ratio_to_oracle": _ratio(sum(hits), sum(oracle)),
    }


def _of_kind(
    kind: str, answers: Sequence[Answer], hits: Sequence[int], oracle: Sequence[int]
) -> tuple[list[Answer], list[int], list[int]]:
    chosen = [i for i, answer in enumerate(answers) if answer.kind == kind]
    return [answers[i] for i in chosen], [hits[i] for i in chosen], [oracle[i] for i in chosen]


def _ratio(a: float, b: float) -> float | None:
    return round(a / b, 4) if b else None


def _spread(answers: Sequence[Answer]) -> dict[str, float]:
    times = sorted(answer.ttft_s * 1e3 for answer in answers)
    p90 = statistics.quantiles(times, n=10, method="inclusive")[8] if len(times) > 1 else times[0]
    return {"p50": round(statistics.median(times), 3), "p90": round(p90, 3)}


def _lost_most(answers: Sequence[Answer], hits: Sequence[int], oracle: Sequence[int]) -> list[dict[str, Any]]:
    order = sorted(range(len(answers)), key=lambda i: oracle[i] - hits[i], reverse=True)
    return [
        {
            "request": i,
            "kind": answers[i].kind,
            "prompt_tokens": len(answers[i].prompt),
            "hit_tokens": hits[i],
            "oracle_tokens": oracle[i],
        }
        for i in order[:MAX_LOST]
        if oracle[i] > hits[i]
    ]
