"""Results of a step on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes between which tensors begin


class HostRead(Protocol):
    """A read that has begun."""

    def wait(self) -> list[list[Any]]:
        """Wait for the numbers; returns them as nested lists, one for each tensor."""


class DirectRead:
    """A read that begins when it is waited for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """``tensors``: on any device."""
        self._tensors = tensors

    def wait(self) -> list[list[Any]]:
        """Wait for the device, and copy."""
        return [tensor.tolist() for tensor in self._tensors]


class _PinnedRead:
    """Copies into one piece of pinned memory, which the device makes behind the work that it has been given."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._event = torch.cuda.Event()
        self._views: list[Tensor] = []

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Begin to copy."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        if sum(sizes) > len(self._memory):
            self._memory = torch.empty(2 * sum(sizes), dtype=torch.uint8, pin_memory=True)
        self._views, end = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            view = self._memory[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._views.append(view.copy_(tensor, non_blocking=True))
            end += size
        self._event.record()

    def wait(self) -> list[list[Any]]:
        """Wait for the copies alone, not for what the device was given after them."""
        self._event.synchronize()
        return [view.tolist() for view in self._views]


class PinnedReads:
    """Reads of a GPU into pinned memory that is used again and again.

    Two reads take turns: one may begin before the last one was waited for.
    """

    def __init__(self) -> None:
        self._reads = cycle((_PinnedRead(), _PinnedRead()))

    def begin(self, tensors: Sequence[Tensor]) -> HostRead:
        """Begin to read contiguous tensors, behind all work that the current stream has; does not wait."""
        read = next(self._reads)
        read.begin(tensors)
        return read
