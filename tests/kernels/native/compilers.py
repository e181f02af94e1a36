"""The C++ compiler with other options than those of kernels, for tests to which the speed of kernels is nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from specmamba.kernels.native.cpp_compiler import KERNELS
from specmamba.kernels.native.library import sources
from tests.pairwise import IS_FULL

# What vector.h says of instructions that some levels have beside their vectors.
SWITCHES = re.compile("SPECMAMBA_(MULTIPLIES|HAS)_")


def less_optimized(compiler: Sequence[str], option: str) -> list[str]:
    """The command of a compiler that is told ``option``, "-O1" say, behind all else: the last -O counts.

    Kernels compile in half of the time with -O1, in a fifth with -O0. In a full run they are compiled as ever. The
    command is the same in every run, so that what it has compiled is found in the cache.
    """
    return list(compiler) if IS_FULL else ["sh", "-c", f'exec "$@" {option}', "c++", *compiler]


def sources_with_switches() -> list[Path]:
    """The sources that have other code on levels with the same vectors, such as all with AVX-512.

    Elsewhere only functions of vector.h differ among these levels, which test_vectors.py compiles and runs on each.
    """
    return [source for source in sources() if any(SWITCHES.search(file.read_text("utf8")) for file in _read_by(source))]


def _read_by(source: Path) -> set[Path]:
    """A source with the headers that it includes, and these include, but for those of kernels/native."""
    found, waiting = set[Path](), [source]
    while waiting:
        file = waiting.pop()
        found.add(file)
        headers = {KERNELS / name for name in re.findall(r'#include "(\w+/\w+\.h)"', file.read_text("utf8"))}
        waiting += headers - found
    return found
