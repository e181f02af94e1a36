"""Memory of packed weights: side by side in chunks of huge pages.

Streaming weights through pages of 4 KiB misses the TLB at every one of them. A weight of some megabytes on its own has
small pages at both ends, up to 2 MiB each; its neighbour in a chunk does not.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from weakref import ReferenceType, ref

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
CHUNK = 64 << 20  # what no weight has been put into yet takes no memory
_LINE = 64  # of a cache


@dataclass(slots=True)
class _Chunk:
    """Memory that weights keep: it goes back to the system with the last of them, the places of dropped ones too."""

    memory: ReferenceType[mmap.mmap]
    used: int  # bytes of it


class _Chunks:
    """The chunk that the next weight goes into."""

    lock = Lock()
    newest: _Chunk | None = None


def packed_memory(count: int, dtype: torch.dtype) -> Tensor:
    """Memory for a packed weight on the CPU.

    Args:
        count: numbers, at least one.
        dtype: their type.

    Returns:
        [count] zeros, from the beginning of a cache line on.

    Raises:
        ValueError: there are no numbers.
        MemoryError: the system has no room for them.
    """
    if count < 1:
        raise ValueError(f"{count} numbers are no weight")
    size = count * dtype.itemsize
    if size > CHUNK // 2:
        chunk, begin = _new_chunk(size)
        return torch.frombuffer(chunk, dtype=dtype, count=count, offset=begin)
    with _Chunks.lock:
        newest = _Chunks.newest
        found = None if newest is None else newest.memory()
        begin = 0 if newest is None else -(-newest.used // _LINE) * _LINE
        if newest is None or found is None or begin + size > len(found):
            found, begin = _new_chunk(CHUNK)
            newest = _Chunks.newest = _Chunk(ref(found), begin)
        newest.used = begin + size
        return torch.frombuffer(found, dtype=dtype, count=count, offset=begin)


def _new_chunk(size: int) -> tuple[mmap.mmap, int]:
    """New memory, and the place in it where its first huge page begins; behind that are ``size`` bytes or more."""
    whole = -(-size // HUGE_PAGE) * HUGE_PAGE
    try:
        chunk = mmap.mmap(-1, whole + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{whole} bytes for packed weights: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # of Linux
        with suppress(OSError):  # a wish: a system without them has small ones
            chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk, -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % HUGE_PAGE
