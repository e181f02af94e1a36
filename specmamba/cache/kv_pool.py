"""Keys and values of all requests and of the prefix cache, in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.cache.memory import lazy_zeros
from specmamba.cache.page_allocator import PageAllocator
from specmamba.cache.shapes import CacheShape


class KVPool:
    """Keys and values [layers, (num_pages + 1) * page_size, heads, head_dim].

    The token slot of an offset in a page is page * page_size + offset.
    """

    def __init__(self, shape: CacheShape, num_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        size = (shape.num_kv_layers, (num_pages + 1) * page_size, shape.num_kv_heads, shape.head_dim)
        self.k, self.v = (lazy_zeros(size, shape.dtype, device) for _ in range(2))

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
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]
