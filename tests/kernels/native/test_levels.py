"""Operators and exact texts on each instruction set of this CPU below its best, on which all other tests run.

A process uses one instruction set, so each has a test run of its own.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specmamba.kernels.native import levels
from specmamba.kernels.native.build import compiled_objects
from specmamba.kernels.native.cpp_compiler import find_compiler, run_compiler
from specmamba.kernels.native.levels import LEVELS, SWITCH, available_levels, chosen_level
from tests.conftest import pytest_report_header
from tests.kernels.native.compilers import less_optimized, sources_with_switches
from tests.pairwise import IS_FULL
from tests.thinned import EVERY_FIFTH, EVERY_TENTH

OF_ANY_LEVEL = ("tests/kernels/triton", "tests/kernels/test_native_build.py")  # the latter chooses levels itself
PARTS = {
    "operators": ["tests/kernels", *(f"--ignore={path}" for path in OF_ANY_LEVEL), *EVERY_TENTH],
    "products": ["tests/kernels/linear", "tests/kernels/test_moe.py", *EVERY_TENTH],
    "exact texts": ["tests/models/test_families_exact.py", *EVERY_FIFTH],
}
if IS_FULL:
    PARTS["exact texts"] += ["tests/verify", "tests/models/test_families_parity.py"]

_BELOW = [level.name for level in available_levels()[1:]]
# A tenth of the operators' cases on the lowest level, whose vectors are others, and of products on that whose products
# are not in tiles, which has the code of the best level beside; all on every level below the best in a full run; texts,
# which take minutes, on the lowest.
LOWER = [(level, "operators") for level in _BELOW if IS_FULL or level == _BELOW[-1]]
LOWER += [(level, "products") for level in _BELOW[:-1] if not IS_FULL and level == "avx512_bf16"]
LOWER += [(level, "exact texts") for level in _BELOW[-1:]]


def test_the_header_names_levels_that_are_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [level.name for level in LEVELS]
    monkeypatch.delenv(SWITCH, raising=False)
    for level, untried in ((LEVELS[0], "none"), (LEVELS[-1], ", ".join(names[:-1]))):
        line = f"tests use {level.name}; compiled only, untried on this CPU: {untried}"
        monkeypatch.setattr(levels, "cpu_flags", lambda flags=level.cpu_flags: flags)
        assert pytest_report_header() == f"native kernels: {line}"
    monkeypatch.setenv(SWITCH, "0")
    assert pytest_report_header().startswith(f"native kernels: none: {SWITCH} turns them off; compiled only")


def test_products_alone_differ_among_levels_of_the_same_vectors() -> None:
    assert [source.parent.name for source in sources_with_switches()] == ["linear", "moe"]


@pytest.mark.slow
@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize(("level", "part"), LOWER)
@pytest.mark.long
def test_lower_levels(level: str, part: str, run_tests: Callable[..., None]) -> None:
    if available_levels()[0] is not chosen_level():
        pytest.skip(f"{SWITCH} chooses the instruction set of this run")
    compiler = shlex.join(less_optimized(find_compiler(), "-O1"))  # levels differ in what vectors are, which stays
    run_tests(*PARTS[part], **{SWITCH: level, "CXX": compiler})


@pytest.mark.slow
@pytest.mark.skipif(not IS_FULL, reason="SPECMAMBA_TEST_FULL=1 compiles all sources once more, for minutes")
@pytest.mark.usefixtures("needs_native")
def test_no_two_sources_have_different_types_of_one_name(tmp_path: Path) -> None:
    """A shipped library links all sources, and of two functions of one name and signature it keeps one."""
    if shutil.which("g++") is None:
        pytest.skip("only g++ compares types when it links")
    objects = compiled_objects(chosen_level(), ["g++", "-flto", "-O1"], tmp_path)
    library = str(tmp_path / "all.so")
    run_compiler(["g++", "-shared", "-flto", "-O1", "-Werror=odr", *map(str, objects), "-o", library])
