"""Keys and values of all requests and of the prefix cache, and the allocator of the pages that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specmamba.cache.pool_memory import Layers, entries_of_layer, new_layers
from specmamba.cache.pool_memory.chunk_store import ChunkStore
from specmamba.cache.shapes import SCALE_DTYPE, CacheShape
from specmamba.kernels import state_copy
from specmamba.kernels.paged_attention.codes import as_bytes

Pages = NDArray[np.int64]
# Attention over pages in order is a few percent of a small model's step faster than over pages in the order of ended
# requests. So where many pages become free at once, those that are given next are sorted, and many are given in runs.
SORTED_FROM = 16  # pages that become free, or are given
MOST_SORTED = 2048  # pages that are given next
NO_PAGES: Pages = np.empty(0, dtype=np.int64)


class PageAllocator:
    """Reference counts of the pages 1..num_pages; page 0 is padding and is never allocated.

    A page has holders: rows of the request table and nodes of the prefix cache. It is free when it has none. A holder
    may pin the page: rows always do, nodes while a running request uses them. Pages that are held and not pinned can be
    freed by eviction, so an allocation can get at most ``num_available`` pages. Arrays of pages have no duplicates.
    The number of pages can change, up to ``most_pages``: pages behind ``num_pages`` are not there.
    """

    def __init__(self, num_pages: int, most_pages: int | None = None) -> None:
        self.num_pages = num_pages
        self.most_pages = num_pages if most_pages is None else most_pages
        self.num_free = num_pages
        self.num_pinned = 0
        self._stack = np.zeros(self.most_pages, dtype=np.int64)  # the first num_free of them are free
        self._stack[:num_pages] = np.arange(num_pages, 0, -1)
        self._holders = np.zeros(self.most_pages + 1, dtype=np.int32)
        self._pins = np.zeros(self.most_pages + 1, dtype=np.int32)

    @property
    def num_available(self) -> int:
        """Pages that are free or can be freed by eviction."""
        return self.num_pages - self.num_pinned

    @property
    def num_evictable(self) -> int:
        """Pages that are held and not pinned."""
        return self.num_available - self.num_free

    def allocate(self, count: int) -> Pages | None:
        """Allocate ``count`` free pages, held and pinned once each; None, with no change, if fewer are free."""
        if count > self.num_free:
            return None
        if SORTED_FROM <= count < min(self.num_free, MOST_SORTED):
            self._bring_runs_up(count)
        pages = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self.num_pinned += count
        self._holders[pages] = 1
        self._pins[pages] = 1
        return pages

    def hold(self, pages: Pages, pinned: bool) -> None:
        """Add a holder to pages that are held already.

        Raises:
            RuntimeError: a page is free or does not belong to this pool.
        """
        self._check_held(pages)
        self._holders[pages] += 1
        if pinned:
            self._pin(pages)

    def release(self, pages: Pages, pinned: bool) -> None:
        """Remove a holder, and its pin if ``pinned``; pages without a holder become free.

        Raises:
            RuntimeError: a page is free already, is given twice, does not belong to this pool, or was not pinned.
        """
        self._check_held(pages)
        ordered = np.sort(pages)  # np.unique imports numpy.ma
        if (ordered[1:] == ordered[:-1]).any():
            raise RuntimeError("a KV page was freed twice in one call")
        if pinned:
            self._unpin(pages)
        self._holders[pages] -= 1
        freed = pages[self._holders[pages] == 0]
        if self._pins[freed].any():
            raise RuntimeError("a KV page lost its last holder while it was pinned")
        self._stack[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)
        if len(freed) >= SORTED_FROM:
            self._stack[max(0, self.num_free - MOST_SORTED) : self.num_free][::-1].sort()

    def pin(self, pages: Pages) -> None:
        """Pin pages for one of their holders. Raises RuntimeError: a page is free or does not belong to this pool."""
        self._check_held(pages)
        self._pin(pages)

    def unpin(self, pages: Pages) -> None:
        """Remove one pin of these pages. Raises RuntimeError: a page was not pinned."""
        self._check_held(pages)
        self._unpin(pages)

    def extend(self, count: int) -> None:
        """Add free pages behind the others. Raises ValueError: there is no room for so many."""
        if not 0 <= count <= self.most_pages - self.num_pages:
            raise ValueError(f"{count} more pages than {self.num_pages} are more than {self.most_pages}")
        self._stack[count : count + self.num_free] = self._stack[: self.num_free]
        self._stack[:count] = np.arange(self.num_pages + count, self.num_pages, -1)  # low pages are given first
        self.num_pages += count
        self.num_free += count

    def shrink(self, count: int) -> tuple[Pages, Pages]:
        """Take the last ``count`` pages away. Those that are held become lower pages, with the same holders and pins.

        Returns:
            The pages that were held, ascending, and what they are now; the caller moves what is in them.

        Raises:
            ValueError: fewer pages are free.
        """
        if not 0 <= count <= self.num_free:
            raise ValueError(f"{count} pages cannot go: {self.num_free} of {self.num_pages} are free")
        last = self.num_pages - count
        source = np.flatnonzero(self._holders[last + 1 : self.num_pages + 1]) + (last + 1)
        free = np.flatnonzero(self._holders[1 : last + 1] == 0) + 1  # in order, without a sort of all
        target, free = free[: len(source)], free[len(source) :]
        for counts in (self._holders, self._pins):
            counts[target] = counts[source]
            counts[source] = 0
        self.num_pages, self.num_free = last, len(free)
        self._stack[: len(free)] = free[::-1]
        return source, target

    def holders(self, page: int) -> int:
        """Return the number of holders of a page."""
        return int(self._holders[page])

    def pins(self, page: int) -> int:
        """Return the number of pins of a page."""
        return int(self._pins[page])

    def _bring_runs_up(self, count: int) -> None:
        """Let the ``count`` pages that are given next be few runs of neighbours.

        The shortest run that is long enough, or the longest, and what it lacks likewise. What is left of the last one
        is given next: output follows its prompt.
        """
        window = self._stack[max(0, self.num_free - MOST_SORTED) : self.num_free]
        begins = np.concatenate([[0], np.flatnonzero(window[1:] != window[:-1] - 1) + 1])
        lengths = np.diff(begins, append=len(window))
        order: list[Pages] = []
        while count > 0:
            enough = np.flatnonzero(lengths >= count)
            run = int(enough[np.argmin(lengths[enough])] if len(enough) else np.argmax(lengths))
            order.append(np.arange(begins[run], begins[run] + lengths[run]))
            count -= lengths[run]
            lengths[run] = 0
        chosen = np.concatenate(order[::-1])
        window[:] = np.concatenate([np.delete(window, chosen), window[chosen]])

    def _pin(self, pages: Pages) -> None:
        self.num_pinned += int((self._pins[pages] == 0).sum())
        self._pins[pages] += 1

    def _unpin(self, pages: Pages) -> None:
        if (self._pins[pages] < 1).any():
            raise RuntimeError("a KV page was unpinned that was not pinned")
        self._pins[pages] -= 1
        self.num_pinned -= int((self._pins[pages] == 0).sum())

    def _check_held(self, pages: Pages) -> None:
        if len(pages) and (pages.min() < 1 or pages.max() > self.num_pages or (self._holders[pages] < 1).any()):
            raise RuntimeError("a KV page was freed twice or was never allocated")


class KVPool:
    """Keys ``k`` and values ``v``: for every layer a tensor [(num_pages + 1) * page_size, heads, head_dim].

    The token slot of an offset in a page is page * page_size + offset. A model without attention has no layers here,
    but its pages still count tokens. Codes (``CacheShape.kv_dtype``) have scales, ``k_scales`` and ``v_scales``: for
    every layer a tensor [(num_pages + 1) * page_size, heads] float32; None for every layer of other pools. Values of
    latent attention are views on their keys. A pool that can grow has the tensors of its largest size, or more, from
    the start; on a CPU they take memory where they were written, on a GPU where a store's chunks are mapped into them.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_pages: int,
        page_size: int,
        device: torch.device,
        most_pages: int | None = None,
        store: ChunkStore | None = None,
    ) -> None:
        self.page_size, self.is_exact = page_size, shape.is_exact
        self.allocator = PageAllocator(num_pages, most_pages)
        most_slots = (self.allocator.most_pages + 1) * page_size
        num_slots = entries_of_layer(most_slots, self._num_slots, store, *_bytes_of_slots(shape))
        sizes = [(group.num_layers, num_slots, group.num_heads, group.head_dim) for group in shape.kv]
        are_latent = [group.latent_dim is not None for group in shape.kv]
        self._memory: list[Layers] = []

        def new(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            self._memory.append(new_layers(size, dtype, device, self._num_slots, store))
            return self._memory[-1].tensor

        keys, values = _keys_and_values(sizes, are_latent, shape.stored_kv_dtype, new)
        value_dims = [group.latent_dim or group.head_dim for group in shape.kv]
        self.k = _layers(keys)
        self.v = _layers([group[..., -dim:] for group, dim in zip(values, value_dims, strict=True)])
        self.k_scales: tuple[Tensor | None, ...] = (None,) * shape.num_kv_layers
        self.v_scales: tuple[Tensor | None, ...] = self.k_scales
        groups = [*keys, *values]
        if shape.kv_dtype is not None:
            of_keys, of_values = _keys_and_values([size[:-1] for size in sizes], are_latent, SCALE_DTYPE, new)
            self.k_scales, self.v_scales = _layers(of_keys), _layers(of_values)
            groups += [*of_keys, *of_values]
        self._groups = tuple(as_bytes(group) for group in {id(group): group for group in groups}.values())

    def from_layer(self, first: int) -> KVPool:
        """Return a view on the same memory: the layers from ``first`` on, numbered from 0."""
        view = copy(self)
        view.k, view.v = self.k[first:], self.v[first:]
        view.k_scales, view.v_scales = self.k_scales[first:], self.v_scales[first:]
        return view

    @property
    def groups(self) -> tuple[Tensor, ...]:
        """All of it in few tensors, [layers, (num_pages + 1) * page_size, heads, ...]: keys, values, scales."""
        return self._groups

    @property
    def num_tokens(self) -> int:
        return self.allocator.num_pages * self.page_size

    @property
    def _num_slots(self) -> int:
        """Token slots, those of the padding page included."""
        return (self.allocator.num_pages + 1) * self.page_size

    @property
    def num_used_tokens(self) -> int:
        """Tokens in pages that requests need, the unused ends of the pages included."""
        return self.allocator.num_pinned * self.page_size

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in pages that the prefix cache alone holds: they can be evicted."""
        return self.allocator.num_evictable * self.page_size

    @property
    def is_unused(self) -> bool:
        """Whether all pages are free."""
        return self.allocator.num_free == self.allocator.num_pages

    def give_back(self) -> None:
        """Give back the memory of an unused pool, on a CPU."""
        for layers in self._memory:
            layers.give_back()

    def fit(self) -> None:
        """Let all layers have memory up to the last page, and none behind it: after each change of their number.

        Raises:
            DriverError: memory of a GPU could not be mapped; the pool is not to be used any more.
        """
        for layers in self._memory:
            layers.fit(self._num_slots)

    def move_pages(self, source: Pages, target: Pages) -> None:
        """Copy pages ``source`` [n] to ``target`` [n], none of which is among the former, in all layers."""
        offsets = np.arange(self.page_size)
        slots = [
            torch.from_numpy((pages[:, None] * self.page_size + offsets).reshape(-1)) for pages in (source, target)
        ]
        if self._groups:
            self.move(*(x.to(self._groups[0].device) for x in slots))

    def clear(self, slots: Tensor) -> None:
        """Make keys and values in these slots [T] zeros, in all layers; a code of 0 is 0 by any scale."""
        for layer in (*self.k, *self.v):
            as_bytes(layer)[slots] = 0

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy tokens from slots ``source`` [T] to ``target`` [T], in all layers; all reads come before all writes.

        Scales move with their codes.
        """
        if not source.is_cpu:  # a row's moves are too many for the form in Triton
            for group in self._groups:
                group[:, target] = group[:, source]
            return
        only_row = torch.zeros(1, dtype=torch.int64)
        for group in self._groups:
            state_copy.compact(group[:, None], only_row, source[None], target[None])


def _keys_and_values(
    sizes: Sequence[tuple[int, ...]],
    are_latent: Sequence[bool],
    dtype: torch.dtype,
    new: Callable[[tuple[int, ...], torch.dtype], Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """New tensors for groups of keys, and for as many of values: in latent attention these are their keys."""
    keys = [new(size, dtype) for size in sizes]
    parts = zip(sizes, keys, are_latent, strict=True)
    return keys, [of_keys if is_latent else new(size, dtype) for size, of_keys, is_latent in parts]


def _bytes_of_slots(shape: CacheShape) -> Iterator[int]:
    """Bytes of a token in each of the tensors of a pool: keys or values, and scales."""
    for group in shape.kv:
        yield group.num_heads * group.head_dim * shape.stored_kv_dtype.itemsize
        if shape.kv_dtype is not None:
            yield group.num_heads * SCALE_DTYPE.itemsize


def _layers(groups: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(layer for group in groups for layer in group)
