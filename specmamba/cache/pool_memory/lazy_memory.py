"""Tensors of a CPU that take memory where they were written, and give it back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specmamba.processes.unused_memory import HUGE_PAGE, end_huge_pages_at, give_back_pages, join_pages

ALIGNMENT = 64  # bytes of a cache line, and of the widest vector
# A join copies a huge page, and the next end within that page undoes it: it pays where the end has stayed behind it.
STABLE_FITS = 16


def lazy_zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device, alignment: int = ALIGNMENT) -> Tensor:
    """Allocate zeros that take physical memory on a CPU only when they are first written.

    A pool has its largest size from the start. PyTorch writes its zeros at once; NumPy gets them from the operating
    system, which maps a page at its first use, or clears memory that was freed before, which is given back here.
    ``alignment``: of the address on a CPU, in bytes.
    """
    if device.type != "cpu":
        return torch.zeros(*size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = np.zeros(num_bytes + alignment, dtype=np.uint8)
    offset = -memory.ctypes.data % alignment
    zeros = torch.from_numpy(memory[offset : offset + num_bytes]).view(dtype).view(*size)
    give_back_zeros(zeros)
    return zeros


def give_back_zeros(zeros: Tensor) -> None:
    """Give back the memory that a tensor of ``lazy_zeros`` has taken: its whole pages are zeros again.

    On other devices than a CPU, and other systems than Linux, it stays as it is.
    """
    if zeros.is_cpu:
        give_back_pages(zeros.data_ptr(), zeros.nbytes)


class LazyLayers:
    """``tensor`` [layers, entries, ...] of which the operating system gives memory to what was written.

    On other devices than a CPU all of it has memory, always.
    """

    def __init__(self, size: Sequence[int], dtype: torch.dtype, device: torch.device, grows: bool) -> None:
        """Allocate zeros [layers, entries, ...]; ``grows``: memory can end before the last entry of a layer."""
        self.tensor = lazy_zeros(size, dtype, device, HUGE_PAGE if grows else ALIGNMENT)
        self._count = size[1]  # entries of each layer that may have memory
        self._recent = deque([0] * STABLE_FITS, maxlen=STABLE_FITS)
        self._layer_bytes = math.prod(size[1:]) * dtype.itemsize
        # elastic pools fit in each move: no view of a tensor is made for it
        self._begins = [layer.data_ptr() for layer in self.tensor] if self.tensor.is_cpu else []
        self._borders: dict[int, int] = {}  # by the address of a layer: where its huge pages end
        # by the address of a layer: its whole pages that have grown in parts
        self._cut: dict[int, set[int]] = {begin: set() for begin in self._begins}

    def fit(self, count: int) -> None:
        """Give back the memory behind the first ``count`` entries of each layer; huge pages end before it.

        Behind entries that are added there is none: nothing was written there since it was given back.
        """
        entry_bytes = self._layer_bytes // max(1, self.tensor.shape[1])
        num_bytes, num_before = entry_bytes * count, entry_bytes * self._count
        self._recent.append(count)
        stable_bytes = entry_bytes * min(self._recent)
        for begin in self._begins:
            end, limit = begin + num_bytes, begin + self._layer_bytes
            before, border = self._borders.get(begin), end // HUGE_PAGE
            if before != border:
                end_huge_pages_at(begin, end, limit)
                self._borders[begin] = border
            cut = self._cut[begin]
            if (begin + num_before) % HUGE_PAGE and before is not None and begin <= before * HUGE_PAGE:
                cut.add(before)  # a part of it had small pages, and would keep them
            self._cut[begin] = {page for page in cut if page < border}
            self._join(begin, begin + stable_bytes)
            if count < self._count:
                give_back_pages(end, limit - end)
        self._count = count

    def _join(self, begin: int, end: int) -> None:
        """Make pages of a layer whole that have grown in parts and lie before an address."""
        stable = {page for page in self._cut[begin] if (page + 1) * HUGE_PAGE <= end}
        self._cut[begin] -= stable
        for page in stable:
            join_pages(page * HUGE_PAGE)

    def give_back(self) -> None:
        """Make all entries zeros that take no memory, on a CPU."""
        give_back_zeros(self.tensor)


def whole_huge_pages(count: int, entry_bytes: int) -> int:
    """Round the entries of a layer up to whole huge pages, so that the next layer begins with one.

    Only addresses are taken for it, of less than one such page; where it would be more, the count stays.
    """
    step = HUGE_PAGE // math.gcd(HUGE_PAGE, entry_bytes) if entry_bytes else 1
    whole = -(-count // step) * step
    return whole if count * entry_bytes >= HUGE_PAGE > (whole - count) * entry_bytes else count
