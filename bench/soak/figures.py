"""The figures of the soak benchmark, the bounds that they must keep, and their tables."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specmamba.bench.soak.clients import Tally
from specmamba.measure.command import Page
from specmamba.measure.report import percentile

LATENCIES = ("first_ms", "per_token_ms")
_POOLS = {"kv_tokens": 0, "states": 0}  # nothing may be held by an idle server with an empty cache
_SAME = ("free_pages", "free_states")
_SPARE = {"descriptors": 0, "threads": 8}  # allowed growth: pools of threads reach their size when first used
_NOT_DROPPED = ("silence", "never stopped")  # endings of clients that the server should have dropped


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds. ``slowdown``: latency of good clients with bad ones over that without."""

    slowdown: float
    mb_per_minute: float


def phase_report(tallies: Sequence[Tally]) -> dict[str, Any]:
    """Sum up all phases of a kind: latencies of good clients in milliseconds, their failures, endings of faults."""
    timings = [timing for tally in tallies for timing in tally.timings]
    failures, outcomes = Counter[str](), Counter[tuple[str, str]]()
    for tally in tallies:
        failures += tally.failures
        outcomes += tally.outcomes
    return {
        "answers": len(timings),
        "tokens": sum(tally.num_tokens for tally in tallies),
        "first_ms": _spread([timing.first_s for timing in timings]),
        "per_token_ms": _spread([timing.per_token_s for timing in timings]),
        "failures": dict(failures),
        "faults": {name: _endings(outcomes, name) for name, _ in sorted(outcomes)},
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(percentile(seconds, q) * 1e3, 3) for q in (50, 95)}


def _endings(outcomes: Counter[tuple[str, str]], name: str) -> dict[str, int]:
    return {ending: number for (other, ending), number in sorted(outcomes.items()) if other == name}


def memory_report(samples: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The growth of memory, from samples (seconds, MiB): first, last, and the slope of the least-squares line."""
    times, sizes = [time for time, _ in samples], [size for _, size in samples]
    enough = len(set(times)) > 1
    slope = statistics.linear_regression(times, sizes).slope * 60 if enough else math.nan
    return {"first_mb": round(sizes[0], 1), "last_mb": round(sizes[-1], 1), "mb_per_minute": round(slope, 3)}


def slowdowns(phases: Mapping[str, Any]) -> dict[str, float]:
    """Latency of good clients with bad ones over that without, by figure."""
    good, mixed = phases.values()
    return {f"{name} p{q}": mixed[name][f"p{q}"] / good[name][f"p{q}"] for name in LATENCIES for q in (50, 95)}


def broken_bounds(report: Mapping[str, Any], bounds: Bounds) -> list[str]:
    """A sentence for each bound that the report breaks."""
    return [*not_given_back(report), *_not_answered(report), *_too_slow(report, bounds), *_not_ended(report["end"])]


def not_given_back(report: Mapping[str, Any], spare_descriptors: int = 0) -> list[str]:
    """A sentence for everything that the server holds ``after`` and did not hold ``before``."""
    before, after = report["before"], report["after"]
    held = [f"{name}: {after[name]} held by an idle server" for name, none in _POOLS.items() if after[name] != none]
    changed = [f"{name}: {before[name]} before, {after[name]} after" for name in _SAME if before[name] != after[name]]
    spares = _SPARE | {"descriptors": spare_descriptors}
    grown = [name for name, spare in spares.items() if after[name] > before[name] + spare]
    return [*held, *changed, *(f"{name}: {before[name]} before, {after[name]} after" for name in grown)]


def _not_answered(report: Mapping[str, Any]) -> list[str]:
    broken = []
    for name, phase in report["phases"].items():
        broken += [
            f"{name}: {number} well-behaved clients failed: {text}" for text, number in phase["failures"].items()
        ]
        broken += [] if phase["answers"] else [f"{name}: no well-behaved client got an answer"]
        for fault, endings in phase["faults"].items():
            wrong = {end: number for end, number in endings.items() if end.startswith("5") or end in _NOT_DROPPED}
            broken += [f"{fault}: {number} times {end}" for end, number in wrong.items()]
    return broken


def _too_slow(report: Mapping[str, Any], bounds: Bounds) -> list[str]:
    slope = report["memory"]["mb_per_minute"]
    memory = [f"memory grows by {slope:.2f} MiB a minute"] if slope > bounds.mb_per_minute else []
    over = {name: ratio for name, ratio in slowdowns(report["phases"]).items() if not ratio <= bounds.slowdown}
    return [*memory, *(f"{name}: {ratio:.2f} times that without bad clients" for name, ratio in over.items())]


def _not_ended(end: Mapping[str, Any]) -> list[str]:
    cut = end["endings"]["cut off"]
    status = [] if end["exit_status"] == 0 else [f"exit status {end['exit_status']} after SIGTERM"]
    return [*status, *([f"SIGTERM: {cut} answers were cut off without a word"] if cut else [])]


def print_report(report: Mapping[str, Any]) -> None:
    """Print tables of latencies and faults, what the server holds, and the bounds that are broken."""
    page, phases = Page(), report["phases"]
    page.lines(
        f"{report['model']}: {report['streams']} streams; with bad clients {report['bad_streams']} of them are bad, "
        f"and {report['bad_clients_beside']} more clients send what is refused"
    )
    ratios = [f"{ratio:.2f}" for ratio in slowdowns(phases).values()]
    page.table(
        ("", "answers", "tokens", "first token p50, p95 ms", "per token p50, p95 ms"),
        [
            *(
                (name, str(phase["answers"]), str(phase["tokens"]), *_latencies(phase))
                for name, phase in phases.items()
            ),
            ("ratio", "", "", ", ".join(ratios[:2]), ", ".join(ratios[2:])),
        ],
    )
    faults = [item for phase in phases.values() for item in phase["faults"].items()]
    endings = [(name, ", ".join(f"{number} {ending}" for ending, number in its.items())) for name, its in faults]
    page.table(("fault", "endings"), endings, text_columns=(0, 1))
    memory, after = report["memory"], report["after"]
    page.lines(
        f"memory: {memory['first_mb']} to {memory['last_mb']} MiB, {memory['mb_per_minute']:+.2f} MiB a minute",
        "left: " + ", ".join(f"{name} {value} (was {report['before'][name]})" for name, value in after.items()),
        f"SIGTERM: {report['end']['endings']}, exit status {report['end']['exit_status']}",
        *(report["broken"] or ("all bounds are kept",)),
    )


def _latencies(phase: Mapping[str, Any]) -> list[str]:
    return [f"{phase[figure]['p50']:.1f}, {phase[figure]['p95']:.1f}" for figure in LATENCIES]
