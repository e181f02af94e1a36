from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.kernels.native.compilers import less_optimized
from tests.repository import ROOT

ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


@pytest.fixture
def arm_compiler() -> list[str]:
    for program in (ARM_COMPILER, ARM_EMULATOR):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: g++-aarch64-linux-gnu, qemu-user-static)")
    return less_optimized([ARM_COMPILER], "-O1")


@pytest.fixture
def arm_emulator(arm_compiler: list[str]) -> list[str]:
    return [ARM_EMULATOR, "-cpu", "max"]


@pytest.fixture
def run_tests() -> Callable[..., None]:
    """Run tests in a process of their own, which uses other kernels than this one: ``run_tests(*options, **env)``."""

    def run(*options: str, **environment: str) -> None:
        usual = ["-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *usual, *options],
            cwd=ROOT,
            env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        assert run.returncode == 0, run.stdout[-3000:]
        assert "no native kernels here" not in run.stdout

    return run
