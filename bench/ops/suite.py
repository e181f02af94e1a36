"""All operators: which there are, their tests, which run before anything is timed, and the report of a run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specmamba.bench.ops import attention, codes, layers, recurrent, rows, selective, tokens
from specmamba.bench.ops.case import Operator
from specmamba.bench.ops.measure import Effort, measure_operators, place_of
from specmamba.bench.ops.tables import targets_of
from specmamba.errors import ConfigError
from specmamba.measure.report import machine, progress_bar, versions

PEERS = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
PEERS |= {"flashinfer": "flashinfer-python"}  # name of the import: name of the package
REPEATS = 10  # in a round, on a GPU
TIMEOUT_S = 300
PERCENT = re.compile(r"\[ *(\d+)%\]")  # in a test's line
MANY_CORES = 8  # with so many cores, tests run in parallel
GIVEN = "SPECMAMBA_TRITON", "TRITON_INTERPRET"  # settings of this process that its tests must not inherit

OPERATORS: tuple[Operator, ...] = (
    *recurrent.OPERATORS,
    *selective.OPERATORS,
    *layers.OPERATORS,
    *attention.OPERATORS,
    *rows.OPERATORS,
    *codes.OPERATORS,
    *tokens.OPERATORS,
)


def chosen_operators(names: Sequence[str]) -> list[Operator]:
    """Choose operators by name, or by the part before the dot: ``ssd`` is all of Mamba2's recurrence. No names: all.

    Raises:
        ConfigError: no operator has this name.
    """
    if not names:
        return list(OPERATORS)
    for name in names:
        if not any(_is_called(operator, name) for operator in OPERATORS):
            raise ConfigError(f"--op: there is no operator {name!r}, only {', '.join(o.name for o in OPERATORS)}")
    return [operator for operator in OPERATORS if any(_is_called(operator, name) for name in names)]


def _is_called(operator: Operator, name: str) -> bool:
    return operator.name == name or operator.name.split(".")[0] == name


def checkout() -> Path:
    """The folder of the checkout that has this benchmark.

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


def files_of(operator: Operator, with_gpu: bool, root: Path) -> list[str]:
    """The operator's test files, relative to the checkout; one that is missing is looked for in tests/kernels."""
    found = []
    for name in operator.tests + (operator.gpu_tests if with_gpu else ()):
        file = next(root.glob(f"tests/kernels/**/test_{name}.py"), root / f"tests/kernels/test_{name}.py")
        found.append(str(file.relative_to(root)))
    return found


class Outcome(NamedTuple):
    """The outcome of a run of pytest."""

    is_green: bool
    summary: str  # its last line
    failed: tuple[str, ...]  # lines that name a test or a file that failed


def find_red(operators: Sequence[Operator], root: Path, with_gpu: bool, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """Run the tests of all operators in one process; the first failure of those that fail, by operator."""
    files = {operator.name: files_of(operator, with_gpu, root) for operator in operators}
    lacking = {name: [file for file in own if not (root / file).is_file()] for name, own in files.items()}
    reasons = {name: f"there is no {', '.join(missing)}" for name, missing in lacking.items() if missing}
    rest = {name: own for name, own in files.items() if name not in reasons}
    if not rest:
        return reasons
    outcome = run_pytest(root, sorted({file for own in rest.values() for file in own}), timeout_s)
    return reasons if outcome.is_green else {**reasons, **_blamed(rest, outcome)}


def _blamed(files: dict[str, list[str]], outcome: Outcome) -> dict[str, str]:
    """The first failure in an operator's files; where no failure names a file, all operators have it."""
    found = {
        name: next((line for line in outcome.failed if any(file in line for file in own)), None)
        for name, own in files.items()
    }
    if not any(found.values()):
        return dict.fromkeys(files, outcome.summary)
    return {name: line for name, line in found.items() if line is not None}


def run_pytest(root: Path, arguments: Sequence[str], timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run tests of a checkout in a process of their own, in parallel on many cores, and show how far they are."""
    cores = os.cpu_count() or 1
    side_by_side = cores >= MANY_CORES and find_spec("xdist") is not None
    spread = ["--numprocesses", str(cores // 2)] if side_by_side else []
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *spread, *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in GIVEN} | {"PYTHONUNBUFFERED": "1"}
    lines: list[str] = []
    with (
        progress_bar("tests of these operators, percent", 100) as advance,
        subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as running,
        _ended_with(running),
    ):
        # with the processes that tests have started, which hold its output open
        timer = threading.Timer(timeout_s, os.killpg, (running.pid, signal.SIGKILL))
        timer.start()
        assert running.stdout is not None
        done = 0
        for line in running.stdout:
            lines.append(line.rstrip())
            if (percent := PERCENT.search(line)) is not None:
                while done < int(percent[1]):
                    done += 1
                    advance()
        has_ended = timer.is_alive()
        timer.cancel()
    if not has_ended:
        return Outcome(False, f"no end after {timeout_s:.0f} s", ())
    lines = [line for line in lines if line] or ["no output"]
    failed = tuple(line for line in lines if line.startswith(("FAILED", "ERROR")))
    return Outcome(running.returncode == 0, lines[-1], failed)


@contextmanager
def _ended_with(running: subprocess.Popen[str]) -> Iterator[None]:
    """End a session of its own, which Ctrl-C does not reach, when the context is left by an exception."""
    try:
        yield
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        raise


def report_of(operators: Sequence[Operator], device: torch.device, effort: Effort) -> dict[str, Any]:
    """Measure operators; the report as a JSON object."""
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
    """The device of a ``--device`` flag. Raises ConfigError: there is no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine()


def all_versions() -> dict[str, str]:
    """Versions of the packages that compute here; other packages by the name of their import."""
    found = versions(("specmamba", "torch"))
    for name, package in {"triton": "triton", **PEERS}.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found
