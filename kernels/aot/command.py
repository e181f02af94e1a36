"""The command line: compile, print, and compare with what is committed, or write it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from specmamba.kernels.aot.compile import Outcome, compile_jobs, compiler_versions, find_operators, list_jobs
from specmamba.kernels.aot.table import (
    TARGETS,
    Table,
    Target,
    compare,
    describe,
    read_table,
    write_table,
)

TABLES = Path(__file__).parent / "tables"
ROW = "{:<15} {:<44} {:>9} {:>13} {:>6} {:>12} {:>7}"


def main(arguments: Sequence[str], modules: Mapping[str, str] | None = None, tables: Path = TABLES) -> int:
    """Run the command; ``modules`` (operator -> module with ``variants()``) may stand in for the operators' own.

    Returns:
        The exit status: 0, or 1 where a variant is too much for the target or the table does not fit.

    Raises:
        SystemExit: with status 2, for arguments that make no sense.
    """
    all_modules = find_operators() if modules is None else modules
    parser = _parser(sorted(all_modules))
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs is at least 1")
    chosen = {operator: all_modules[operator] for operator in options.op or all_modules}
    target, file = TARGETS[options.target], tables / f"{options.target}.json"

    start = time.perf_counter()
    outcomes = _compile(chosen, target, options.jobs)
    rows = {(o.job.operator, o.job.variant): o.resources for o in outcomes if o.resources is not None}
    run = Table(target.name, compiler_versions(target), rows)
    seconds = time.perf_counter() - start
    print(f"{len(outcomes)} variants for {target.name} in {seconds:.0f} s ({describe(run.versions)})")

    flaws = [f"{o.job.operator}: {o.job.variant}: {flaw}" for o in outcomes for flaw in flaws_of(o, target)]
    for flaw in flaws:
        print(f"error: {flaw}", file=sys.stderr)
    if not options.write:
        return int(_differs(file, run, chosen if options.op else None) or bool(flaws))
    if flaws:
        print("nothing is written", file=sys.stderr)
        return 1
    return _write(file, run, chosen if options.op else None)


def flaws_of(outcome: Outcome, target: Target) -> list[str]:
    """The reasons why a variant must not run on a target; empty for a good one.

    Scalar registers that AMD's compiler keeps in lanes of vector registers never go to memory: they are counted in the
    table, and are no flaw.
    """
    needed = outcome.resources
    if needed is None:
        return [f"does not compile for {target.name}: {outcome.error}"]
    flaws = []
    if needed.shared > target.max_shared:
        flaws.append(f"needs {needed.shared} bytes of shared memory, a block on {target.name} has {target.max_shared}")
    if needed.spills:
        unit = "bytes of registers" if target.backend == "cuda" else "vector registers"
        flaws.append(f"spills {needed.spills} {unit} on {target.name}")
    return flaws


def _parser(operators: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m specmamba.kernels.aot",
        description="Compile all Triton kernels for a GPU that need not be there, and hold what they need of it to the "
        "committed table. Exit status 1: a spill, too much shared memory, or a difference.",
    )
    parser.add_argument("--target", required=True, choices=list(TARGETS))
    parser.add_argument("--op", action="append", choices=operators, metavar="NAME", help="only this; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes; default: cores")
    parser.add_argument("--write", action="store_true", help="write the table instead of comparing with it")
    return parser


def _compile(modules: Mapping[str, str], target: Target, num_processes: int) -> list[Outcome]:
    """All variants, printed line by line as they come."""
    head = "operator", "variant", "registers", "shared bytes", "spills", "instructions", "seconds"
    print(ROW.format(*head), flush=True)

    def report(outcome: Outcome) -> None:
        needed = outcome.resources
        figures: tuple[object, ...] = "-", "-", "failed", "-"
        if needed:
            figures = needed.registers, needed.shared, needed.spills, needed.instructions or "-"
        print(ROW.format(outcome.job.operator, outcome.job.variant, *figures, f"{outcome.seconds:.2f}"), flush=True)

    jobs, failures = list_jobs(modules)
    for failure in failures:
        report(failure)
    return failures + compile_jobs(jobs, target, num_processes, report)


def _differs(file: Path, run: Table, operators: Mapping[str, str] | None) -> bool:
    """Whether a run, of all operators or of some, fails against the committed table; says how it differs."""
    try:
        committed = read_table(file)
    except (OSError, ValueError) as error:
        print(f"error: {error}\nrun with --write and commit the table", file=sys.stderr)
        return True
    differences = compare(committed.of_operators(operators) if operators is not None else committed, run)
    for difference in differences:
        print(f"{'error' if difference.fails else 'note'}: {difference.text}", file=sys.stderr)
    fails = any(difference.fails for difference in differences)
    if fails:
        print("where this is meant, run with --write and commit the table", file=sys.stderr)
    return fails


def _write(file: Path, run: Table, operators: Mapping[str, str] | None) -> int:
    """Write a run's table; of a run of some operators, into the table that is there."""
    if operators is not None and file.exists():
        rest = read_table(file).without_operators(operators)
        if rest.rows and rest.versions != run.versions:
            print(f"error: the table is of {describe(rest.versions)}: write all of it, without --op", file=sys.stderr)
            return 1
        run = Table(run.target, run.versions, {**rest.rows, **run.rows})
    write_table(run, file)
    print(f"written: {file}")
    return 0
