"""Every operator against PyTorch's form, other packages and what the machine can do.

    specmamba bench ops [--op NAME ...] [--device auto|cpu|cuda] [--quick] [--rounds N] [--json FILE | --save]
    specmamba bench ops --table FILE

An operator's tests run first, and an operator with a failing test is not timed. The result of every form is compared
with PyTorch's on the very inputs that are timed. All forms take turns within a round; measure.py describes how they are
timed and what the roofline is, case.py which bytes and operations count. ``--table`` prints the README's table from a
JSON file.

The exit status is 1 when a test failed, or when one of our forms could not run or was wrong.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from specmamba.bench.ops.tables import has_failed, markdown, print_report
from specmamba.config import CommandLine
from specmamba.errors import ConfigError
from specmamba.measure.command import put_out, run_command
from specmamba.measure.report import JsonFile, checked_file, write_json

PROG = "specmamba bench ops"


class OpsConfig(CommandLine, JsonFile):
    """Operators against PyTorch, other packages and the machine's roofline."""

    op: Annotated[
        list[str], Field(default_factory=list, description="operators to time, such as ssd or ssd.extend; none: all")
    ]
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: cuda where there is one")] = "auto"
    rounds: Annotated[int, Field(ge=1, description="rounds; times are medians over them")] = 7
    quick: Annotated[bool, Field(description="fewer shapes")] = False
    save: Annotated[bool, Field(description="write all figures to bench/results/DEVICE/DATE-ops.json")] = False
    table: Annotated[Path | None, Field(description="measure nothing: print this report as a Markdown table")] = None

    @model_validator(mode="after")
    def _flags_go_together(self) -> OpsConfig:
        if self.save and self.json is not None:
            raise ValueError("--save and --json both say where the figures go: drop one")
        if self.table is not None and (self.save or self.json is not None or self.op):
            raise ValueError("--table prints a report that is there: drop the other flags")
        return self


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 1 when a test failed or a form was wrong, 130 after Ctrl-C."""
    return run_command(PROG, OpsConfig, repeat_flag(sys.argv[1:] if arguments is None else arguments), _run)


def _run(config: OpsConfig) -> int:
    if config.table is not None:
        return _print_table(config.table)
    report = measure_and_report(config)
    put_out(config, report, print_report)
    if config.save:
        write_json(_saved_path(report), report)
    return 1 if has_failed(report) else 0


def repeat_flag(arguments: list[str], flag: str = "--op") -> list[str]:
    """Rewrite ``--op a b`` as ``--op a --op b``, which the parser of lists expects."""
    given: list[str] = []
    is_value = is_open = False
    for argument in arguments:
        if argument.startswith("-"):
            is_open, is_value = argument == flag or argument.startswith(f"{flag}="), argument == flag
        else:
            given += [flag] if is_open and not is_value else []
            is_value = False
        given.append(argument)
    return given


def measure_and_report(config: OpsConfig) -> dict[str, Any]:
    """Measure the chosen operators; the report as a JSON object.

    Raises:
        ConfigError: no such operator or device, or there are no tests to run before.
    """
    from specmamba.bench.ops import suite
    from specmamba.bench.ops.measure import Effort

    operators, root = suite.chosen_operators(config.op), suite.checkout()
    effort = Effort(
        config.rounds, suite.REPEATS, config.quick, False, lambda of, with_gpu: suite.find_red(of, root, with_gpu)
    )
    return suite.report_of(operators, suite.device_of(config.device), effort)


def _saved_path(report: dict[str, Any]) -> Path:
    """The file of ``--save``. Raises ConfigError: it cannot be written."""
    name = re.sub(r"[^a-z0-9]+", "-", report["device"].lower()).strip("-")
    folder = Path(__file__).resolve().parents[1] / "results" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return checked_file(folder / f"{datetime.date.today()}-ops.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--save: {error}") from None


def _print_table(path: Path) -> int:
    """Print the README's table from a report. Raises ConfigError: the file is no report of this benchmark."""
    try:
        print(markdown(json.loads(path.read_text("utf8"))), end="")
    except OSError as error:
        raise ConfigError(f"--table: {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"--table: {path} is no report of specmamba bench ops") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
