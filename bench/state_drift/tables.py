"""The figures of the state drift benchmark as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDTH = 125  # characters that the table needs


def print_report(report: Mapping[str, Any]) -> None:
    """A row per type of states."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)  # better a line that the terminal folds than figures that are cut off
    total = report["texts"] * report["tokens_per_text"]
    console.print(
        f"{report['model']}, {report['dtype']} on {report['device']}, {report['speculative_state']}: {report['texts']} "
        f"texts of {report['tokens_per_text']:,} tokens, compared with states in float32",
        markup=False,
        soft_wrap=True,
    )
    table = Table(
        *("states", "KiB\nper slot", "largest\nelement", "state\nerror", "at the\nend", "worst\nlayer"),
        *("logits error\nby quarter", "other choice\nby quarter, %", f"of {total:,}"),
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for figures in report["results"]:
        table.add_row(*_row(figures))
    console.print(table)


def _row(figures: Mapping[str, Any]) -> list[str]:
    sizes = [f"{figures['state_bytes_per_slot'] / 1024:,.0f}", f"{figures['largest_state_element']:.3g}"]
    row = [figures["state_dtype"], *sizes]
    if "state_error" not in figures:
        return row
    errors = ("state_error", "state_error_at_the_end", "state_error_largest_layer")
    return [
        *row,
        *(f"{figures[name]:.1e}" for name in errors),
        " ".join(f"{value:.1e}" for value in figures["logits_error_by_part"]),
        " ".join(f"{100 * value:.2f}" for value in figures["flipped_share_by_part"]),
        str(figures["flipped"]),
    ]
