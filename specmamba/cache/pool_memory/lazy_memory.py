"""Tensors of a CPU that take memory where they were written, and give it back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specmamba.processes.unused_memory import end_huge_pages_at, give_back_pages

ALIGNMENT = 64  # bytes of a cache line, and of the widest vector


def lazy_zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros that take physical memory on a CPU only when they are first written.

    A pool has its largest size from the start. PyTorch writes its zeros at once; NumPy gets them from the operating
    system, which maps a page at its first use, or clears memory that was freed before, which is given back here.
    """
    if device.type != "cpu":
        return torch.zeros(*size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    zeros = torch.from_numpy(memory[offset : offset + num_bytes]).view(dtype).view(*size)
    give_back_zeros(zeros)
    return zeros


def give_back_zeros(zeros: Tensor) -> None:
    """Give back the memory that a tensor of ``lazy_zeros`` has taken: its whole pages are zeros again.

    On other devices than a CPU, and other systems than Linux, it stays as it is.
    """
    if zeros.is_cpu:
        give_back_pages(zeros.data_ptr(), zeros.nbytes)


def give_back_behind(layers: Tensor, count: int) -> None:
    """Give back what a tensor of ``lazy_zeros`` has behind the first ``count`` entries of each layer, as above.

    The system may use huge pages for these entries, and uses none that would reach behind them.
    """
    for layer in layers if layers.is_cpu else ():
        begin = layer.data_ptr()
        end_huge_pages_at(begin, begin + layer[:count].nbytes, begin + layer.nbytes)
        give_back_zeros(layer[count:])


class LazyLayers:
    """``tensor`` [layers, entries, ...] of which the operating system gives memory to what was written.

    On other devices than a CPU all of it has memory, always.
    """

    def __init__(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = lazy_zeros(size, dtype, device)

    def fit(self, count: int) -> None:
        """Give back the memory behind the first ``count`` entries of each layer; huge pages end before it."""
        give_back_behind(self.tensor, count)

    def give_back(self) -> None:
        """Make all entries zeros that take no memory, on a CPU."""
        give_back_zeros(self.tensor)
