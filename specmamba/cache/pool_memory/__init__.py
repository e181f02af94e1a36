"""Where the tensors of pools lie: memory that takes and gives back what stands behind the end of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specmamba.cache.pool_memory.chunk_store import ChunkStore
from specmamba.cache.pool_memory.lazy_memory import LazyLayers, whole_huge_pages
from specmamba.cache.pool_memory.mapped_memory import MappedLayers


class Layers(Protocol):
    """One tensor of a pool, [layers, entries, ...]. Its address and its strides never change."""

    tensor: Tensor

    def fit(self, count: int) -> None:
        """Let the first ``count`` entries of each layer have memory, and nothing behind them where that is possible.

        New entries are zeros. All work that was launched on the entries that go has to be the device's already: it is
        waited for.

        Raises:
            DriverError: memory could not be mapped; the tensor is not to be used any more.
        """

    def give_back(self) -> None:
        """Make all entries zeros that take no memory, on a CPU."""


def entries_of_layer(most: int, count: int, store: ChunkStore | None, *entry_bytes: int) -> int:
    """The entries of each layer in the tensors of a pool: at least ``most``; their ends may have addresses alone.

    Args:
        most: that the pool can have.
        count: that it has at the start.
        store: as in ``new_layers``: layers are whole chunks then.
        entry_bytes: of each tensor with these entries. Without a store, where the pool can grow, layers of the tensor
            with the largest entries are whole huge pages, where that takes few addresses.
    """
    if store is not None:
        return store.whole(most, *entry_bytes)
    return whole_huge_pages(most, max(entry_bytes, default=0)) if count < most else most


def new_layers(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, count: int, store: ChunkStore | None
) -> Layers:
    """Allocate zeros [layers, entries, ...].

    Args:
        size: with the entries of ``entries_of_layer``.
        dtype: of the tensor.
        device: of the tensor.
        count: entries of each layer that have memory at the start.
        store: whose chunks are mapped into the tensor; None: it has memory of its own.
    """
    if store is None or not all(size):
        return LazyLayers(size, dtype, device, grows=count < size[1])
    return MappedLayers(store, size, dtype, count)
