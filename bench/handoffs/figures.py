"""Figures of handoffs and of streams beside arriving prompts, by round, and their medians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from specmamba.bench.handoffs.servers import APART, ONE, Counted
from specmamba.bench.handoffs.traffic import Stream, Traffic
from specmamba.errors import SpecmambaError
from specmamba.measure.report import median_with_range, percentile

Figures = Mapping[str, float]
QUIET, ARRIVALS = "no arrivals", "long prompts arrive"
HELD = "apart, prompt held"  # the prefill server has run the prompt already
DIGITS = 3
STREAM_FIGURES = ("gap_p50_ms", "gap_p99_ms", "gap_max_ms", "tokens_per_second")


def window(streams: Sequence[Stream]) -> tuple[float, float]:
    """The time in which all streams run: from the last first token to the end of the first stream that ends."""
    return max(stream.events[0].time for stream in streams), min(stream.events[-1].time for stream in streams)


def traffic_figures(traffic: Traffic) -> dict[str, float]:
    """Figures of the time in which all streams run.

    Returns:
        ``gap_p50_ms``, ``gap_p99_ms`` and ``gap_max_ms`` between two events of a stream, ``tokens_per_second`` of all
        streams, and with arrivals ``arrivals``, their number, and ``arrival_first_token_ms``, the median.

    Raises:
        SpecmambaError: there is no such time.
    """
    begin, end = window(traffic.streams)
    gaps, tokens = list[float](), 0
    for stream in traffic.streams:
        inside = [event for event in stream.events if begin <= event.time <= end]
        gaps += [1e3 * (after.time - before.time) for before, after in pairwise(inside)]
        tokens += sum(event.tokens for event in inside if event.time > begin)
    if not gaps:
        raise SpecmambaError("streams end before others have begun: raise --stream-tokens")
    figures = {
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99),
        "gap_max_ms": max(gaps),
        "tokens_per_second": tokens / (end - begin),
    }
    if traffic.arrivals:
        figures["arrivals"] = len(traffic.arrivals)
        figures["arrival_first_token_ms"] = 1e3 * median(stream.first_s for stream in traffic.arrivals)
    return figures


def handoff_figures(first_s: Mapping[str, float], prefill: Counted, decode: Counted) -> dict[str, float]:
    """Figures of one prompt length in one round.

    Args:
        first_s: seconds to the first token, by way: ``ONE``, ``APART`` and ``HELD``.
        prefill: what the prefill server has counted of the prompt that was held.
        decode: what the decode server has.
    """
    return {
        "first_token_ms_one_server": 1e3 * first_s[ONE],
        "first_token_ms_apart": 1e3 * first_s[APART],
        "first_token_ms_held": 1e3 * first_s[HELD],
        "apart_over_one_server": first_s[APART] / first_s[ONE],
        "bytes_sent": prefill.num_bytes / prefill.num_handoffs,
        "bytes_taken_over": decode.num_bytes / decode.num_handoffs,
        "sending_ms": 1e3 * prefill.seconds / prefill.num_handoffs,
        "taking_over_ms": 1e3 * decode.seconds / decode.num_handoffs,
    }


def medians(rounds: Sequence[Figures]) -> dict[str, Any]:
    """The median and the range over rounds of each figure."""
    return {name: median_with_range([figures[name] for figures in rounds], DIGITS) for name in rounds[0]}


def stream_medians(played: Mapping[tuple[str, str], Sequence[Figures]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Medians by way and by whether prompts arrive, with ratios within rounds.

    Args:
        played: the figures of every round, by way and by ``QUIET`` or ``ARRIVALS``.

    Returns:
        By way and by whether prompts arrive: medians of the figures; ``..._over_quiet``, of the same way where none
        arrive; of two servers ``..._over_one_server``, of one server with the same arrivals.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (way, load), rounds in played.items():
        row = medians(rounds)
        if load == ARRIVALS:
            row |= _ratios(rounds, played[way, QUIET], "quiet")
        if way == APART:
            row |= _ratios(rounds, played[ONE, load], "one_server")
        found.setdefault(way, {})[load] = row
    return found


def _ratios(rounds: Sequence[Figures], others: Sequence[Figures], name: str) -> dict[str, Any]:
    pairs = list(zip(rounds, others, strict=True))
    return {
        f"{figure}_over_{name}": median_with_range([own[figure] / other[figure] for own, other in pairs], DIGITS)
        for figure in STREAM_FIGURES
    }
