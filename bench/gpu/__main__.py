"""All that is to be measured on a machine with a GPU, in one command and within minutes.

    specmamba bench gpu [--minutes 10] [--json FILE]
    specmamba bench gpu --dry-run

Trees with fewer rows than a product, over memory that holds NaN; the tests that need a GPU; tests of trees under
compute-sanitizer; texts of the CPU and the GPU compared; the operator table (``specmamba bench ops --quick``), whose
kernels run twice and must give the same bits; and an end-to-end table, with the kernels of replayed steps: the demo
inflated to the sizes of Qwen3.5-4B and -9B, which keep its function and so its acceptance length, plain, with chains
and with trees, with and without CUDA graphs, with records and with snapshots. plan.py has the order. What does not fit
the minutes is listed as left out. The report is written after every row.

``--dry-run`` does the same on the CPU, with the demo and a few tokens: its figures of speed mean nothing.

The exit status is 1 when a test failed, a text diverged, or something could not run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specmamba.bench.gpu.plan import BATCHES, CHAIN, PLAIN, TEMPERATURE, TREE, Budget
from specmamba.bench.ops.tables import has_failed as operators_failed
from specmamba.bench.ops.tables import target_lines
from specmamba.config import CommandLine
from specmamba.errors import ConfigError
from specmamba.measure.command import Page, run_command, versions_text
from specmamba.measure.report import JsonFile, checked_file, machine

PROG = "specmamba bench gpu"
DEFAULT_FILE = Path("specmamba-bench-gpu.json")
Figures = Mapping[str, Any]
COLUMNS = ("model", "drafts", "batch", "graphs", "state", "tokens/s", "accepted", "speed-up", "step ms")
GRAPHS_LIMIT = 2.0
IDLE_LIMIT = 0.5  # ms of a replayed step in which no kernel runs


class GpuConfig(CommandLine, JsonFile):
    """Tests, operators, texts and end-to-end speed on a GPU."""

    minutes: Annotated[float, Field(gt=0, le=600, description="what does not fit is left out, and listed")] = 10.0
    dry_run: Annotated[bool, Field(description="the same way on the CPU, with the demo: no figure of speed")] = False


def main(arguments: list[str] | None = None) -> int:
    """Run everything. Returns the exit status: 1 when something is wrong, 130 after Ctrl-C."""
    return run_command(PROG, GpuConfig, arguments, _run)


def _run(config: GpuConfig) -> int:
    path = _report_file(config)
    report = measure_and_report(config, path)
    print_report(report)
    print(f"report: {path}")
    return 1 if has_failed(report) else 0


def measure_and_report(config: GpuConfig, path: Path) -> dict[str, Any]:
    """Measure everything that fits the time; the report as a JSON object.

    Raises:
        ConfigError: there is no GPU, or the file cannot be written.
    """
    from specmamba.bench.gpu.run import Session, run_all

    report = _empty_report(config)
    session = Session(report, path, Budget(60 * config.minutes), config.dry_run, lambda line: print(line, flush=True))
    session.save()  # a file that cannot be written is an error before anything is measured
    run_all(session)
    report["targets"] = targets_of(report)
    session.save()
    return report


def _empty_report(config: GpuConfig) -> dict[str, Any]:
    import torch

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
        "small_trees": None,
        "tests": None,
        "sanitizer": None,
        "operators": None,
        "texts": None,
        "models": {},
        "rows": [],
        "left_out": [],
        "failed": [],
        "targets": [],
    }


def _report_file(config: GpuConfig) -> Path:
    """The file of the report. Raises ConfigError: it cannot be written."""
    if config.json is not None:
        return config.json
    try:
        return checked_file(DEFAULT_FILE)
    except ValueError as error:
        raise ConfigError(f"--json: {error}") from None


def targets_of(report: Figures) -> list[dict[str, Any]]:
    """The targets on a GPU: {"name", "value", "limit", "met"}; ``met`` is None if it was not measured.

    A dry run has no target of speed.
    """
    targets = [] if report["dry_run"] else [_graphs_target(report), _idle_target(report)]
    targets += [_texts_target(report, "float32", "float32 texts that are not the CPU's, token for token")]
    targets += [_texts_target(report, "bfloat16", "bfloat16 texts that differ from plain ones by more than a near tie")]
    return targets


def _graphs_target(report: Figures) -> dict[str, Any]:
    """Plain decoding of one request: speed with CUDA graphs over that without."""
    models = list(dict.fromkeys(row["model"] for row in report["rows"]))
    ratios = {model: _graphs_ratio(report, model) for model in models}
    value = next((ratio for ratio in ratios.values() if ratio is not None), None)
    met = None if value is None else value >= GRAPHS_LIMIT
    name = "plain decoding of one request: graphs over eager"
    return {"name": name, "value": value, "limit": GRAPHS_LIMIT, "at_least": True, "met": met, "by_model": ratios}


def _idle_target(report: Figures) -> dict[str, Any]:
    """The longest idle time of plain decoding's replayed steps, over models and batches."""
    idle = [row["replay"]["idle_ms"] for row in report["rows"] if row["shape"] == PLAIN.name and "replay" in row]
    value = max(idle, default=None)
    met = None if value is None else value <= IDLE_LIMIT
    return {"name": "plain decoding: ms of a step without a kernel", "value": value, "limit": IDLE_LIMIT, "met": met}


def _graphs_ratio(report: Figures, model: str) -> float | None:
    speeds = {
        row["graphs"]: row["tokens_per_second"]
        for row in report["rows"]
        if (row["model"], row["shape"], row["batch_size"]) == (model, PLAIN.name, 1)
    }
    return speeds[True] / speeds[False] if len(speeds) == 2 else None


def _texts_target(report: Figures, dtype: str, name: str) -> dict[str, Any]:
    """Texts that differ: in float32 all, in bfloat16 those that rounding does not explain."""
    if report["texts"] is None:
        return {"name": name, "value": None, "limit": 0, "met": None}
    kinds = ("near_tie", "diverged") if dtype == "float32" else ("diverged",)
    value = sum(counts[kind] for counts in report["texts"][dtype].values() for kind in kinds)
    return {"name": name, "value": value, "limit": 0, "met": value == 0}


def has_failed(report: Figures) -> bool:
    """Whether a test or a tool of the sanitizer failed, a text diverged or something could not run."""
    tests, operators, texts = (report["small_trees"], report["tests"]), report["operators"], report["texts"] or {}
    found_faults = any(found["passed"] is False for found in (report["sanitizer"] or {}).values())
    diverged = any(counts["diverged"] for dtype in ("float32", "bfloat16") for counts in texts.get(dtype, {}).values())
    return bool(
        report["failed"]
        or diverged
        or found_faults
        or any(found is not None and not found["passed"] for found in tests)
        or (operators is not None and operators_failed(operators))
    )


def print_report(report: Figures) -> None:
    """Print the table, speed-ups next to acceptance lengths, texts, what was left out, and targets."""
    page, operators = Page(), report["operators"]
    page.lines(title(report))
    page.table(COLUMNS, [_cells(row) for row in report["rows"]], text_columns=(0, 1, 3, 4))
    page.lines(*_gains(report), *_replays(report), *_texts(report), *_missing(report), *target_lines(report["targets"]))
    page.lines(*(target_lines(operators["targets"])[1:] if operators is not None else []))


def title(report: Figures) -> str:
    """One line of device, versions and time."""
    label = "DRY RUN on the CPU with the demo: no figure of speed means anything; " if report["dry_run"] else ""
    return (
        f"{label}{report['device']}; {versions_text(report)}; temperature "
        f"{report['temperature']:g}; {report['seconds']:.0f} s of {report['minutes']:g} minutes"
    )


def _cells(row: Figures) -> list[str]:
    ratio = row["speed_up"]
    return [
        *(row["model"], row["shape"], str(row["batch_size"]), "on" if row["graphs"] else "off", row["state"]),
        f"{row['tokens_per_second']:.1f}",
        f"{row['accept_length']:.2f}",
        "" if ratio is None else f"{ratio:.2f}x",
        f"{row['step_ms']:.2f}",
    ]


def _gains(report: Figures) -> list[str]:
    """Lines of speed-ups, each with the acceptance length that bounds it, for the batch sizes of ``BATCHES``."""
    if report["dry_run"]:
        return []
    found = []
    for row in report["rows"]:
        is_judged = row["graphs"] and row["state"] == "records" and row["batch_size"] in BATCHES
        if is_judged and row["shape"] in (CHAIN.name, TREE.name) and row["speed_up"] is not None:
            pair = f"{row['speed_up']:.2f}x at acceptance length {row['accept_length']:.2f}"
            found.append(f"  {row['model']} {row['shape']} batch {row['batch_size']}: {pair}")
    return ["speed-up over plain decoding:", *found] if found else []


def _replays(report: Figures) -> list[str]:
    """Lines of replayed steps: their kernels, the time without one, and the kernels that take longest."""
    lines = []
    for row in report["rows"]:
        if (replay := row.get("replay")) is None:
            continue
        longest = ", ".join(f"{each['name']} {each['microseconds']:.0f} us" for each in replay["longest"][:4])
        lines.append(
            f"  {row['model']} {row['shape']} batch {row['batch_size']}: {replay['launches']:.0f} kernels, "
            f"{replay['kernels_ms']:.2f} ms, idle {replay['idle_ms']:.2f} ms; {longest}"
        )
    return ["replayed steps:", *lines] if lines else []


def _texts(report: Figures) -> list[str]:
    texts = report["texts"]
    if texts is None:
        return []
    lines = [f"texts of the demo, {texts['num_prompts']} prompts x {texts['max_tokens']} tokens, greedy:"]
    for dtype, other in (("float32", "plain ones on the CPU"), ("bfloat16", "plain ones on the same device")):
        for shape, counts in texts[dtype].items():
            words = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in counts.items() if count)
            lines.append(f"  {dtype} {shape} against {other}: {words}")
    return lines


def _missing(report: Figures) -> list[str]:
    tests = {"small trees": report["small_trees"], "tests": report["tests"]}
    lines = [f"{name}: {'passed' if x['passed'] else 'FAILED'}: {x['summary']}" for name, x in tests.items() if x]
    lines += [f"{tool}: {found['summary']}" for tool, found in (report["sanitizer"] or {}).items()]
    lines += [f"could not run: {each['what']}: {each['error']}" for each in report["failed"]]
    return lines + [f"left out: {each['what']}: {each['why']}" for each in report["left_out"]]


if __name__ == "__main__":
    sys.exit(main())
