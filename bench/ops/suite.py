"""Runs an operator's tests before it is timed: a figure of a kernel that computes something else is worth nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from specmamba.bench.ops.case import Operator
from specmamba.errors import ConfigError

TIMEOUT_S = 300
MANY_CORES = 8  # from here on tests run side by side
GIVEN = "SPECMAMBA_TRITON", "TRITON_INTERPRET"  # settings of this process that must not lead tests elsewhere


def checkout() -> Path:
    """The checkout that this benchmark lies in.

    Raises:
        ConfigError: there are no tests: this is an installed wheel.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "tests" / "kernels").is_dir():
        raise ConfigError(
            "operators are tested before they are timed, and an installed package has no tests/ folder: run this from "
            "a checkout of the repository"
        )
    return root


def files_of(operator: Operator, with_gpu: bool) -> list[str]:
    """The operator's test files, relative to the checkout."""
    names = operator.tests + (operator.gpu_tests if with_gpu else ())
    return [f"tests/kernels/test_{name}.py" for name in names]


class Outcome(NamedTuple):
    """Of a run of pytest."""

    is_green: bool
    summary: str  # its last line
    failed: tuple[str, ...]  # lines that name a test or a file that failed


def find_red(operators: Sequence[Operator], root: Path, with_gpu: bool, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """Run the operators' tests, all in one go; for those with a red one what is wrong, by name."""
    files = {operator.name: files_of(operator, with_gpu) for operator in operators}
    lacking = {name: [file for file in own if not (root / file).is_file()] for name, own in files.items()}
    reasons = {name: f"there is no {', '.join(missing)}" for name, missing in lacking.items() if missing}
    rest = {name: own for name, own in files.items() if name not in reasons}
    if not rest:
        return reasons
    outcome = run_pytest(root, sorted({file for own in rest.values() for file in own}), timeout_s)
    return reasons if outcome.is_green else {**reasons, **_blamed(rest, outcome)}


def _blamed(files: dict[str, list[str]], outcome: Outcome) -> dict[str, str]:
    """The first failure in an operator's files; that of everybody where no file was named."""
    found = {
        name: next((line for line in outcome.failed if any(file in line for file in own)), None)
        for name, own in files.items()
    }
    if not any(found.values()):
        return dict.fromkeys(files, outcome.summary)
    return {name: line for name, line in found.items() if line is not None}


def run_pytest(root: Path, arguments: Sequence[str], timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run tests of a checkout in a process of their own, side by side where there are many cores."""
    cores = os.cpu_count() or 1
    side_by_side = cores >= MANY_CORES and find_spec("xdist") is not None
    spread = ["--numprocesses", str(cores // 2)] if side_by_side else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *spread, *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in GIVEN}
    try:
        ended = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(False, f"no end after {timeout_s:.0f} s", ())
    lines = (ended.stdout + ended.stderr).strip().splitlines() or ["no output"]
    failed = tuple(line for line in lines if line.startswith(("FAILED", "ERROR")))
    return Outcome(ended.returncode == 0, lines[-1], failed)
