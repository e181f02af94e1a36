"""``specmamba doctor``: whether this installation works, and if not, what to do about it.

It looks at packages, the device and the kernels, plans the memory, and then lets the model write the same texts plain
and with drafts: they must be equal. Every part that fails becomes a line with advice, never a traceback.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specmamba.command_line import parse_command_line
from specmamba.measure.report import JsonOption, write_json

PROG = "specmamba doctor"
STANDARD_OUTPUT = Path("-")


class DoctorConfig(JsonOption):
    """Check this installation with a model under these flags; --json alone, or with -, writes to standard output."""


def main(arguments: list[str]) -> int:
    """Print a table, or JSON where that goes to standard output. Returns 1 when something is broken, else 0."""
    config = parse_command_line(DoctorConfig, PROG, complete_json_flag(arguments))
    with waiting() as say:
        report = examine_or_say_why_not(config, say)
    if config.json == STANDARD_OUTPUT:
        print(json.dumps(report, indent=2))
    else:
        from specmamba.doctor.table import print_report

        print_report(report)
        if config.json is not None:
            write_json(config.json, report)
    return 0 if report["ok"] else 1


@contextmanager
def waiting() -> Iterator[Callable[[str], None]]:
    """On a terminal, what is being looked at: kernels that are compiled for the first time take a while."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("the packages") as status:
        yield status.update


def examine_or_say_why_not(config: DoctorConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """The report; where not even torch can be imported, one of the packages alone."""
    try:
        from specmamba.doctor.examine import examine
    except (ImportError, OSError) as failure:  # OSError: a shared library that is missing
        from specmamba.doctor.software import report_without_torch

        return report_without_torch(failure)
    return examine(config, say)


def complete_json_flag(arguments: Sequence[str]) -> list[str]:
    """``--json`` without a file means standard output."""
    completed: list[str] = []
    for place, argument in enumerate(arguments):
        completed.append(argument)
        is_alone = place + 1 == len(arguments) or arguments[place + 1].startswith("--")
        if argument == "--json" and is_alone:
            completed.append(str(STANDARD_OUTPUT))
    return completed
