"""The program ``python -m specmamba.bench.inflate``."""

from __future__ import annotations

import sys

from specmamba.bench.inflate.options import InflateConfig
from specmamba.measure.command import run_command

PROG = "python -m specmamba.bench.inflate"


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint and print what it is; returns the exit status."""
    return run_command(PROG, InflateConfig, arguments, _run)


def _run(config: InflateConfig) -> int:
    from specmamba.bench.inflate.checkpoint import inflate  # --help must not wait for torch

    print_report(inflate(config), config)
    return 0


def print_report(rows: dict[str, tuple[int, int]], config: InflateConfig) -> None:
    """Sizes before and after."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", str(config.model.name), config.out.name, title=f"{config.out}, seed {config.seed}")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, (before, after) in rows.items():
        style = None if before == after else "bold"
        table.add_row(name, f"{before:,}", f"{after:,}", style=style)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
