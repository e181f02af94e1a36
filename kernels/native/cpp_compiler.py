"""C++ compilers that native kernels are built with: which one, its options, and how it is run."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from specmamba.kernels.native.levels import Level, NativeUnavailableError

KERNELS = Path(__file__).parents[1]  # sources include "parallel.h", and headers of operators as "operator/header.h"
INCLUDES = (f"-I{KERNELS / 'native'}", f"-I{KERNELS}")
# Without contraction a product and a sum are one instruction only where a kernel says so, whatever the compiler.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", *INCLUDES)
COMPILERS = ("g++", "clang++", "c++")
ZIG = "ziglang"  # a compiler as a Python package, the extra "compiler"
TIMEOUT_SECONDS = 300  # the first run of zig compiles its C++ library too, a minute or two on two cores


def find_compiler() -> list[str]:
    """The C++ compiler's command: ``$CXX`` where it is set, else the first that is installed, else ``ziglang``.

    Raises:
        NativeUnavailableError: there is none.
        ValueError: quotes in ``$CXX`` do not close.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    if chosen:
        raise NativeUnavailableError(f"there is no C++ compiler ($CXX names {chosen[0]!r}, which is not installed)")
    if sys.executable and find_spec(ZIG) is not None:
        return [sys.executable, "-m", ZIG, "c++"]
    raise NativeUnavailableError(f"there is no C++ compiler (none of {', '.join((*COMPILERS, ZIG))} is installed)")


def command_of(compiler: list[str], level: Level) -> list[str]:
    """The command of a compiler with all options for an instruction set, but for what it makes of which files."""
    is_zig = Path(compiler[0]).name == "zig" or ZIG in compiler
    return [*compiler, *((f"-mcpu={level.zig_cpu}",) if is_zig else level.options), *FLAGS]


def version_of(compiler: list[str]) -> str:
    """What the compiler says of itself; "" where it says nothing.

    Raises:
        NativeUnavailableError: it does not run.
    """
    return _run([*compiler, "--version"]).stdout


def run_compiler(command: list[str]) -> None:
    """Run a compiler whose last arguments are a source or objects, "-o" and the result.

    Raises:
        NativeUnavailableError: it fails; the message has its last line.
    """
    result = _run(command)
    if result.returncode != 0:
        last = (result.stderr.strip() or "no message").splitlines()[-1]
        raise NativeUnavailableError(f"{command[0]} does not compile {Path(command[-3]).name}: {last}", logging.WARNING)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} does not run: {error}", logging.WARNING) from None
