"""Numbers of the host on their way to a table of the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST = 256  # numbers that there is room for at the start


class _Piece:
    """Memory of the host, pinned for a GPU, and as much of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event() if device.type == "cuda" else None
        self._grow(LEAST)

    def begin(self, count: int) -> NDArray[np.int64]:
        """Memory [2, count] to be written: what stood there has been copied."""
        if self._event is not None:
            self._event.synchronize()
        if 2 * count > len(self._host):
            self._grow(4 * count)
        self._count = count
        return self._numbers[: 2 * count].reshape(2, count)

    def send(self) -> Tensor:
        """Copy what was written, without waiting for it."""
        end = 2 * self._count
        sent = self._on_device[:end].copy_(self._host[:end], non_blocking=True)
        if self._event is not None:
            self._event.record()
        return sent.view(2, self._count)

    def _grow(self, size: int) -> None:
        with torch.inference_mode(False):  # also written outside of steps
            self._host = torch.empty(size, dtype=torch.int64, pin_memory=self._event is not None)
            self._on_device = torch.empty(size, dtype=torch.int64, device=self._device)
            self._numbers: NDArray[np.int64] = self._host.numpy()


class PairWrites:
    """Copies pairs of integers to a device, without waiting for it, through memory that is used again and again.

    Two copies take turns in two pieces of memory: the host writes one while the other may still be read.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: where the numbers are needed."""
        self._pieces = cycle((_Piece(device), _Piece(device)))
        self._piece = next(self._pieces)

    def begin(self, count: int) -> NDArray[np.int64]:
        """Return memory of the host, [2, count] int64, that is to be filled before ``send``."""
        self._piece = next(self._pieces)
        return self._piece.begin(count)

    def send_columns(self, columns: Sequence[Sequence[int]]) -> list[Tensor]:
        """Copy columns of numbers of any lengths; returns them on the device, valid as long as those of ``send``."""
        sizes = [len(column) + len(column) % 2 for column in columns]  # each begins where a kernel reads fastest
        flat, first = self.begin(sum(sizes) // 2).reshape(-1), 0
        for column, size in zip(columns, sizes, strict=True):
            flat[first : first + len(column)] = column
            first += size
        parts = self.send().view(-1).split(sizes)
        return [part[: len(column)] for part, column in zip(parts, columns, strict=True)]

    def send(self) -> Tensor:
        """Copy the numbers of the last ``begin``; returns them on the device, [2, count].

        What it returns keeps its values until the second ``send`` after it.
        """
        return self._piece.send()
