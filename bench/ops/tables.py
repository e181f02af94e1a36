"""The operator table, on the terminal and as Markdown, and the figures that operators are judged by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Figures = Mapping[str, Any]
WIDTH = 150  # characters that the table needs
COLUMNS = ("operator, case", "by", "us", "of roofline", "GB/s", "vs torch")
OURS = "triton", "native"

# Verifying 8 nodes reads every state and writes none: at most so many times the time of reading and writing it once.
VERIFY = "gated_delta_rule.tree_verify", "verify 8 nodes, batch 32", 1.5
STATE_BYTES = 4 * 32 * 32 * 128 * 128  # of that case
# Records of 16 nodes may take this share of the time of as many snapshots, of which they move a sixteenth.
RECORDS = ("gated_delta_rule.tree_verify", "verify 16 nodes, batch 32")
SNAPSHOTS = ("gated_delta_rule.tree_verify_snapshots", "16 nodes, batch 32")
RECORDS_LIMIT = 0.5


def targets_of(report: Figures) -> list[dict[str, Any]]:
    """What operators are judged by on a GPU: {"name", "value", "limit", "met"}; met None: it was not measured."""
    copy_s = 2 * STATE_BYTES / (report["roofline"]["copy_gb_per_s"] * 1e9)
    verify, records, snapshots = (_own_seconds(report, *case) for case in (VERIFY[:2], RECORDS, SNAPSHOTS))
    return [
        _target(
            "verify of 8 GDN nodes, batch 32, over reading and writing the states once",
            None if verify is None else verify / copy_s,
            VERIFY[2],
        ),
        _target(
            "verify of 16 GDN nodes, batch 32: records over snapshots",
            None if records is None or snapshots is None else records / snapshots,
            RECORDS_LIMIT,
        ),
    ]


def _target(name: str, value: float | None, limit: float) -> dict[str, Any]:
    return {"name": name, "value": value, "limit": limit, "met": None if value is None else value <= limit}


def _own_seconds(report: Figures, operator: str, case: str) -> float | None:
    """Of our form on this device; None where it was not timed."""
    for found in report["operators"]:
        for timed in found["cases"] if found["name"] == operator else []:
            for result in timed["results"] if timed["name"] == case else []:
                if result["candidate"] in OURS and not result["failed"]:
                    return float(result["seconds"])
    return None


def has_failed(report: Figures) -> bool:
    """Whether a test was red, or one of our forms could not run or was wrong."""
    ours = (result for _, _, result in _results(report) if result["candidate"] in OURS)
    return any(found["tests_failed"] for found in report["operators"]) or any(result["failed"] for result in ours)


def title(report: Figures) -> str:
    """Where and with what."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    roofline = report["roofline"]
    peaks = ", ".join(f"{value:.3g} {name}" for name, value in roofline["tflops"].items())
    label = "DRY RUN: shapes of a few elements, no figure of speed means anything; " if report["dry_run"] else ""
    return (
        f"{label}{report['device']}; {versions}; medians of {report['rounds']} rounds; measured roofline: copies "
        f"{roofline['copy_gb_per_s']:.0f} GB/s, products TFLOP/s: {peaks}"
    )


def print_report(report: Figures) -> None:
    """The table, what was left out, and on a GPU the targets."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)  # better a line that the terminal folds than figures that are cut off
    console.print(title(report), markup=False, soft_wrap=True)
    table = Table(*COLUMNS, box=SIMPLE, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows_of(report):
        table.add_row(*row)
    console.print(table, markup=False)
    for line in [*report["notes"], *target_lines(report["targets"])]:
        console.print(line, markup=False, soft_wrap=True)


def rows_of(report: Figures) -> Iterator[list[str]]:
    """The table's cells: a row per candidate, the operator and case on the first."""
    for found in report["operators"]:
        if found["tests_failed"]:
            yield [found["name"], f"tests failed: {found['tests_failed']}", "", "", "", ""]
        for case in found["cases"]:
            name = f"{found['name']}: {case['name']}"
            for result in case["results"]:
                yield [name, *_cells(result)]
                name = ""


def _cells(result: Figures) -> list[str]:
    note = f" ({result['note']})" if result["note"] else ""
    if result["failed"]:
        return [f"{result['candidate']}{note}: {result['failed']}", "", "", "", ""]
    ratio = result["speed_up_over"].get("torch")
    return [
        f"{result['candidate']}{note}",
        f"{result['seconds'] * 1e6:.1f}",
        f"{result['share_of_roofline']:.2f}",
        f"{result['gb_per_s']:.0f}",
        "" if ratio is None else f"{ratio:.2f}x",
    ]


def target_lines(targets: list[dict[str, Any]]) -> list[str]:
    """The block of targets; none where they were not looked for."""
    lines = ["targets:"] if targets else []
    for target in targets:
        verdict = {True: "met", False: "MISSED", None: "not measured"}[target["met"]]
        value = "" if target["value"] is None else f"{target['value']:.2f}, "
        bound = "at least" if target.get("at_least") else "at most"
        lines.append(f"  {verdict}: {target['name']}: {value}{bound} {target['limit']:g}")
    return lines


def markdown(report: Figures) -> str:
    """The README's table."""
    lines = [title(report) + ".", "", f"| {' | '.join(COLUMNS)} |", "|---|---|---:|---:|---:|---:|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows_of(report)]
    targets = [line.strip() for line in target_lines(report["targets"])[1:]]
    return "\n".join([*lines, "", *(f"- {line}" for line in [*report["notes"], *targets]), ""])


def _results(report: Figures) -> Iterator[tuple[Figures, Figures, Figures]]:
    for found in report["operators"]:
        for case in found["cases"]:
            yield from ((found, case, result) for result in case["results"])
