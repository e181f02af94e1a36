"""The C++ compiler with other options than those of kernels, for tests to which the speed of kernels is nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tests.pairwise import IS_FULL


def less_optimized(compiler: Sequence[str], option: str) -> list[str]:
    """The command of a compiler that is told ``option``, "-O1" say, behind all else: the last -O counts.

    Kernels compile in half of the time with -O1, in a fifth with -O0. In a full run they are compiled as ever. The
    command is the same in every run, so that what it has compiled is found in the cache.
    """
    return list(compiler) if IS_FULL else ["sh", "-c", f'exec "$@" {option}', "c++", *compiler]
