"""Batch sizes that steps are captured for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def bucket_sizes(largest: int) -> tuple[int, ...]:
    """Rising sizes up to ``largest``, itself among them: 1, 2, 4, 8, then steps of a quarter to an eighth.

    A batch is padded to the next size. Padding costs a part of a row's time, a size costs capture time and memory.
    """
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, largest + 1, 32)}
    return (*sorted(size for size in sizes if size < largest), largest)


def bucket_for(batch_size: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket that holds a batch; None above the largest."""
    place = bisect_left(buckets, batch_size)
    return buckets[place] if place < len(buckets) else None
