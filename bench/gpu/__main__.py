"""All that is to be measured on a machine with a GPU, in one command and within minutes.

    specmamba bench gpu [--minutes 10] [--json FILE]
    specmamba bench gpu --dry-run

The tests that need a GPU; the operator table (``specmamba bench ops --quick``); texts of the CPU and the GPU compared;
and an end-to-end table: the demo inflated to the sizes of Qwen3.5-4B and -9B, which keep its function and so its
acceptance length, plain, with chains and with trees, with and without CUDA graphs, with records and with snapshots.
plan.py has the order. What does not fit the minutes is listed as left out. The report is written after every row.

``--dry-run`` goes the same way on the CPU, with the demo and a few tokens: it says nothing about speed.

The exit status is 1 when a test was red, a text diverged, or something could not run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specmamba.command_line import exit_with_error, read_flags
from specmamba.errors import ConfigError, SpecmambaError
from specmamba.measure.report import CommandLine, JsonFile, checked_file, machine

PROG = "specmamba bench gpu"
DEFAULT_FILE = Path("specmamba-bench-gpu.json")


class GpuConfig(CommandLine, JsonFile):
    """Tests, operators, texts and end-to-end speed on a GPU."""

    minutes: Annotated[float, Field(gt=0, le=600, description="what does not fit is left out, and listed")] = 10.0
    dry_run: Annotated[bool, Field(description="the same way on the CPU, with the demo: no figure of speed")] = False


def main(arguments: list[str] | None = None) -> int:
    """Run everything. Returns the exit status: 1 when something is wrong, 130 after Ctrl-C."""
    try:
        config = read_flags(GpuConfig, PROG, sys.argv[1:] if arguments is None else arguments)
        path = _report_file(config)
        report = measure_and_report(config, path)
    except SpecmambaError as error:
        exit_with_error(PROG, error)
    except KeyboardInterrupt:
        return 130
    from specmamba.bench.gpu.tables import has_failed, print_report

    print_report(report)
    print(f"report: {path}")
    return 1 if has_failed(report) else 0


def measure_and_report(config: GpuConfig, path: Path) -> dict[str, Any]:
    """All figures, as in the file.

    Raises:
        ConfigError: there is no GPU, or the file cannot be written.
    """
    from specmamba.bench.gpu.plan import Budget
    from specmamba.bench.gpu.run import Session, run_all
    from specmamba.bench.gpu.tables import targets_of

    report = _empty_report(config)
    session = Session(report, path, Budget(60 * config.minutes), config.dry_run, lambda line: print(line, flush=True))
    session.save()  # a file that cannot be written is found out now
    run_all(session)
    report["targets"] = targets_of(report)
    session.save()
    return report


def _empty_report(config: GpuConfig) -> dict[str, Any]:
    import torch

    from specmamba.bench.gpu.rows import TEMPERATURE
    from specmamba.bench.ops.suite import all_versions, device_name

    if not config.dry_run and not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA device here: --dry-run goes the same way on the CPU, without figures of speed"
        )
    return {
        "dry_run": config.dry_run,
        "device": device_name(torch.device("cpu" if config.dry_run else "cuda")),
        "machine": machine(),
        "versions": all_versions(),
        "minutes": config.minutes,
        "temperature": TEMPERATURE,
        "seconds": 0.0,
        "tests": None,
        "operators": None,
        "texts": None,
        "models": {},
        "rows": [],
        "left_out": [],
        "failed": [],
        "targets": [],
    }


def _report_file(config: GpuConfig) -> Path:
    """Raises ConfigError: nothing can be written there."""
    if config.json is not None:
        return config.json
    try:
        return checked_file(DEFAULT_FILE)
    except ValueError as error:
        raise ConfigError(f"--json: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
