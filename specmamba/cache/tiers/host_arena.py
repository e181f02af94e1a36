"""One bounded block of host memory, from which pieces of any size are taken."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import torch

from specmamba.cache.pool_memory.lazy_memory import ALIGNMENT, lazy_zeros
from specmamba.cache.tiers.entry import Bytes
from specmamba.errors import ConfigError


class HostArena:
    """A block of bytes. Pieces are cut from the first hole that is large enough; holes that touch become one.

    The block is pinned for a GPU, which copies to and from pinned memory at the full speed of the bus. Otherwise the
    system gives physical memory to what is written.
    """

    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        """Allocate the block. Raises ConfigError: the system does not give so much memory."""
        self.num_bytes = num_bytes // ALIGNMENT * ALIGNMENT
        self._memory = _new_block(self.num_bytes, is_pinned)
        self._holes = [(0, self.num_bytes)] if self.num_bytes else []  # (offset, size), by offset

    @property
    def num_free(self) -> int:
        """Bytes of all holes."""
        return sum(size for _, size in self._holes)

    def allocate(self, nbytes: int) -> int | None:
        """Take a piece, rounded up to whole cache lines; returns its offset, or None if no hole is large enough."""
        nbytes = aligned(nbytes)
        for number, (offset, size) in enumerate(self._holes):
            if size >= nbytes:
                rest = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                self._holes[number : number + 1] = rest
                return offset
        return None

    def free(self, offset: int, nbytes: int) -> None:
        """Give back a piece that was allocated with this size."""
        begin, end = offset, offset + aligned(nbytes)
        after = bisect.bisect(self._holes, (begin, 0))
        first, last = after, after
        if first and sum(self._holes[first - 1]) == begin:
            first -= 1
            begin = self._holes[first][0]
        if last < len(self._holes) and self._holes[last][0] == end:
            end = sum(self._holes[last])
            last += 1
        self._holes[first:last] = [(begin, end - begin)]

    def has_room_beside(self, pieces: Iterable[tuple[int, int]], nbytes: int) -> bool:
        """Whether a piece would find a hole if only ``pieces``, as (offset, size), were left."""
        end = 0
        for offset, size in sorted(pieces):
            if offset - end >= aligned(nbytes):
                return True
            end = offset + aligned(size)
        return self.num_bytes - end >= aligned(nbytes)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Return the memory of a piece, or of a part of one."""
        return self._memory[offset : offset + nbytes]


def aligned(nbytes: int) -> int:
    """Round a size up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _new_block(num_bytes: int, is_pinned: bool) -> Bytes:
    try:
        if is_pinned:
            block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            block = lazy_zeros((num_bytes,), torch.uint8, torch.device("cpu"))
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"--hicache-size, --hicache-ratio: {num_bytes / (1 << 30):.2f} GiB of host memory for prefixes cannot be "
            f"allocated: lower it ({str(error).splitlines()[0]})"
        ) from None
    memory: Bytes = block.numpy()
    return memory
