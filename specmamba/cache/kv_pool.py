"""Keys and values of all requests, in pages, and the allocator of the pages."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from specmamba.cache.shapes import CacheShape


class PageAllocator:
    """Hands out pages 1..num_pages; page 0 is padding and belongs to nobody."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = array("q", range(num_pages, 0, -1))  # a list would spend 36 bytes on a page
        self._is_free = bytearray([0] + [1] * num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, or None (and nothing taken) when there are not so many."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back.

        Raises:
            RuntimeError: a page is free already, or is no page of this pool: an ownership bug.
        """
        for page in pages:
            if not 1 <= page <= self.num_pages or self._is_free[page]:
                raise RuntimeError(f"KV page {page} was freed twice or was never allocated")
            self._is_free[page] = 1
            self._free.append(page)


class KVPool:
    """Keys and values [layers, (num_pages + 1) * page_size, heads, head_dim].

    The token slot of an offset in a page is page * page_size + offset.
    """

    def __init__(self, shape: CacheShape, num_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        size = (shape.num_kv_layers, (num_pages + 1) * page_size, shape.num_kv_heads, shape.head_dim)
        self.k = torch.zeros(size, dtype=shape.dtype, device=device)
        self.v = torch.zeros(size, dtype=shape.dtype, device=device)

    @property
    def num_tokens(self) -> int:
        return self.allocator.num_pages * self.page_size

    @property
    def num_used_tokens(self) -> int:
        """Tokens in allocated pages, the unused ends of the pages included."""
        return self.num_tokens - self.allocator.num_free * self.page_size

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, heads, head_dim] at token slots [T] of a layer; what is not finite as 0.

        A masked key still meets a query, and what is not a number survives any mask: it would spoil whoever shares
        the padding slot, or gets the page next. The request it came from is found out by its own hidden states.
        """
        self.k[layer].index_copy_(0, slots, k.nan_to_num(0.0, 0.0, 0.0))
        self.v[layer].index_copy_(0, slots, v.nan_to_num(0.0, 0.0, 0.0))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy tokens between slots [T], in all layers; every read happens before any write."""
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]
