"""How long the command line takes to answer, a server to be ready, and what an idle one holds.

    python -m specmamba.bench.startup [--json FILE] [--runs 9] [--servers 3] [any engine flag]

Every run is a process of its own, so that imports count; the runs take turns. An import of PyTorch alone stands beside
them: what a server takes above that is its own. The first server of a machine compiles native code and measures times
of steps: start one before.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specmamba.bench.serving.server import python_path, started_server
from specmamba.config import EngineConfig
from specmamba.errors import SpecmambaError
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.report import Count, JsonFile, machine, median_with_range, progress_bar, versions

PROG = "python -m specmamba.bench.startup"
COMMANDS = {
    "specmamba --version": ("-m", "specmamba", "--version"),
    "specmamba --help": ("-m", "specmamba", "--help"),
    "specmamba serve --help": ("-m", "specmamba", "serve", "--help"),
    "a wrong flag": ("-m", "specmamba", "serve", "--prot", "1"),
    "a wrong value": ("-m", "specmamba", "serve", "--port", "x"),
}
_RSS = "import re; print(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1])"
TORCH = ("-c", f"import torch; {_RSS}")
READY, IDLE, TORCH_TIME, TORCH_SIZE = "server ready", "idle server", "import torch", "import torch, memory"
STATUS = {"a wrong flag": 2, "a wrong value": 2}
Figures = dict[tuple[str, str], list[float]]  # values by name and unit


class StartupConfig(EngineConfig, JsonFile):
    """Time of the command line's answers and of a server's start, and an idle server's memory."""

    runs: Annotated[Count, Field(description="runs of each command")] = 9
    servers: Annotated[Count, Field(description="servers that are started, one after the other")] = 3
    idle_seconds: Annotated[float, Field(ge=0, le=600, description="from ready to the reading of memory")] = 2.0
    startup_timeout: Annotated[float, Field(gt=0, description="seconds for a server to start")] = 300.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, StartupConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: StartupConfig) -> dict[str, Any]:
    """Run all commands and servers; the report as a JSON object.

    Raises:
        SpecmambaError: a command ends with another status than it should, or a server does not start.
    """
    figures: Figures = defaultdict(list)
    with progress_bar("startup", config.runs + config.servers) as advance:
        for _ in range(config.runs):
            for name, arguments in COMMANDS.items():
                figures[name, "s"].append(_timed(name, arguments)[0])
            seconds, output = _timed(TORCH_TIME, TORCH)
            figures[TORCH_TIME, "s"].append(seconds)
            figures[TORCH_SIZE, "MiB"].append(int(output) / 1024)
            advance()
        for _ in range(config.servers):
            _start_server(config, figures)
            advance()
    return {
        "model": config.model or "demo",
        "machine": machine(),
        "python": sys.version.split()[0],
        "versions": versions(("specmamba", "torch", "transformers", "pydantic")),
        "results": [_row(name, unit, values) for (name, unit), values in figures.items()],
    }


def _timed(name: str, arguments: Sequence[str]) -> tuple[float, str]:
    """Run Python. Returns its seconds and its output."""
    began = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if ended.returncode != STATUS.get(name, 0):
        raise SpecmambaError(f"{name}: ended with status {ended.returncode}: {ended.stderr.strip()[-500:]}")
    return seconds, ended.stdout


def _start_server(config: StartupConfig, figures: Figures) -> None:
    began = time.perf_counter()
    with started_server(config, None, config.startup_timeout) as (_, server):
        figures[READY, "s"].append(time.perf_counter() - began)
        time.sleep(config.idle_seconds)
        text = Path(f"/proc/{server.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+)", text, re.MULTILINE)
        figures[IDLE, "MiB"].append(int(found[1]) / 1024 if found else float("nan"))


def _row(name: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    return {
        "name": name,
        "unit": unit,
        **median_with_range(values, 3),
        "runs": len(values),
    }


def print_report(report: Report) -> None:
    """Print the table of figures."""
    page = Page()
    page.lines(f"{report['model']}, Python {report['python']}", report["machine"])
    rows = [
        (row["name"], row["unit"], f"{row['median']:.2f}", "{:.2f}-{:.2f}".format(*row["range"]), f"{row['runs']}")
        for row in report["results"]
    ]
    page.table(("", "", "median", "range", "runs"), rows, text_columns=(0, 1))


if __name__ == "__main__":
    sys.exit(main())
