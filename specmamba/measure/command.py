"""What commands that measure do around their measurement: read flags, print tables, write JSON and pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from specmamba.config import CommandLine, EngineConfig
from specmamba.errors import SpecmambaError
from specmamba.flags.command_line import exit_with_error, parse_command_line, read_flags
from specmamba.measure.report import write_json

if TYPE_CHECKING:
    from rich.console import OverflowMethod
    from rich.table import Table

ConfigT = TypeVar("ConfigT", bound=CommandLine)
ItemT = TypeVar("ItemT")
Report = Mapping[str, Any]
Row = tuple[str, str]
STANDARD_OUTPUT = Path("-")
WIDTH = 150  # characters that the widest table needs


def run_command(
    prog: str,
    config_class: type[ConfigT],
    arguments: list[str] | None,
    run: Callable[[ConfigT], int],
    interrupted: str | None = None,
) -> int:
    """Read the flags of a command and run it. ``--help`` exits with status 0, a mistake in the flags with 2.

    Args:
        prog: the command as it is called, for usage and error messages.
        config_class: its flags. Those of an ``EngineConfig`` also come from the environment and ``--config FILE.toml``.
        arguments: the command line behind the command; None: that of this process.
        run: measures, reports, and returns the exit status.
        interrupted: what to print after Ctrl-C.

    Returns:
        The exit status of ``run``; 130 after Ctrl-C.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if issubclass(config_class, EngineConfig):
            return run(cast("ConfigT", parse_command_line(config_class, prog, given)))
        return run(read_flags(config_class, prog, given))
    except SpecmambaError as error:
        exit_with_error(prog, error)
    except KeyboardInterrupt:
        if interrupted is not None:
            print(f"{prog}: interrupted: {interrupted}", file=sys.stderr)
        return 130


def put_out(
    config: Any,
    report: Report,
    print_report: Callable[[Any], None],
    plot_report: Callable[[Path, Report], None] | None = None,
    *,
    can_print_json: bool = False,
) -> int:
    """Print a report, and write it to the files of ``--json`` and ``--plot``.

    Args:
        config: has ``json``, the path or None, and with ``plot_report`` also ``plot``.
        report: what was measured.
        print_report: writes the tables to standard output.
        plot_report: draws the picture into a file.
        can_print_json: ``--json -`` prints the report as JSON, and nothing else.

    Returns:
        0, the exit status of a command that only reports.

    Raises:
        ConfigError: a file cannot be written.
    """
    if can_print_json and config.json == STANDARD_OUTPUT:
        print(json.dumps(report, indent=2))
        return 0
    print_report(report)
    if config.json is not None:
        write_json(config.json, report)
    if plot_report is not None and config.plot is not None:
        plot_report(config.plot, report)
    return 0


def repeated_flags(arguments: Sequence[str], flags: Collection[str]) -> list[str]:
    """Write ``--flag A B`` as ``--flag A --flag B``, for flags whose lists may have any text in them."""
    rest, open_flag, is_first = [], None, False
    for argument in arguments:
        if argument.startswith("-") or open_flag is None:
            open_flag, is_first = argument if argument in flags else None, True
            rest.append(argument)
        else:
            rest += [argument] if is_first else [open_flag, argument]
            is_first = False
    return rest


class Page:
    """Lines and tables on standard output, so wide that no figure is cut off: a narrow terminal folds the lines."""

    def __init__(self, width: int = WIDTH) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._console.width = max(self._console.width, width)

    def lines(self, *lines: str) -> None:
        """Print text as it is."""
        for line in lines:
            self._console.print(line, markup=False, soft_wrap=True)

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Collection[int] = (0,)
    ) -> None:
        """Print a table. Columns are numbers, which stand to the right, except the ``text_columns``."""
        from rich.box import SIMPLE
        from rich.table import Table

        table = Table(*columns, box=SIMPLE, padding=(0, 1, 0, 0))
        for i, column in enumerate(table.columns):
            column.no_wrap = i == 0 or i not in text_columns
            column.justify = "left" if i in text_columns else "right"
        for row in rows:
            table.add_row(*row)
        self._console.print(table, markup=False)


def section_table(sections: Iterable[Iterable[Row]], overflow: OverflowMethod = "ellipsis") -> Table:
    """A table of names and values; a line separates sections, and empty ones are left out."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow=overflow)
    for rows in filter(None, map(list, sections)):
        if table.row_count:
            table.add_section()
        for row in rows:
            table.add_row(*row)
    return table


def versions_text(report: Report) -> str:
    """Format the ``versions`` of a report: "specmamba 0.1.0, torch 2.13.0"."""
    return ", ".join(f"{name} {version}" for name, version in report["versions"].items())


def in_turns(items: Sequence[ItemT], number: int) -> list[ItemT]:
    """The items of round ``number`` in an order that rotates, so that no item is always the first."""
    first = number % len(items)
    return [*items[first:], *items[:first]]
