"""parallel_for_ranges: every part once, whatever threads come."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from specmamba.kernels.native.cpp_compiler import command_of, find_compiler
from specmamba.kernels.native.levels import LEVELS
from tests.kernels.native.compilers import less_optimized

pytestmark = pytest.mark.usefixtures("needs_native")

CHECK = Path(__file__).with_name("ranges_check.cpp")


def test_every_part_is_claimed_once(tmp_path: Path) -> None:
    program = tmp_path / "check"
    compiler = less_optimized(command_of(find_compiler(), LEVELS[-1]), "-O1")
    subprocess.run([*compiler, "-pthread", str(CHECK), "-o", str(program)], check=True)
    run = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "0 wrong\n")
