"""The table of operators, on the terminal and as Markdown, and the targets of operators on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specmamba.measure.command import Page, versions_text

Figures = Mapping[str, Any]
COLUMNS = ("operator, case", "by", "us", "of roofline", "GB/s", "vs torch")
OURS = "triton", "native"

# Verifying 8 nodes reads every state and writes none: limit of its time over reading and writing all states once.
VERIFY = "gated_delta_rule.tree_verify", "verify 8 nodes, batch 32", 1.5
STATE_BYTES = 4 * 32 * 32 * 128 * 128  # of that case
# Limit of the time of 16 nodes with records over that with snapshots, which move 16 times as many bytes.
RECORDS = ("gated_delta_rule.tree_verify", "verify 16 nodes, batch 32")
SNAPSHOTS = ("gated_delta_rule.tree_verify_snapshots", "16 nodes, batch 32")
RECORDS_LIMIT = 0.5


def targets_of(report: Figures) -> list[dict[str, Any]]:
    """The targets of operators on a GPU: {"name", "value", "limit", "met"}; ``met`` is None if it was not measured."""
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
    """Seconds of our form on this device; None where it was not timed."""
    for found in report["operators"]:
        for timed in found["cases"] if found["name"] == operator else []:
            for result in timed["results"] if timed["name"] == case else []:
                if result["candidate"] in OURS and not result["failed"]:
                    return float(result["seconds"])
    return None


def has_failed(report: Figures) -> bool:
    """Whether a test failed, or one of our forms could not run or was wrong."""
    ours = (result for _, _, result in _results(report) if result["candidate"] in OURS)
    return any(found["tests_failed"] for found in report["operators"]) or any(result["failed"] for result in ours)


def title(report: Figures) -> str:
    """One line of device, versions and roofline."""
    roofline = report["roofline"]
    peaks = ", ".join(f"{value:.3g} {name}" for name, value in roofline["tflops"].items())
    label = "DRY RUN: shapes of a few elements, no figure of speed means anything; " if report["dry_run"] else ""
    return (
        f"{label}{report['device']}; {versions_text(report)}; medians of {report['rounds']} rounds; "
        f"measured roofline: copies {roofline['copy_gb_per_s']:.0f} GB/s, products TFLOP/s: {peaks}"
    )


def print_report(report: Figures) -> None:
    """Print the table, notes, and on a GPU the targets."""
    page = Page()
    page.lines(title(report))
    page.table(COLUMNS, rows_of(report), text_columns=(0, 1))
    page.lines(*report["notes"], *target_lines(report["targets"]))


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
    """Lines about the targets; none if there are no targets."""
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
