"""Instructions that a warp issues: those of the compiled code, each as often as the loops around it run.

A loop of the machine code is found by its backward branch, and known by the source line that the branch has: that of
the ``for``. How often it runs follows from that line's ``range`` and the numbers of a variant's ``Work``. Both sides of
every branch are counted, so that the figure is an upper bound. It is a figure of compiled code, not a time.
"""

from __future__ import annotations

import linecache
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import triton

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"

LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
LABEL = re.compile(r"^(\.L\w+):")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)")
TARGET = re.compile(r"\bBRA(?:\.\w+)*\s.*`\((\.L\w+)\)")
RANGE = re.compile(r"\bin (?:tl\.)?range\(((?:[\w\s,]|tl\.cdiv\([\w\s,]+\))+)\)")
NUMBER = re.compile(r"tl\.cdiv\((\w+),\s*(\w+)\)|(\w+)")


@dataclass(frozen=True)
class Loop:
    """Instructions ``first`` to ``last`` of a kernel, by their number; ``source`` is the line of its ``for``."""

    first: int
    last: int
    source: str


def disassemble(cubin: bytes) -> str:
    """Machine code with source lines, by the disassembler that comes with Triton.

    Raises:
        ValueError: the disassembler fails.
    """
    with TemporaryDirectory(prefix="specmamba-aot-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([NVDISASM, "-g", "-c", file], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"nvdisasm: {done.stderr.strip()}")
    return done.stdout


def count_instructions(
    assembly: str, sizes: Mapping[str, int], line_of: Callable[[str, int], str] = linecache.getline
) -> int:
    """The instructions that a warp issues, without those that do nothing (NOP).

    Args:
        assembly: as ``disassemble`` gives it.
        sizes: values of the names that ranges of loops have.
        line_of: the text of a line of a file.

    Raises:
        ValueError: a loop's line has no range of these names, or two loops that run more than once have the same line:
            one was unrolled.
    """
    names, loops = _parse(assembly, line_of)
    trips = {loop: trips_of(loop.source, sizes) for loop in loops}
    sources = [loop.source for loop, times in trips.items() if times > 1]  # others may be unrolled
    if twice := {source for source in sources if sources.count(source) > 1}:
        raise ValueError(f"several loops of machine code have one line: {sorted(twice)}")
    total = 0
    for number, name in enumerate(names):
        if name == "NOP":
            continue
        times = 1
        for loop in loops:
            if loop.first <= number <= loop.last:
                times *= trips[loop]
        total += times
    return total


def trips_of(source: str, sizes: Mapping[str, int]) -> int:
    """How often a loop runs, by the range in its source line; not at all counts as once, like a branch.

    Raises:
        ValueError: there is no range, or a name in it that has no value.
    """
    found = RANGE.search(source)
    if found is None:
        raise ValueError(f"no range is known for the loop of line {source!r}")
    missing = [word for word in re.findall(r"[\w.]+", found.group(1)) if not _is_known(word, sizes)]
    if missing:
        raise ValueError(f"{', '.join(missing)} has no value for the loop of line {source!r}")

    def value(word: str) -> int:
        return int(word) if word.isdigit() else sizes[word]

    of_range = (
        value(number) if number else -(-value(dividend) // value(divisor))
        for dividend, divisor, number in NUMBER.findall(found.group(1))
    )
    return max(1, len(range(*of_range)))


def _is_known(word: str, sizes: Mapping[str, int]) -> bool:
    return word == "tl.cdiv" or word.isdigit() or word in sizes


def _parse(assembly: str, line_of: Callable[[str, int], str]) -> tuple[Sequence[str], Sequence[Loop]]:
    """Names of all instructions, and the loops among them."""
    names: list[str] = []
    labels: dict[str, int] = {}
    ends: dict[int, Loop] = {}  # by first instruction: of several branches back to it the last one counts
    source = ""
    for line in assembly.splitlines():
        if found := LINE.search(line):
            source = line_of(found.group(1), int(found.group(2))).strip()
        elif found := LABEL.match(line):
            labels[found.group(1)] = len(names)
        elif found := INSTRUCTION.match(line):
            number, target = len(names), TARGET.search(line)
            names.append(found.group(2))
            first = labels.get(target.group(1), number) if target else number
            if first < number:
                ends[first] = Loop(first, number, source)
    return names, [ends[first] for first in sorted(ends)]
