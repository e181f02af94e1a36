"""Does the fast tier notice bugs? Plant those of ``mutations.toml``, one at a time, and see which test fails first.

``python -m tests.mutations`` copies the tree to a temporary folder, so that nothing here changes. For each mutation the
tests that should notice it run first, then the rest of the fast tier, then, with ``--tier all``, the slow tier. What
was found stands in ``mutations.md``, by name of the mutation; rows of mutations that were not run stay.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.repository import copy_tracked

TABLE = Path(__file__).with_name("mutations.toml")
RESULTS = Path(__file__).with_name("mutations.md")
SECONDS = 1200.0  # of one run of pytest; a mutation that makes a test hang is noticed too
ESCAPED = "escaped"
HEAD = """# Bugs that the tests notice

Each row is a bug of one line, planted by `python -m tests.mutations`; the lines are in
[mutations.toml](mutations.toml). *fast* is what `make test` runs, *slow* what `make test-all` adds.

| mutation | area | caught by | first test that fails |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug: in ``file``, ``old``, which stands there once, becomes ``new``."""

    name: str
    area: str
    file: str
    old: str
    new: str
    why: str  # it is a bug
    tests: tuple[str, ...]  # files, or parts of them, that should notice it; the likeliest first

    def apply(self, root: Path) -> str:
        """Change the file below ``root``; its text before."""
        path = root / self.file
        text = path.read_text("utf8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} places like {self.old!r}")
        path.write_text(text.replace(self.old, self.new), "utf8")
        return text


@dataclass(frozen=True, slots=True)
class Result:
    """Which tier caught a mutation, and with which test."""

    tier: str  # "fast", "slow" or ESCAPED
    test: str


def read_table() -> list[Mutation]:
    """All mutations."""
    entries = tomllib.loads(TABLE.read_text("utf8"))["mutation"]
    return [Mutation(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def read_results() -> dict[str, Result]:
    """What ``mutations.md`` says, by name of the mutation."""
    rows = re.findall(r"^\| ([\w-]+) \| [^|]* \| (\w+) \| ([^|]*) \|$", RESULTS.read_text("utf8"), re.MULTILINE)
    return {name: Result(tier, test.strip("`")) for name, tier, test in rows}


def write_results(results: dict[str, Result]) -> None:
    """The table, with the share that the fast tier catches."""
    rows = [
        f"| {m.name} | {m.area} | {results[m.name].tier} | `{results[m.name].test}` |\n"
        for m in read_table()
        if m.name in results
    ]
    tiers = [result.tier for result in results.values()]
    caught = len(tiers) - tiers.count(ESCAPED)
    share = f"\nOf {len(tiers)} mutations {caught} are caught, {tiers.count('fast')} of them by the fast tier.\n"
    RESULTS.write_text(HEAD + "".join(rows) + share, "utf8")


def first_failure(root: Path, arguments: Sequence[str]) -> str | None:
    """The first test that fails; None: all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        run = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "no end"
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?= - |$)", run.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pytest failed without a test: {run.stdout[-2000:]}{run.stderr[-2000:]}")
    return found[1]


def judge(mutation: Mutation, root: Path, tier: str) -> Result:
    """Plant a mutation below ``root``, run tests until one fails, and take it out again."""
    before = mutation.apply(root)
    try:
        for name, arguments in _runs(mutation, tier):
            if (test := first_failure(root, arguments)) is not None:
                return Result(name, test)
    finally:
        (root / mutation.file).write_text(before, "utf8")
    return Result(ESCAPED, "")


def _runs(mutation: Mutation, tier: str) -> Iterator[tuple[str, list[str]]]:
    yield "fast", ["-m", "not slow", *mutation.tests]
    if tier != "hinted":
        yield "fast", ["-m", "not slow", "-n", "auto", *(f"--deselect={test}" for test in mutation.tests)]
    if tier == "all":
        yield "slow", ["-m", "slow", "-n", "auto"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 where a mutation escaped."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--tier", choices=("hinted", "fast", "all"), default="fast", help="where to stop looking")
    parser.add_argument(
        "--only", metavar="PART", nargs="+", default=[""], help="mutations with one of these in their names"
    )
    options = parser.parse_args(arguments)
    results = read_results() if RESULTS.exists() else {}
    chosen = [mutation for mutation in read_table() if any(part in mutation.name for part in options.only)]
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_tracked(root := Path(folder))
        for mutation in chosen:
            began = time.monotonic()
            result = results[mutation.name] = judge(mutation, root, options.tier)
            status |= result.tier == ESCAPED
            print(f"{mutation.name}: {result.tier} {result.test} ({time.monotonic() - began:.0f} s)", flush=True)
            write_results(results)
    return status


if __name__ == "__main__":
    sys.exit(main())
