"""Tensors whose layers end where their memory ends: addresses are reserved, and chunks are mapped into them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specmamba.cache.pool_memory.chunk_store import ChunkStore


class AddressRange:
    """Addresses for so many layers of ``layer_bytes``, of which the first chunks of each layer have memory.

    Tensors over it keep it alive; with the last of them its chunks go back to the store.
    """

    def __init__(self, store: ChunkStore, num_layers: int, layer_bytes: int) -> None:
        """Reserve addresses. Raises DriverError: that is impossible."""
        self._store, self._layer_bytes = store, layer_bytes
        self._chunks: list[list[int]] = [[] for _ in range(num_layers)]  # of each layer, in order
        self.num_bytes = num_layers * layer_bytes
        self.address = store.driver.reserve(self.num_bytes)
        finalizer = weakref.finalize(self, _free, store, self.address, layer_bytes, self._chunks)
        finalizer.atexit = False  # the process ends, and work on the device may still run

    @property
    def num_mapped(self) -> int:
        """Chunks of each layer."""
        return len(self._chunks[-1])

    def fit(self, count: int) -> None:
        """Map or unmap chunks at the end of each layer, so that each has ``count``, after all work of the device.

        Raises:
            DriverError: a call of the driver failed; some layers have other ends than the others then.
        """
        if count != self.num_mapped:
            self._store.settle()
        for layer, chunks in enumerate(self._chunks):
            begin = self.address + layer * self._layer_bytes
            if count < len(chunks):
                _unmap(self._store, begin, chunks, count)
            elif count > len(chunks):
                _map(self._store, begin, chunks, count)

    def bytes(self) -> Tensor:
        """All of it as a tensor [layers, layer_bytes] uint8. The first chunk must have memory already."""
        if self._store.device.type == "cuda":
            found = torch.as_tensor(self, device=self._store.device)
        else:
            found = torch.from_numpy(np.asarray(self))
        if found.data_ptr() != self.address:
            raise RuntimeError("PyTorch has copied memory of a pool instead of using it")
        return found.view(len(self._chunks), self._layer_bytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """What NumPy needs to know of it, where it is memory of the host."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What PyTorch needs to know of it, where it is memory of a GPU."""
        return self.__array_interface__


class MappedLayers:
    """``tensor`` [layers, entries, ...] in chunks of a store. Layers are as dense as in any other tensor.

    It has more entries than asked for, so that each layer begins with a chunk: a layer's last chunk is the only one
    that it may use in part.
    """

    def __init__(self, store: ChunkStore, size: Sequence[int], dtype: torch.dtype, count: int) -> None:
        """Map memory for the first ``count`` >= 1 entries of each layer. Raises DriverError: that is impossible."""
        num_layers, num_entries, *shape = size
        self._chunk_bytes, self._entry_bytes = store.chunk_bytes, math.prod(shape) * dtype.itemsize
        num_entries = store.whole(num_entries, self._entry_bytes)
        self._range = AddressRange(store, num_layers, num_entries * self._entry_bytes)
        self._range.fit(self._chunks_of(count))
        self._bytes = self._range.bytes()
        self._clear(0, self._range.num_mapped)
        self.tensor = self._bytes.view(dtype).view(num_layers, num_entries, *shape)

    def fit(self, count: int) -> None:
        """Map chunks for the first ``count`` entries of each layer, and unmap those behind them; new ones are zeros.

        Raises:
            DriverError: a call of the driver failed; the tensor is not to be used any more.
        """
        before, now = self._range.num_mapped, self._chunks_of(count)
        self._range.fit(now)
        self._clear(before, now)

    def give_back(self) -> None:
        """Keep everything: what these layers do not need, others may have."""

    def _chunks_of(self, count: int) -> int:
        return -(-count * self._entry_bytes // self._chunk_bytes)

    def _clear(self, first: int, end: int) -> None:
        """Zero chunks: what was in one before may be no number, and masks multiply some numbers by zero."""
        if first < end:
            self._bytes[:, first * self._chunk_bytes : end * self._chunk_bytes].zero_()


def _map(store: ChunkStore, begin: int, chunks: list[int], count: int) -> None:
    first = begin + len(chunks) * store.chunk_bytes
    for handle in store.take(count - len(chunks)):
        store.driver.map(begin + len(chunks) * store.chunk_bytes, handle)
        chunks.append(handle)
    store.driver.allow(first, begin + count * store.chunk_bytes - first)


def _unmap(store: ChunkStore, begin: int, chunks: list[int], count: int) -> None:
    while len(chunks) > count:
        store.driver.unmap(begin + (len(chunks) - 1) * store.chunk_bytes)
        store.put([chunks.pop()])


def _free(store: ChunkStore, address: int, layer_bytes: int, chunks: list[list[int]]) -> None:
    """Unmap all that is left, and free the addresses."""
    store.settle()
    for layer, of_layer in enumerate(chunks):
        _unmap(store, address + layer * layer_bytes, of_layer, 0)
    store.driver.free(address, len(chunks) * layer_bytes)
