"""The figures of what HTTP costs, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WAYS = ("generate", "whole", "streamed")


def summary(drafts: str, clients: int, rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The row of a level, from its tokens per second by way in every round: medians, and those of the ratios."""
    row: dict[str, Any] = {"drafts": drafts, "concurrency": clients}
    for way in WAYS:
        ratios = [rates[way] / rates["generate"] for rates in rounds]
        row[way] = {
            "tokens_per_s": round(statistics.median(rates[way] for rates in rounds), 1),
            "ratio": round(statistics.median(ratios), 4),
            "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        }
    return row


def print_report(report: Mapping[str, Any]) -> None:
    """A table with a row per level."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # a file has no edge
    console.print(
        f"{report['model']}, {report['dtype']}, {report['max_tokens']} tokens per request, temperature "
        f"{report['temperature']:g}; tokens/s, median of {report['rounds']} rounds (over generate; its range)",
        markup=False,
    )
    table = Table("drafts", "clients", *WAYS, box=SIMPLE_HEAD, pad_edge=False)
    for row in report["results"]:
        cells = [_cell(row[way], way) for way in WAYS]
        table.add_row(row["drafts"], str(row["concurrency"]), *cells)
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)


def _cell(figures: Mapping[str, Any], way: str) -> str:
    rate = f"{figures['tokens_per_s']:.0f}"
    if way == "generate":
        return rate
    low, high = figures["ratio_range"]
    return f"{rate} ({figures['ratio']:.2f}; {low:.2f} to {high:.2f})"
