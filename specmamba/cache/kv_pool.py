"""Keys and values of all requests and of the prefix cache, in pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from specmamba.cache.page_allocator import PageAllocator
from specmamba.cache.shapes import CacheShape


class KVPool:
    """Keys ``k`` and values ``v``: for every layer a tensor [(num_pages + 1) * page_size, heads, head_dim].

    The token slot of an offset in a page is page * page_size + offset. A model without attention has no layers here,
    and pages that count tokens all the same.
    """

    def __init__(self, shape: CacheShape, num_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        num_slots = (num_pages + 1) * page_size
        self._groups = tuple(
            lazy_zeros((group.num_layers, num_slots, group.num_heads, group.head_dim), shape.dtype, device)
            for _ in range(2)
            for group in shape.kv
        )
        layers = [layer for group in self._groups for layer in group]
        self.k, self.v = tuple(layers[: shape.num_kv_layers]), tuple(layers[shape.num_kv_layers :])

    def from_layer(self, first: int) -> KVPool:
        """The same memory for a model that numbers the layers from ``first`` on from 0."""
        view = copy(self)
        view.k, view.v = self.k[first:], self.v[first:]
        return view

    @property
    def num_tokens(self) -> int:
        return self.allocator.num_pages * self.page_size

    @property
    def num_used_tokens(self) -> int:
        """Tokens in pages that requests need, the unused ends of the pages included."""
        return self.allocator.num_pinned * self.page_size

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in pages that the prefix cache alone holds: they can be evicted."""
        return self.allocator.num_evictable * self.page_size

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy tokens between slots [T], in all layers; every read happens before any write."""
        for group in self._groups:
            group[:, target] = group[:, source]


ALIGNMENT = 64  # bytes of a cache line, and of the widest vector


def lazy_zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory on a CPU only once they are written.

    A pool is as large as it may ever get. PyTorch's own zeros are written at once; NumPy's come from the system, which
    hands out a page at its first use.
    """
    if device.type != "cpu":
        return torch.zeros(*size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[offset : offset + num_bytes]).view(dtype).view(*size)
