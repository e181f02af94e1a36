"""vector.h on every instruction set: on this CPU, and for ARM in an emulator (Debian's qemu-user-static)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from specmamba.kernels.native.cpp_compiler import command_of, find_compiler
from specmamba.kernels.native.levels import LEVELS, LEVELS_OF, Level, available_levels

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("needs_native")]

CHECK = Path(__file__).with_name("vector_check.cpp")


def compiled(compiler: list[str], level: Level, folder: Path, *options: str) -> Path:
    program = folder / "check"
    command = [*command_of(compiler, level), *options, str(CHECK), "-o", str(program)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return program


def assert_runs(*command: str | Path) -> None:
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout[:13]) == (0, "0 differences"), run.stdout + run.stderr


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_on_this_cpu(level: Level, tmp_path: Path) -> None:
    program = compiled(find_compiler(), level, tmp_path)
    if level not in available_levels():
        pytest.skip(f"compiled, but untried: this CPU has no {level.name}")
    assert_runs(program)


@pytest.mark.parametrize("level", LEVELS_OF["aarch64"], ids=lambda level: level.name)
def test_on_arm(level: Level, arm_compiler: list[str], arm_emulator: list[str], tmp_path: Path) -> None:
    assert_runs(*arm_emulator, compiled(arm_compiler, level, tmp_path, "-static"))
