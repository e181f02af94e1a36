"""The end-to-end table, and what the project is judged by on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmamba.bench.gpu.plan import BATCHES, CHAIN, PLAIN, TREE
from specmamba.bench.ops.tables import target_lines

Figures = Mapping[str, Any]
WIDTH = 110  # characters that the table needs
COLUMNS = ("model", "drafts", "batch", "graphs", "state", "tokens/s", "accepted", "speed-up", "step ms")
GRAPHS_LIMIT = 2.0


def targets_of(report: Figures) -> list[dict[str, Any]]:
    """{"name", "value", "limit", "met"}: met None, where it was not measured. A dry run has none of speed."""
    targets = [] if report["dry_run"] else [_graphs_target(report)]
    targets += [_texts_target(report, "float32", "float32 texts that are not the CPU's, token for token")]
    targets += [_texts_target(report, "bfloat16", "bfloat16 texts that differ from plain ones by more than a near tie")]
    return targets


def _graphs_target(report: Figures) -> dict[str, Any]:
    """Plain decoding of one request: captured over eager."""
    models = list(dict.fromkeys(row["model"] for row in report["rows"]))
    ratios = {model: _graphs_ratio(report, model) for model in models}
    value = next((ratio for ratio in ratios.values() if ratio is not None), None)
    met = None if value is None else value >= GRAPHS_LIMIT
    name = "plain decoding of one request: graphs over eager"
    return {"name": name, "value": value, "limit": GRAPHS_LIMIT, "at_least": True, "met": met, "by_model": ratios}


def _graphs_ratio(report: Figures, model: str) -> float | None:
    speeds = {
        row["graphs"]: row["tokens_per_second"]
        for row in report["rows"]
        if (row["model"], row["shape"], row["batch_size"]) == (model, PLAIN.name, 1)
    }
    return speeds[True] / speeds[False] if len(speeds) == 2 else None


def _texts_target(report: Figures, dtype: str, name: str) -> dict[str, Any]:
    """In float32 every difference counts, in bfloat16 only what rounding does not explain."""
    if report["texts"] is None:
        return {"name": name, "value": None, "limit": 0, "met": None}
    kinds = ("near_tie", "diverged") if dtype == "float32" else ("diverged",)
    value = sum(counts[kind] for counts in report["texts"][dtype].values() for kind in kinds)
    return {"name": name, "value": value, "limit": 0, "met": value == 0}


def has_failed(report: Figures) -> bool:
    """Whether anything is wrong, rather than slow or left out."""
    from specmamba.bench.ops.tables import has_failed as operators_failed

    tests, operators, texts = report["tests"], report["operators"], report["texts"] or {}
    diverged = any(counts["diverged"] for dtype in ("float32", "bfloat16") for counts in texts.get(dtype, {}).values())
    return bool(
        report["failed"]
        or diverged
        or (tests is not None and not tests["passed"])
        or (operators is not None and operators_failed(operators))
    )


def print_report(report: Figures) -> None:
    """Table, speed-ups next to acceptance lengths, texts, what was left out, targets."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    table = Table(*COLUMNS, box=SIMPLE, padding=(0, 1, 0, 0))
    for column in (*table.columns[2:3], *table.columns[5:]):
        column.justify = "right"
    for row in report["rows"]:
        table.add_row(*_cells(row))
    console.print(title(report), markup=False, soft_wrap=True)
    console.print(table, markup=False)
    operators = report["operators"]
    lines = [*_gains(report), *_texts(report), *_missing(report), *target_lines(report["targets"])]
    lines += target_lines(operators["targets"])[1:] if operators is not None else []
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def title(report: Figures) -> str:
    """Where, with what, how long."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    label = "DRY RUN on the CPU with the demo: no figure of speed means anything; " if report["dry_run"] else ""
    return (
        f"{label}{report['device']}; {versions}; temperature {report['temperature']:g}; {report['seconds']:.0f} s of "
        f"{report['minutes']:g} minutes"
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
    """Speed-up next to acceptance length, which bounds it, at the batch sizes that are judged."""
    if report["dry_run"]:
        return []
    found = []
    for row in report["rows"]:
        is_judged = row["graphs"] and row["state"] == "records" and row["batch_size"] in BATCHES
        if is_judged and row["shape"] in (CHAIN.name, TREE.name) and row["speed_up"] is not None:
            pair = f"{row['speed_up']:.2f}x at acceptance length {row['accept_length']:.2f}"
            found.append(f"  {row['model']} {row['shape']} batch {row['batch_size']}: {pair}")
    return ["speed-up over plain decoding:", *found] if found else []


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
    tests = report["tests"]
    lines = [] if tests is None else [f"tests: {'passed' if tests['passed'] else 'FAILED'}: {tests['summary']}"]
    lines += [f"could not run: {each['what']}: {each['error']}" for each in report["failed"]]
    return lines + [f"left out: {each['what']}: {each['why']}" for each in report["left_out"]]
