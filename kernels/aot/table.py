"""The committed figures of a target, and how a run differs from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from specmamba.kernels.aot.resources import Resources

Key = tuple[str, str]  # operator, variant


@dataclass(frozen=True)
class Table:
    """What every variant needs on one target, with the compilers that made it so."""

    target: str
    versions: Mapping[str, str]
    rows: Mapping[Key, Resources]

    def of_operators(self, operators: Iterable[str]) -> Table:
        """The part of some operators."""
        wanted = set(operators)
        return Table(self.target, self.versions, {key: row for key, row in self.rows.items() if key[0] in wanted})

    def without_operators(self, operators: Iterable[str]) -> Table:
        """The part of all others."""
        return self.of_operators({operator for operator, _ in self.rows} - set(operators))


@dataclass(frozen=True)
class Difference:
    """Between a run and the committed table."""

    text: str
    fails: bool


def compare(committed: Table, run: Table) -> list[Difference]:
    """All differences, those of single variants in the order of the run.

    By the same compilers nothing may differ: a table that nobody renews says nothing. Other versions hand out
    registers, and buffers of reductions, as they like; that is only told. What a target cannot take fails in any case.
    """
    differences = []
    same = committed.versions == run.versions
    if not same:
        versions = f"the table is of {describe(committed.versions)}, this is {describe(run.versions)}"
        differences.append(Difference(versions, fails=False))
    for key, row in run.rows.items():
        before = committed.rows.get(key)
        if before is None:
            differences.append(Difference(f"{_name(key)}: not in the table", fails=True))
        elif before != row:
            differences.append(Difference(f"{_name(key)}: {_changes(before, row)}", fails=same))
    gone = [key for key in committed.rows if key not in run.rows]
    return differences + [Difference(f"{_name(key)}: in the table, but no variant", fails=True) for key in gone]


def describe(versions: Mapping[str, str]) -> str:
    """For example "triton 3.9.0, ptxas 12.9.86"."""
    return ", ".join(f"{tool} {version}" for tool, version in versions.items())


def read_table(file: Path) -> Table:
    """Read a table from a JSON file.

    Raises:
        OSError: no such file.
        ValueError: it is no table.
    """
    content = json.loads(file.read_text(encoding="utf8"))
    try:
        rows = {
            (operator, variant): Resources(**row)
            for operator, variants in content["operators"].items()
            for variant, row in variants.items()
        }
        return Table(content["target"], content["versions"], rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no table of variants: {error}") from None


def write_table(table: Table, file: Path) -> None:
    """One line per variant, so that a change of one is a line of a diff."""
    operators = sorted({operator for operator, _ in table.rows})
    parts = []
    for operator in operators:
        lines = [
            f"      {json.dumps(variant)}: {json.dumps(_figures(row))}"
            for (owner, variant), row in table.rows.items()
            if owner == operator
        ]
        parts.append(f"    {json.dumps(operator)}: {{\n" + ",\n".join(lines) + "\n    }")
    head = f'  "target": {json.dumps(table.target)},\n  "versions": {json.dumps(dict(table.versions))},\n'
    text = "{\n" + head + '  "operators": {\n' + ",\n".join(parts) + "\n  }\n}\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf8")


def _figures(row: Resources) -> dict[str, int]:
    """Without what only AMD has, where there is none."""
    return {field: figure for field, figure in asdict(row).items() if figure or field != "scalar_spills"}


def _name(key: Key) -> str:
    return f"{key[0]}: {key[1]}"


def _changes(before: Resources, now: Resources) -> str:
    old, new = asdict(before), asdict(now)
    return ", ".join(f"{field} {old[field]} -> {new[field]}" for field in old if old[field] != new[field])
