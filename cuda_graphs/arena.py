"""Memory of captured steps on a CPU: blocks that are used again when no tensor is left in them."""

from __future__ import annotations

from bisect import bisect_left, insort

import torch
from torch import Tensor

ALIGNMENT = 64


class Arena:
    """Blocks that stay. Tensors in them are made while a step is recorded, and one step runs at a time.

    A block is free when its storage has no other holder. The steps that were recorded write it again, in order.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[int, torch.UntypedStorage]] = []  # with their bytes, the smallest first
        self._places: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(size for size, _ in self._blocks)

    def like(self, x: Tensor) -> Tensor:
        """An uninitialised tensor with the shape, strides and dtype of x, in a block."""
        num_elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        block = self._take(num_elements * x.element_size() if x.numel() else 0)
        made = torch.empty(0, dtype=x.dtype)
        made.set_(block, 0, x.shape, x.stride())
        return made

    def owns(self, x: object) -> bool:
        """Whether this is a tensor in one of the blocks."""
        return isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self._places

    def _take(self, num_bytes: int) -> torch.UntypedStorage:
        """The smallest free block that is large enough and not twice too large; a new one where there is none."""
        largest = 2 * num_bytes + ALIGNMENT
        for place in range(bisect_left(self._blocks, num_bytes, key=_size), len(self._blocks)):
            size, block = self._blocks[place]
            if size > largest:
                break
            if _is_free(block):
                return block
        size = max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        block = torch.UntypedStorage(size)
        insort(self._blocks, (size, block), key=_size)
        self._places.add(block.data_ptr())
        return block


def _size(block: tuple[int, torch.UntypedStorage]) -> int:
    return block[0]


def _is_free(block: torch.UntypedStorage) -> bool:
    return int(torch._C._storage_Use_Count(block._cdata)) == 1
