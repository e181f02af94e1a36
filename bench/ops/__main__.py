"""Every operator against PyTorch's form, other packages and what the machine can do.

    specmamba bench ops [--op NAME ...] [--device auto|cpu|cuda] [--quick] [--rounds N] [--json FILE | --save]
    specmamba bench ops --table FILE

An operator's tests run first, and a red one is not timed. Every form's result is compared with PyTorch's on the very
inputs that are timed. All forms take turns within a round; clock.py says how they are timed and what the roofline
is, case.py what bytes and operations count. ``--table`` prints the README's table from a JSON file.

The exit status is 1 when a test was red, or when one of our forms could not run or was wrong.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from specmamba.command_line import exit_with_error, read_flags
from specmamba.errors import ConfigError, SpecmambaError
from specmamba.measure.report import CommandLine, JsonFile, checked_file, machine, versions, write_json

if TYPE_CHECKING:  # --help must not wait for torch
    import torch

PROG = "specmamba bench ops"
PEERS = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
PEERS |= {"flashinfer": "flashinfer-python"}  # what is imported: what is installed
REPEATS = 10  # in a round, on a GPU


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
    """Run the benchmark. Returns the exit status: 1 when a test was red or a form wrong, 130 after Ctrl-C."""
    try:
        config = read_flags(OpsConfig, PROG, repeat_flag(sys.argv[1:] if arguments is None else arguments))
        if config.table is not None:
            return _print_table(config.table)
        report = measure_and_report(config)
        return put_out(config, report)
    except SpecmambaError as error:
        exit_with_error(PROG, error)
    except KeyboardInterrupt:
        return 130


def repeat_flag(arguments: list[str], flag: str = "--op") -> list[str]:
    """``--op a b`` as ``--op a --op b``, which is what parsers of lists expect."""
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
    """All figures, as in the JSON file.

    Raises:
        ConfigError: no such operator or device, or there are no tests to run before.
    """
    from specmamba.bench.ops.measure import Effort
    from specmamba.bench.ops.registry import chosen_operators
    from specmamba.bench.ops.suite import checkout, find_red

    operators, root = chosen_operators(config.op), checkout()
    effort = Effort(config.rounds, REPEATS, config.quick, False, lambda of, with_gpu: find_red(of, root, with_gpu))
    return report_of(operators, device_of(config.device), effort)


def report_of(operators: Any, device: torch.device, effort: Any) -> dict[str, Any]:
    """Measure, and say on what: the report of any ``op_run.Effort``."""
    from specmamba.bench.ops.measure import measure_operators, place_of
    from specmamba.bench.ops.tables import targets_of

    place = place_of(device)
    report = {
        "device": device_name(device),
        "machine": machine(),
        "versions": all_versions(),
        "dry_run": effort.is_tiny,
        "rounds": effort.rounds,
        **measure_operators(operators, place, effort),
    }
    is_gpu = device.type == "cuda" and not effort.is_tiny
    missing = [package for package in PEERS if package not in report["versions"]]
    notes = [f"not installed: {', '.join(missing)}"] if is_gpu and missing else []
    notes += [] if device.type == "cuda" else ["other packages are timed on a GPU only, where they run"]
    return {**report, "notes": notes, "targets": targets_of(report) if is_gpu else []}


def device_of(name: str) -> torch.device:
    """Raises ConfigError: there is no GPU."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine()


def all_versions() -> dict[str, str]:
    """Of what computes here, the other packages by what is imported."""
    found = versions(("specmamba", "torch"))
    for name, package in {"triton": "triton", **PEERS}.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found


def put_out(config: OpsConfig, report: dict[str, Any]) -> int:
    """Table and JSON; the exit status."""
    from specmamba.bench.ops.tables import has_failed, print_report

    print_report(report)
    path = _saved_path(report) if config.save else config.json
    if path is not None:
        write_json(path, report)
    return 1 if has_failed(report) else 0


def _saved_path(report: dict[str, Any]) -> Path:
    """Raises ConfigError: nothing can be written there."""
    name = re.sub(r"[^a-z0-9]+", "-", report["device"].lower()).strip("-")
    folder = Path(__file__).resolve().parents[1] / "results" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return checked_file(folder / f"{datetime.date.today()}-ops.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--save: {error}") from None


def _print_table(path: Path) -> int:
    """Raises ConfigError: this is no report of this benchmark."""
    from specmamba.bench.ops.tables import markdown

    try:
        print(markdown(json.loads(path.read_text("utf8"))), end="")
    except OSError as error:
        raise ConfigError(f"--table: {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"--table: {path} is no report of specmamba bench ops") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
