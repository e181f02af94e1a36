"""Inputs of a captured step: batch-size buckets, and columns of numbers per row that keep their memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

Queue = Callable[[Callable[[], object]], object]  # does some work of the device behind what that was given


def at_once(work: Callable[[], object]) -> None:
    """Give work to the device behind what the current stream has."""
    work()


class _Piece:
    """Memory of the host for all columns, pinned for a GPU."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self.memory = torch.empty(shape, dtype=dtype, pin_memory=self._event is not None)
        self.numbers = self.memory.numpy()

    def wait(self) -> None:
        """Wait until it was copied."""
        if self._event is not None:
            self._event.synchronize()

    def send(self, to: Tensor) -> None:
        """Copy it."""
        to.copy_(self.memory, non_blocking=True)
        if self._event is not None:
            self._event.record()


class Columns:
    """Named columns of up to ``num_rows`` numbers, of one dtype, in one tensor on the device.

    ``write`` is one copy from the host for all of them, behind the work that the device has: two pieces of pinned
    memory take turns, so the host may write for a step while the copy for the one before is still to be made. On a CPU
    the steps read what the host writes, which must wait for them then.
    """

    def __init__(
        self,
        padding: Mapping[str, float],
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        is_mirrored: bool | None = None,
        queue: Queue = at_once,
    ) -> None:
        """Allocate the columns.

        Args:
            padding: value of padding rows, by column.
            num_rows: of the largest batch.
            dtype: of all columns.
            device: where they are read.
            is_mirrored: the device has its own copy; None: it has one unless it is a CPU.
            queue: gives copies to the device.
        """
        self._names = {name: place for place, name in enumerate(padding)}
        on_host = torch.tensor(list(padding.values()), dtype=dtype)[:, None]
        self._padding = on_host.numpy()
        self._is_mirrored = device.type != "cpu" if is_mirrored is None else is_mirrored
        shape = len(padding), num_rows
        pieces = [_Piece(shape, dtype, device) for _ in range(2 if self._is_mirrored else 1)]
        self._pieces, self._queue = cycle(pieces), queue
        self._device = torch.empty(shape, dtype=dtype, device=device) if self._is_mirrored else pieces[0].memory
        self.padding = on_host.to(device)  # [columns, 1]
        self.write({})

    def write(self, columns: Mapping[str, Sequence[float]]) -> None:
        """Fill columns from their first row on; all other rows and columns become padding.

        Raises:
            KeyError: there is no such column.
        """
        piece = next(self._pieces)
        piece.wait()
        piece.numbers[:] = self._padding
        for name, numbers in columns.items():
            piece.numbers[self._names[name], : len(numbers)] = numbers
        if self._is_mirrored:
            self._queue(partial(piece.send, self._device))

    def read(self, name: str, num_rows: int) -> Tensor:
        """Return the first rows of a column, [num_rows], on the device: a view that later writes update."""
        return self._device[self._names[name], :num_rows]

    def put(self, columns: Mapping[str, Tensor], is_row: Tensor) -> None:
        """Write columns of the first rows on the device, where a captured step may do it.

        Args:
            columns: [B] each, of any dtype; neighbours, in their order.
            is_row: [B] bool; False: the row becomes padding.
        """
        first = self._names[next(iter(columns))]
        places = slice(first, first + len(columns))
        numbers = torch.stack([x.to(self._device.dtype) for x in columns.values()])
        self._device[places, : len(is_row)] = numbers.where(is_row, self.padding[places])

    def keep(self, places: Tensor, others: Columns) -> None:
        """Move rows on the device.

        Args:
            places: [num_rows] int64, which row each one gets its numbers from; negative: from the same row of others.
            others: the same columns, written for this.
        """
        moved = self._device.index_select(1, places.clamp(min=0))
        self._device.copy_(moved.where(places >= 0, others._device))


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
