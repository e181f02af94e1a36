"""Allocation of KV pages, which running requests and the prefix cache share by reference counts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int64]
NO_PAGES: Pages = np.empty(0, dtype=np.int64)


class PageAllocator:
    """Reference counts of the pages 1..num_pages; page 0 is padding and is never allocated.

    A page has holders: rows of the request table and nodes of the prefix cache. It is free when it has none. A holder
    may pin the page: rows always do, nodes while a running request uses them. Pages that are held and not pinned can be
    freed by eviction, so an allocation can get at most ``num_available`` pages. Arrays of pages have no duplicates.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_pinned = 0
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int64)  # the first num_free of them are free
        self._holders = np.zeros(num_pages + 1, dtype=np.int32)
        self._pins = np.zeros(num_pages + 1, dtype=np.int32)

    @property
    def num_available(self) -> int:
        """Pages that are free or that eviction could free."""
        return self.num_pages - self.num_pinned

    @property
    def num_evictable(self) -> int:
        """Pages that are held and not pinned."""
        return self.num_available - self.num_free

    def allocate(self, count: int) -> Pages | None:
        """Take ``count`` free pages, held and pinned once; returns None and takes nothing if fewer are free."""
        if count > self.num_free:
            return None
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
        if len(np.unique(pages)) < len(pages):
            raise RuntimeError("a KV page was freed twice in one call")
        if pinned:
            self._unpin(pages)
        self._holders[pages] -= 1
        freed = pages[self._holders[pages] == 0]
        if self._pins[freed].any():
            raise RuntimeError("a KV page lost its last holder while it was pinned")
        self._stack[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)

    def pin(self, pages: Pages) -> None:
        """Pin pages for one of their holders. Raises RuntimeError: a page is free or does not belong to this pool."""
        self._check_held(pages)
        self._pin(pages)

    def unpin(self, pages: Pages) -> None:
        """Remove one pin of these pages. Raises RuntimeError: a page was not pinned."""
        self._check_held(pages)
        self._unpin(pages)

    def holders(self, page: int) -> int:
        """Number of holders of a page."""
        return int(self._holders[page])

    def pins(self, page: int) -> int:
        """Number of pins of a page."""
        return int(self._pins[page])

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
