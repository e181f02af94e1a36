"""Tests of kernels that share memory between threads, under CUDA's compute-sanitizer.

``memcheck`` finds accesses outside of allocations, ``racecheck`` finds threads of a block that use one place of shared
memory in no order. Both slow kernels down a hundredfold, so they run the tests of trees alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specmamba.bench.gpu.carried import python_path

TOOLS = ("memcheck", "racecheck")
TESTS = (
    "tests/kernels/triton/recurrent/test_gated_delta_rule_triton.py",
    "tests/kernels/triton/test_delta_net_triton.py",
    "tests/kernels/triton/test_mamba2_triton.py",
    "-k",
    "tree_verify or products_are_made_once_for_a_key_head or products_are_made_once_for_a_group",
)
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$", re.MULTILINE)
NOT_INSTALLED = "compute-sanitizer is not on the PATH"


def check_tools(root: Path, limit_s: float, tests: Sequence[str] = TESTS) -> dict[str, Any]:
    """Run the tests of a checkout under each tool, for so many seconds at the most.

    Returns:
        By tool: ``passed`` (None: it did not run to its end) and ``summary``.
    """
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {tool: {"passed": None, "summary": NOT_INSTALLED} for tool in TOOLS}
    return {tool: _run([program, "--tool", tool], root, tests, limit_s) for tool in TOOLS}


def _run(tool: Sequence[str], root: Path, tests: Sequence[str], limit_s: float) -> dict[str, Any]:
    command = [*tool, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": python_path(str(root))}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"passed": None, "summary": f"no end after {limit_s:g} s"}
    return verdict_of(done.stdout + done.stderr, done.returncode)


def verdict_of(output: str, status: int) -> dict[str, Any]:
    """What a tool found: all of its summaries begin with 0, and the tests passed."""
    found = SUMMARY.findall(output)
    lines = output.strip().splitlines() or ["no output"]
    is_clean = bool(found) and all(line.startswith("0 ") for line in found)
    return {"passed": is_clean and status == 0, "summary": "; ".join(found) or lines[-1]}
