"""What a compiled kernel needs, read from what the compilers say of it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """Of one kernel."""

    registers: int  # per thread; AMD: vector registers, accumulation registers included
    shared: int  # bytes per block
    spills: int  # to memory. NVIDIA: bytes stored and loaded per thread; AMD: vector registers
    scalar_spills: int = 0  # AMD: scalar registers kept in lanes of vector registers


def read_ptxas_log(log: str, shared: int) -> Resources:
    """From what ``ptxas -v`` said; ``shared`` is Triton's own figure, of which ptxas knows nothing.

    Raises:
        ValueError: ptxas did not say it.
    """
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if not registers or not spills:
        raise ValueError(f"no registers or spills in ptxas's output: {log.strip() or 'it is empty'}")
    return Resources(max(map(int, registers)), shared, sum(map(int, spills)))


def read_amdgcn(assembly: str, shared: int) -> Resources:
    """From the metadata at the end of LLVM's assembly.

    Raises:
        ValueError: a figure is not there.
    """

    def figure(name: str) -> int:
        found = re.search(rf"^\s*(?:- )?\.{name}:\s*(\d+)\s*$", assembly, re.MULTILINE)
        if found is None:
            raise ValueError(f"no .{name} in the metadata of the assembly")
        return int(found.group(1))

    # what is known when it is compiled is in the fixed size, what a launch asks for in Triton's figure
    shared = max(shared, figure("group_segment_fixed_size"))
    return Resources(figure("vgpr_count"), shared, figure("vgpr_spill_count"), figure("sgpr_spill_count"))
