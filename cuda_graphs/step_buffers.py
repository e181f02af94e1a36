"""Inputs of a captured step: batch-size buckets, and columns of numbers per row that keep their memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Columns:
    """Named columns of up to ``num_rows`` numbers, of one dtype, in one tensor on the device.

    ``write`` is one copy from the host for all of them, which does not wait where the host's memory is pinned; on a CPU
    the steps read what the host writes. The host may write again only after it has waited for the device, as it does
    when it reads the result of a step.
    """

    def __init__(self, padding: Mapping[str, float], num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the columns.

        Args:
            padding: value of padding rows, by column.
            num_rows: of the largest batch.
            dtype: of all columns.
            device: where they are read.
        """
        self._names = {name: place for place, name in enumerate(padding)}
        self._padding = torch.tensor(list(padding.values()), dtype=dtype)[:, None].numpy()
        self._host = torch.empty(len(padding), num_rows, dtype=dtype, pin_memory=device.type == "cuda")
        self._numbers = self._host.numpy()
        self._device = self._host if device.type == "cpu" else torch.empty_like(self._host, device=device)
        self.write({})

    def write(self, columns: Mapping[str, Sequence[float]]) -> None:
        """Fill columns from their first row on; all other rows and columns become padding.

        Raises:
            KeyError: there is no such column.
        """
        self._numbers[:] = self._padding
        for name, numbers in columns.items():
            self._numbers[self._names[name], : len(numbers)] = numbers
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def read(self, name: str, num_rows: int) -> Tensor:
        """Return the first rows of a column, [num_rows], on the device: a view that later writes update."""
        return self._device[self._names[name], :num_rows]


def bucket_sizes(largest: int) -> tuple[int, ...]:
    """Return rising sizes up to ``largest``, which is included: 1, 2, 4, 8, then steps of 8, 16 and 32.

    A batch is padded to the next size. A padding row costs part of a row's time, a size costs capture time and memory.
    """
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, largest + 1, 32)}
    return (*sorted(size for size in sizes if size < largest), largest)


def bucket_for(batch_size: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest bucket that holds a batch; None if the batch is larger than all."""
    place = bisect_left(buckets, batch_size)
    return buckets[place] if place < len(buckets) else None
