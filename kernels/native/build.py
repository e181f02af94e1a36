"""Kernels compiled ahead of time: one shared library per instruction set, which wheels carry. They need no compiler.

The libraries are plain C: they link neither to Python nor to torch nor to an OpenMP runtime, only to the C and C++
libraries, which torch needs too. So one wheel serves all versions of Python and torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from specmamba.kernels.native.cpp_compiler import command_of, find_compiler, run_compiler
from specmamba.kernels.native.levels import LEVELS, MACHINE, Level, NativeUnavailableError
from specmamba.kernels.native.library import shipped_name, sources

_LINK = ("-shared", "-s", "-Wl,--gc-sections")
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")


def build(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Compile all kernels for instruction sets of this kind of processor, also for those that this one lacks.

    Args:
        folder: that the libraries are written to.
        names: of instruction sets; none: all of them.

    Raises:
        NativeUnavailableError: no compiler, a failed build, an unknown name, or a processor of another kind.
    """
    if not LEVELS:
        raise NativeUnavailableError(f"there are no kernels for processors of the kind {MACHINE}")
    known = [level.name for level in LEVELS]
    if unknown := sorted(set(names) - set(known)):
        raise NativeUnavailableError(f"{', '.join(unknown)}: instruction sets of {MACHINE} are {', '.join(known)}")
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _build(level, compiler, folder / shipped_name(level)) for level in LEVELS if not names or level.name in names
    ]


def platform_tag(libraries: Iterable[Path]) -> str:
    """The platform of a wheel with these libraries, by the newest version of glibc that they need (PEP 600)."""
    found = (match for library in libraries for match in _GLIBC.findall(library.read_bytes()))
    major, minor = max((int(major), int(minor)) for major, minor in found)
    return f"manylinux_{major}_{minor}_{MACHINE}"


def _build(level: Level, compiler: list[str], library: Path) -> Path:
    with TemporaryDirectory() as folder:
        objects = compiled_objects(level, compiler, Path(folder))
        run_compiler([*compiler, *_LINK, *map(str, objects), "-o", str(library)])
    return library


def compiled_objects(level: Level, compiler: list[str], folder: Path) -> list[Path]:
    """Compile the source of every operator into an object in ``folder``, side by side.

    Raises:
        NativeUnavailableError: the compiler fails.
    """
    objects = [folder / f"{source.parent.name}.o" for source in sources()]
    commands = (
        [*command_of(compiler, level), "-c", str(source), "-o", str(compiled)]
        for source, compiled in zip(sources(), objects, strict=True)
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run_compiler, commands))
    return objects
