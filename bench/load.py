"""What loading a checkpoint takes: seconds, and the most memory at a time, beside the weights that are kept.

    python -m specmamba.bench.load [--models PATH ...] [--rounds 3] [--json FILE] [any engine flag]

Each model is loaded in a process of its own, in turns. The time is that of weights alone, without an engine's pools
and the times of steps that it measures. Memory is the process's largest resident set less the one before, so
imports do not count and pages of the file that were read do. The first round reads files from disk where memory does
not have them; later ones from memory.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field

from specmamba.errors import ConfigError
from specmamba.flags.command_line import readable
from specmamba.measure.command import Report, put_out, repeated_flags, run_command, versions_text
from specmamba.measure.report import Count, JsonOption, machine, progress_bar, versions

PROG = "python -m specmamba.bench.load"
CHILD = "from specmamba.engine.load_timing import load_here; load_here()"


class LoadConfig(JsonOption):
    """Time and memory of loading checkpoints."""

    models: Annotated[list[str], Field(default_factory=list, description="folders, hub ids, GGUF files; none: --model")]
    rounds: Annotated[Count, Field(description="rounds; medians over them are reported")] = 3


def main(arguments: list[str] | None = None) -> int:
    """Print a table; returns the exit status."""
    given = repeated_flags(sys.argv[1:] if arguments is None else arguments, ("--models",))
    return run_command(PROG, LoadConfig, given, lambda config: put_out(config, measure(config), print_report))


def measure(config: LoadConfig) -> Report:
    """Load every model in turns. Raises ConfigError: one cannot be loaded."""
    if config.device == "cuda":
        raise ConfigError("--device: memory is that of the process, so models are loaded on the CPU")
    paths = config.models or [str(config.model_path)]
    found: dict[str, list[dict[str, float]]] = {path: [] for path in paths}
    with progress_bar("loading", config.rounds * len(paths)) as advance:
        for _ in range(config.rounds):
            for path, loads in found.items():
                loads.append(load_apart(config, path))
                advance()
    rows: list[Report] = [{"model": Path(path).name, "loads": of_model} for path, of_model in found.items()]
    return {"machine": machine(), "versions": versions(), "quantization": config.quantization, "models": rows}


def load_apart(config: LoadConfig, path: str) -> dict[str, float]:
    """Load a model in a new process. Raises ConfigError: it cannot be loaded."""
    flags = config.model_copy(update={"model": path, "device": "cpu"}).model_dump_json(
        exclude={"json", "models", "rounds"}
    )
    done = subprocess.run([sys.executable, "-c", CHILD], input=flags, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise ConfigError(f"{path} cannot be loaded: {last[0]}")
    loaded: dict[str, float] = json.loads(done.stdout)
    return loaded


def print_report(report: Report) -> None:
    """A row per model: medians, and the first round, which may have read the disk."""
    print(f"{report['machine']}; {versions_text(report)}; --quantization {report['quantization']}")
    print(f"{'model':<32}{'weights':>12}{'peak':>12}{'peak/weights':>14}{'seconds':>10}{'first':>8}")
    for each in report["models"]:
        seconds, peaks = ([load[name] for load in each["loads"]] for name in ("seconds", "peak_bytes"))
        weights, peak = each["loads"][0]["weight_bytes"], statistics.median(peaks)
        sizes = f"{readable(weights):>12}{readable(round(peak)):>12}{peak / weights:>14.2f}"
        print(f"{each['model']:<32}{sizes}{statistics.median(seconds):>10.1f}{seconds[0]:>8.1f}")


if __name__ == "__main__":
    sys.exit(main())
