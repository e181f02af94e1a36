"""The figures of levels of load, computed from their answers, as a table and as a picture.

All times are in milliseconds, of requests that were answered completely; the others are counted as failed.

- ``ttft_ms``: from when a request was due to its first text.
- ``inter_token_ms``: a server sends the tokens of one verify as one chunk, so a chunk has several tokens when drafts
  are accepted. An OpenAI-compatible stream does not say how many; only the usage at its end has the number n of tokens
  of the whole answer. With c chunks a chunk counts as n / c tokens, and each gap between two chunks of that answer,
  times c / n, is a sample. The time before the first chunk is in the time to first token, not in here.
- ``inter_chunk_ms``: the same gaps, not divided, as a reader sees them.
- ``end_to_end_ms``: from when a request was due to the end of its answer.
- ``accept_length``: tokens over (tokens - accepted drafts), of all answers together. One token per verify is the
  target's own, so the denominator is the number of verify steps.
- ``distinct_4gram_ratio``: mean over answers, of words and punctuation marks, because the stream has no token ids.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from specmamba.bench.serving.load import Answer, Failure, Run
from specmamba.measure.report import distinct_4gram_ratio, percentile, picture

PERCENTILES = (50, 90, 99)
LOOPING = 0.5  # share of distinct 4-grams below which acceptance says little


def spread(seconds: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles, in milliseconds."""
    values = [value * 1e3 for value in seconds]
    mean = statistics.fmean(values) if values else math.nan
    return {"mean": round(mean, 3), **{f"p{q}": round(percentile(values, q), 3) for q in PERCENTILES}}


def level_report(run: Run, concurrency: int | None, request_rate: float | None) -> dict[str, Any]:
    """The figures of one level of load, as a JSON object."""
    answers = [outcome for outcome in run.outcomes if isinstance(outcome, Answer)]
    failures = [outcome for outcome in run.outcomes if isinstance(outcome, Failure)]
    tokens, prompt_tokens = sum(a.num_tokens for a in answers), sum(a.num_prompt_tokens for a in answers)
    ratios = [distinct_4gram_ratio(re.findall(r"\w+|[^\w\s]", a.text)) for a in answers]
    return {
        "concurrency": concurrency,
        "request_rate": request_rate,
        "sent_rate": _sent_rate(run.sent_times) if request_rate is not None else None,
        "requests": len(run.outcomes),
        "completed": len(answers),
        "failed": len(failures),
        "rejected_429": sum(failure.status == 429 for failure in failures),
        "errors": _errors(failures),
        "duration_s": round(run.duration_s, 3),
        "request_throughput": round(len(answers) / run.duration_s, 3),
        "output_token_throughput": round(tokens / run.duration_s, 3),
        "prompt_tokens": prompt_tokens,
        "cached_prompt_tokens": sum(a.num_cached_tokens for a in answers),
        "output_tokens": tokens,
        "accept_length": accept_length(answers),
        "distinct_4gram_ratio": statistics.fmean(ratios) if ratios else math.nan,
        "ttft_ms": spread(a.chunk_times[0] for a in answers if a.chunk_times),
        "inter_token_ms": spread(gap * len(a.chunk_times) / a.num_tokens for a in answers for gap in _gaps(a)),
        "inter_chunk_ms": spread(gap for a in answers for gap in _gaps(a)),
        "end_to_end_ms": spread(a.end_s for a in answers),
    }


def accept_length(answers: Sequence[Answer]) -> float | None:
    """Tokens per verify step; None when the server does not report accepted drafts, or there was no output."""
    reported = [(a.num_tokens, a.num_accepted_tokens) for a in answers if a.num_accepted_tokens is not None]
    num_tokens = sum(tokens for tokens, _ in reported)
    num_steps = num_tokens - sum(accepted for _, accepted in reported)
    return num_tokens / num_steps if num_steps > 0 else None


def _gaps(answer: Answer) -> list[float]:
    return [after - before for before, after in pairwise(answer.chunk_times)]


def _sent_rate(sent_times: Sequence[float]) -> float:
    """Requests per second that were sent; less than asked for if this process cannot keep up."""
    elapsed = sent_times[-1] - sent_times[0]
    return (len(sent_times) - 1) / elapsed if elapsed > 0 else math.nan


def _errors(failures: Sequence[Failure]) -> dict[str, dict[str, Any]]:
    counts = Counter(failure.kind for failure in failures)
    first = {failure.kind: failure.message for failure in reversed(failures)}
    return {kind: {"count": count, "message": first[kind]} for kind, count in counts.most_common()}


def print_report(report: Mapping[str, Any]) -> None:
    """Print a table with a row per level, then failures and warnings."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # a file has no width
    levels = report["levels"]
    console.print(
        f"{report['model']}, {report['num_requests']} requests per level, {report['max_tokens']} new tokens at the "
        f"most, temperature {report['temperature']:g}; times in ms as p50/p90/p99",
        markup=False,
    )
    is_open = levels[0]["request_rate"] is not None
    load = ("asked/s", "sent/s") if is_open else ("clients",)
    rates, times = ("req/s", "tokens/s"), ("first token", "per token", "end to end")
    has_cache = any(level["cached_prompt_tokens"] for level in levels)
    load = (*load, "cached") if has_cache else load
    table = Table(*load, *rates, *times, "accepted", "4-grams", "failed", "429", box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.justify, column.overflow = "right", "fold"  # a narrow terminal must not cut off figures
    for level in levels:
        table.add_row(*_cells(level, is_open, has_cache))
    console.print(table)
    for line in _remarks(levels):
        console.print(line, markup=False, soft_wrap=True)


def _cells(level: Mapping[str, Any], is_open: bool, has_cache: bool) -> list[str]:
    load = [f"{level['request_rate']:g}", _number(level["sent_rate"], 2)] if is_open else [str(level["concurrency"])]
    cached = [_cached_share(level)] if has_cache else []
    return [
        *load,
        *cached,
        _number(level["request_throughput"], 2),
        _number(level["output_token_throughput"], 1),
        *(
            "/".join(_number(level[name][f"p{q}"], digits) for q in PERCENTILES)
            for name, digits in (("ttft_ms", 0), ("inter_token_ms", 1), ("end_to_end_ms", 0))
        ),
        _number(level["accept_length"], 2),
        _number(level["distinct_4gram_ratio"], 2),
        str(level["failed"]),
        str(level["rejected_429"]),
    ]


def _cached_share(level: Mapping[str, Any]) -> str:
    """Share of a level's prompt tokens that came from the server's prefix cache."""
    return f"{level['cached_prompt_tokens'] / level['prompt_tokens']:.0%}" if level["prompt_tokens"] else "-"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _remarks(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for level in levels:
        for kind, error in level["errors"].items():
            lines.append(f"{level_name(level)}: {error['count']} failed: {kind}: {error['message']}")
    if any(level["cached_prompt_tokens"] for level in levels):
        share = "cached: share of the prompt tokens that came from the server's prefix cache"
        is_same = len({_cached_share(level) for level in levels}) == 1
        lines.append(share if is_same else f"{share}; it differs, so the levels did not do the same work")
    if any(level["distinct_4gram_ratio"] < LOOPING and level["accept_length"] for level in levels):
        lines.append("warning: the text repeats itself, which flatters acceptance: raise --temperature")
    return lines


def level_name(level: Mapping[str, Any]) -> str:
    """The name of a level in lines and in the picture."""
    if level["request_rate"] is not None:
        return f"{level['request_rate']:g}/s"
    return f"{level['concurrency']} client" + ("s" if level["concurrency"] > 1 else "")


def plot_report(path: Path, report: Mapping[str, Any]) -> None:
    """Plot latency over throughput, a point per level: time to first token, and time per token.

    Raises:
        ConfigError: the file cannot be written; the message names ``--plot``.
    """
    levels = [level for level in report["levels"] if level["completed"]]
    with picture(path, 10, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        _plot_latency(left, levels, "ttft_ms", "time to first token, ms")
        _plot_latency(right, levels, "inter_token_ms", "time per output token, ms")
        figure.suptitle(f"{report['model']}, temperature {report['temperature']:g}")


def _plot_latency(axes: Any, levels: Sequence[Mapping[str, Any]], name: str, title: str) -> None:
    throughput = [level["output_token_throughput"] for level in levels]
    for q, style in ((50, "o-"), (99, "s--")):
        axes.plot(throughput, [level[name][f"p{q}"] for level in levels], style, label=f"p{q}")
    for level, x in zip(levels, throughput, strict=True):
        axes.annotate(
            level_name(level), (x, level[name]["p50"]), xytext=(0, -14), textcoords="offset points", ha="center"
        )
    axes.set(xlabel="output tokens per second, all requests", ylabel=title, ylim=(0, None))
    axes.margins(x=0.12)
    axes.grid(alpha=0.3)
    axes.legend()
