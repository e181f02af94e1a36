"""The GPUs that kernels are compiled for, what a compiled kernel needs there, and the committed figures of both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

Key = tuple[str, str]  # operator, variant


@dataclass(frozen=True)
class Target:
    """One kind of GPU, in Triton's words, and what a block of threads may have there."""

    name: str
    backend: str  # "cuda" or "hip"
    arch: int | str
    warp_size: int
    max_shared: int  # bytes of shared memory (AMD: LDS) that one block can be given
    is_counted: bool = True  # NVIDIA: loops of the machine code have the line of their ``for``


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, max_shared=163 * 1024),  # of the 164 KB, 1 KB is the driver's
        Target("sm_90", "cuda", 90, 32, max_shared=227 * 1024),
        Target("sm_100", "cuda", 100, 32, max_shared=227 * 1024, is_counted=False),
        Target("gfx942", "hip", "gfx942", 64, max_shared=64 * 1024),
    )
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs."""

    registers: int  # per thread; AMD: vector registers, accumulation registers included
    shared: int  # bytes per block
    spills: int  # to memory. NVIDIA: bytes stored and loaded per thread; AMD: vector registers
    scalar_spills: int = 0  # AMD: scalar registers kept in lanes of vector registers
    instructions: int = 0  # NVIDIA: issued by all warps of one head of one row, for the variant's Work; 0: not counted


def read_ptxas_log(log: str, shared: int) -> Resources:
    """Read the log of ``ptxas -v``; ``shared`` is Triton's own figure, which ptxas does not have.

    Raises:
        ValueError: a figure is missing.
    """
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if not registers or not spills:
        raise ValueError(f"no registers or spills in ptxas's output: {log.strip() or 'it is empty'}")
    return Resources(max(map(int, registers)), shared, sum(map(int, spills)))


def read_amdgcn(assembly: str, shared: int) -> Resources:
    """Read the metadata at the end of LLVM's assembly.

    Raises:
        ValueError: a figure is missing.
    """

    def figure(name: str) -> int:
        found = re.search(rf"^\s*(?:- )?\.{name}:\s*(\d+)\s*$", assembly, re.MULTILINE)
        if found is None:
            raise ValueError(f"no .{name} in the metadata of the assembly")
        return int(found.group(1))

    # the fixed size has what is known at compile time, Triton's figure what a launch asks for
    shared = max(shared, figure("group_segment_fixed_size"))
    return Resources(figure("vgpr_count"), shared, figure("vgpr_spill_count"), figure("sgpr_spill_count"))


@dataclass(frozen=True)
class Table:
    """What every variant needs on one target, with the compilers that made it so."""

    target: str
    versions: Mapping[str, str]
    rows: Mapping[Key, Resources]

    def of_operators(self, operators: Iterable[str]) -> Table:
        """The rows of some operators."""
        wanted = set(operators)
        return Table(self.target, self.versions, {key: row for key, row in self.rows.items() if key[0] in wanted})

    def without_operators(self, operators: Iterable[str]) -> Table:
        """The rows of all other operators."""
        return self.of_operators({operator for operator, _ in self.rows} - set(operators))


@dataclass(frozen=True)
class Difference:
    """One difference between a run and the committed table."""

    text: str
    fails: bool


def compare(committed: Table, run: Table) -> list[Difference]:
    """All differences, those of single variants in the order of the run.

    With the same compilers nothing may differ, so that the table is renewed with every change. Other versions allocate
    registers and buffers of reductions differently; that is reported and does not fail. ``flaws_of`` fails variants
    that a target cannot run, with any compiler.
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
    """Write a table with one line per variant, so that a change of one variant is one line of a diff."""
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
    """All figures; those that only some kernels have, where they are not zero."""
    optional = "scalar_spills", "instructions"
    return {field: figure for field, figure in asdict(row).items() if figure or field not in optional}


def _name(key: Key) -> str:
    return f"{key[0]}: {key[1]}"


def _changes(before: Resources, now: Resources) -> str:
    old, new = asdict(before), asdict(now)
    return ", ".join(f"{field} {old[field]} -> {new[field]}" for field in old if old[field] != new[field])
