"""The figures of a siege, the bounds that they must keep, and their table."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specmamba.bench.serving.report import percentile
from specmamba.bench.soak.clients import Tally

LATENCIES = ("first_ms", "per_token_ms")
_POOLS = {"kv_tokens": 0, "states": 0}  # nothing may be held by an idle server with an empty cache
_SAME = ("free_pages", "free_states")
_SPARE = {"descriptors": 0, "threads": 8}  # more than before: pools of threads grow to their size when first used


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may not be exceeded. ``slowdown``: of good clients, with bad ones over without."""

    slowdown: float
    mb_per_minute: float


def phase_report(tallies: Sequence[Tally]) -> dict[str, Any]:
    """All phases of a kind: latencies of well-behaved clients in milliseconds, and what happened to whom."""
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
    """Memory in MiB over time in seconds: ends, and the slope of the least-squares line in MiB per minute."""
    times, sizes = [time for time, _ in samples], [size for _, size in samples]
    enough = len(set(times)) > 1
    slope = statistics.linear_regression(times, sizes).slope * 60 if enough else math.nan
    return {"first_mb": round(sizes[0], 1), "last_mb": round(sizes[-1], 1), "mb_per_minute": round(slope, 3)}


def slowdowns(phases: Mapping[str, Any]) -> dict[str, float]:
    """Latency with bad clients over that without, by figure."""
    good, mixed = phases.values()
    return {f"{name} p{q}": mixed[name][f"p{q}"] / good[name][f"p{q}"] for name in LATENCIES for q in (50, 95)}


def broken_bounds(report: Mapping[str, Any], bounds: Bounds) -> list[str]:
    """A sentence for each bound that the report breaks."""
    return [*_not_given_back(report), *_not_answered(report), *_too_slow(report, bounds), *_not_ended(report["end"])]


def _not_given_back(report: Mapping[str, Any]) -> list[str]:
    before, after = report["before"], report["after"]
    held = [f"{name}: {after[name]} held by an idle server" for name, none in _POOLS.items() if after[name] != none]
    changed = [f"{name}: {before[name]} before, {after[name]} after" for name in _SAME if before[name] != after[name]]
    grown = [name for name, spare in _SPARE.items() if after[name] > before[name] + spare]
    return [*held, *changed, *(f"{name}: {before[name]} before, {after[name]} after" for name in grown)]


def _not_answered(report: Mapping[str, Any]) -> list[str]:
    broken = []
    for name, phase in report["phases"].items():
        broken += [
            f"{name}: {number} well-behaved clients failed: {text}" for text, number in phase["failures"].items()
        ]
        broken += [] if phase["answers"] else [f"{name}: no well-behaved client got an answer"]
        for fault, endings in phase["faults"].items():
            wrong = {end: number for end, number in endings.items() if end.startswith("5") or end in _NO_ENDS}
            broken += [f"{fault}: {number} times {end}" for end, number in wrong.items()]
    return broken


_NO_ENDS = ("silence", "never stopped")  # a bad client that was not told off


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
    """Latencies, faults and what is left, as tables, and the bounds that were broken."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # a file has no edge

    def say(text: str) -> None:
        console.print(text, markup=False)

    say(
        f"{report['model']}: {report['streams']} streams; with bad clients {report['bad_streams']} of them are bad, "
        f"and {report['bad_clients_beside']} more clients send what is refused"
    )
    table = Table("", "answers", "tokens", "first token p50, p95 ms", "per token p50, p95 ms", box=SIMPLE_HEAD)
    for name, phase in report["phases"].items():
        cells = [f"{phase[figure]['p50']:.1f}, {phase[figure]['p95']:.1f}" for figure in LATENCIES]
        table.add_row(name, str(phase["answers"]), str(phase["tokens"]), *cells)
    ratios = [f"{ratio:.2f}" for ratio in slowdowns(report["phases"]).values()]
    table.add_row("ratio", "", "", ", ".join(ratios[:2]), ", ".join(ratios[2:]))
    console.print(table)
    faults = Table("fault", "endings", box=SIMPLE_HEAD)
    for phase in report["phases"].values():
        for name, endings in phase["faults"].items():
            faults.add_row(name, ", ".join(f"{number} {ending}" for ending, number in endings.items()))
    console.print(faults)
    memory, after = report["memory"], report["after"]
    say(f"memory: {memory['first_mb']} to {memory['last_mb']} MiB, {memory['mb_per_minute']:+.2f} MiB a minute")
    say("left: " + ", ".join(f"{name} {value} (was {report['before'][name]})" for name, value in after.items()))
    say(f"SIGTERM: {report['end']['endings']}, exit status {report['end']['exit_status']}")
    for line in report["broken"] or ("all bounds are kept",):
        say(line)
