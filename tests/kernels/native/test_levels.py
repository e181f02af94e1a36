"""Operators and exact texts on each instruction set of this CPU below its best, on which all other tests run.

A process uses one instruction set, so each has a test run of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specmamba.kernels.native.levels import SWITCH, available_levels, chosen_level

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("needs_native")]

PARTS = {
    "operators": ["tests/kernels", "--ignore=tests/kernels/triton"],
    "exact texts": ["tests/verify", "tests/models/test_families_exact.py", "tests/models/test_families_parity.py"],
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("level", [level.name for level in available_levels()[1:]])
def test_lower_levels(level: str, part: str, run_tests: Callable[..., None]) -> None:
    if available_levels()[0] is not chosen_level():
        pytest.skip(f"{SWITCH} chooses the instruction set of this run")
    run_tests(*PARTS[part], **{SWITCH: level})
